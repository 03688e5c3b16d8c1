"""The runtimes: a forward pass and a KV cache over a `transformers` model."""

from __future__ import annotations

from typing import Any

from selfspec.models.families import is_lean
from selfspec.models.shards import is_sharded
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.runtime.worker_group import runtime_over

__all__ = ["LeanRuntime", "Runtime", "open_runtime"]


def open_runtime(model: Any, *, rows: int = 1) -> Runtime:
    """Return a runtime with `rows` cache rows for `model`; for a tensor parallel model, always with one row.

    Raises `UnsupportedModelError` for a model that neither kind of runtime supports.
    """
    if is_sharded(model):
        return runtime_over(model)
    return LeanRuntime(model, rows=rows) if is_lean(model) else GenericRuntime(model, rows=rows)
