"""The engine: continuous batching of sequences, which join, take rounds together, and leave between rounds."""

from selfspec.engine.engine import Engine, decode

__all__ = ["Engine", "decode"]
