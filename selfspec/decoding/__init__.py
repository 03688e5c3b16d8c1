"""The loop: sequences join, take rounds, leave. Knows nothing of files, tokenizers and profiles."""

from selfspec.decoding.engine import Engine
from selfspec.decoding.loop import decode

__all__ = ["Engine", "decode"]
