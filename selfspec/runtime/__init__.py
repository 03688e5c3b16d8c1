"""The runtime: a forward pass and a KV cache over the leaf modules of a `transformers` model."""

from selfspec.runtime.forward import Runtime

__all__ = ["Runtime"]
