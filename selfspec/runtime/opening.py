"""The runtime that serves a model: the lean one for the families that it knows, else the model's own forward."""

from __future__ import annotations

from typing import Any

from selfspec.model.families import is_lean
from selfspec.runtime.forward import Runtime
from selfspec.runtime.generic import GenericRuntime


def open_runtime(model: Any, *, rows: int = 1) -> Runtime:
    """One for `model`. Raises `UnsupportedModelError` for a model that neither serves."""
    return Runtime(model, rows=rows) if is_lean(model) else GenericRuntime(model, rows=rows)
