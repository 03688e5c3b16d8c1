"""Choice of a model's runtime: the lean one for supported families, else one over the model's own forward."""

from __future__ import annotations

from typing import Any

from selfspec.models.families import is_lean
from selfspec.models.shards import is_sharded
from selfspec.runtime.forward import Runtime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.runtime.worker_group import runtime_over


def open_runtime(model: Any, *, rows: int = 1) -> Runtime:
    """Return a runtime for `model`, which may be tensor parallel.

    Raises `UnsupportedModelError` for a model that neither runtime supports.
    """
    if is_sharded(model):
        return runtime_over(model)
    return Runtime(model, rows=rows) if is_lean(model) else GenericRuntime(model, rows=rows)
