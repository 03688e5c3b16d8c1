"""Functions that take the fields of an options class as arguments, so that these are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin


def show_signature(function: Any, options: Callable[..., Any], *first: inspect.Parameter, returns: Any) -> None:
    """Let `function` be shown, by `help` and editors, as one of `first` and of what `options` takes.

    Of an argument annotated for the command line the type alone is shown.
    """
    taken = inspect.signature(options)
    plain = [p.replace(annotation=_type_alone(p.annotation)) for p in taken.parameters.values()]
    function.__signature__ = taken.replace(parameters=[*first, *plain], return_annotation=returns)


def _type_alone(annotation: Any) -> Any:
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return getattr(kind, "__forward_arg__", kind)
