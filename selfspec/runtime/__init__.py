"""One forward and one cache over a model's own leaf modules. Knows nothing of prompts, tokenizers and profiles."""

from selfspec.runtime.forward import Runtime

__all__ = ["Runtime"]
