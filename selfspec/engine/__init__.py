"""The engine: sequences join, take rounds together (continuous batching), and leave."""

from selfspec.engine.engine import Engine
from selfspec.engine.loop import decode

__all__ = ["Engine", "decode"]
