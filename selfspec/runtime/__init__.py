"""The runtimes: a forward pass and a KV cache over a `transformers` model."""

from selfspec.runtime.base import Runtime
from selfspec.runtime.factory import open_runtime
from selfspec.runtime.forward import LeanRuntime

__all__ = ["LeanRuntime", "Runtime", "open_runtime"]
