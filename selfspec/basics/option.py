"""Options as plain data, and signatures whose keyword arguments are the fields of an options class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Command-line option for a dataclass field, as in `Annotated[int, Option(help="Trials.", min=1)]`.

    `flags`: the option's names, if they differ from the field's. `metavar`: the value's name in the help. `min` and
    `max`: inclusive bounds. `panel`: the option's group heading in the help. `hidden`: the option is rare, and only the
    full help shows it.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    panel: str | None = None
    hidden: bool = False


def show_signature(function: Any, options: Callable[..., Any], *first: inspect.Parameter, returns: Any) -> None:
    """Set the signature that `help` and editors show for `function`: the parameters `first`, then those of `options`.

    A parameter annotated with `Annotated[type, Option(...)]` is shown with its bare type. `returns`: the annotation of
    the return value.
    """
    taken = inspect.signature(options)
    plain = [p.replace(annotation=_type_alone(p.annotation)) for p in taken.parameters.values()]
    function.__signature__ = taken.replace(parameters=[*first, *plain], return_annotation=returns)


def _type_alone(annotation: Any) -> Any:
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return getattr(kind, "__forward_arg__", kind)
