"""The runtime: one forward and one KV cache over a model's own leaf modules."""

from selfspec.runtime.forward import Runtime

__all__ = ["Runtime"]
