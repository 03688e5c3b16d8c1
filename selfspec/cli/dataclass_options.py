"""Commands whose options are the fields of a dataclass and its nested dataclasses, so that nothing is written twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from selfspec.basics.option import Option

CommandT = TypeVar("CommandT")
_PARSED_TYPES = (
    bool,
    int,
    float,
    str,
    Path,
    list[str],
)  # types that typer parses; options of other types are read as text


def flatten_options(command: Callable[[CommandT], int | None]) -> Callable[..., None]:
    """Return a function for typer that calls `command`, with an option for each field of the dataclass it takes.

    A field is an option (or an argument) if its annotation says so, as in `Annotated[int, Option(help=...)]`; a field
    that is a dataclass contributes its own fields; other fields are not on the command line. The module of
    the dataclass must not have `from __future__ import annotations`. Omitted options keep their fields' defaults.
    `command` returns the exit code; None counts as 0.
    """
    kind = next(iter(get_type_hints(command).values()))

    def run(**values: Any) -> None:
        if code := command(_build(kind, values)):
            raise typer.Exit(code)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature(list(_parameters(kind)))  # type: ignore[attr-defined]
    return run


def _parameters(kind: Any) -> Iterator[Parameter]:
    for field in fields(kind):
        if is_dataclass(field.type):
            yield from _parameters(field.type)
        elif (option := _option(field)) is not None:
            parsed_type, default = _parsed_type(get_args(field.type)[0]), field.default
            if default is MISSING:
                default = Parameter.empty
            elif get_origin(parsed_type) is not None or not isinstance(default, parsed_type):
                parsed_type, default = parsed_type | None, None
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[parsed_type, option]
            )


def _build(kind: type[CommandT], values: Mapping[str, Any]) -> CommandT:
    kwargs: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if isinstance(field.type, type) and is_dataclass(field.type):
            kwargs[field.name] = _build(field.type, values)
        elif _option(field) is not None and values[field.name] is not None:
            kwargs[field.name] = values[field.name]
    return kind(**kwargs)


def _option(field: Field[Any]) -> ParameterInfo | None:
    """Return a field's typer option or argument; None if the field is not on the command line."""
    marks = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
    mark = next((mark for mark in marks if isinstance(mark, (ParameterInfo, Option))), None)
    return _typer_option(mark) if isinstance(mark, Option) else mark


def _typer_option(option: Option) -> ParameterInfo:
    """Return typer's form of an option defined outside the command line."""
    made: ParameterInfo = typer.Option(
        *option.flags,
        help=option.help,
        metavar=option.metavar,
        min=option.min,
        max=option.max,
        rich_help_panel=option.panel,
        hidden=option.hidden,
    )
    return made


def _parsed_type(kind: Any) -> Any:
    """Return the type that typer parses for a field's type `kind`, in which None is ignored.

    Returns `str` for types that typer cannot parse.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    non_none = [part for part in kinds if part is not NoneType]
    return non_none[0] if len(non_none) == 1 and non_none[0] in _PARSED_TYPES else str
