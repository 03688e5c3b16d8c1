"""The loop: sequences join, take rounds, leave. Knows nothing of files, tokenizers and profiles."""

from selfspec.engine.engine import Engine
from selfspec.engine.loop import decode

__all__ = ["Engine", "decode"]
