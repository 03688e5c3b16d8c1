"""A command whose options are the fields of a class, of classes among them, so that nothing is written twice."""

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

Given = TypeVar("Given")
_READ = (bool, int, float, str, Path, list[str])  # what typer makes of text; any other type is given as text


def flat(command: Callable[[Given], int | None]) -> Callable[..., None]:
    """`command` as typer takes it: with an option for each field, instead of the class that it is called with.

    A field is an option (or an argument) if its annotation says so, as in `Annotated[int, Option(help=...)]`; a
    field that is a dataclass stands for its own fields; any other is none of the command line. Annotations must be
    there as values. Options that are left out keep their fields' defaults. What `command` returns is the exit code.
    """
    kind = next(iter(get_type_hints(command).values()))

    def run(**given: Any) -> None:
        if code := command(_made(kind, given)):
            raise typer.Exit(code)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature(list(_parameters(kind)))  # type: ignore[attr-defined]
    return run


def _parameters(kind: Any) -> Iterator[Parameter]:
    for field in fields(kind):
        if is_dataclass(field.type):
            yield from _parameters(field.type)
        elif (option := _option(field)) is not None:
            read, default = _read_as(get_args(field.type)[0]), field.default
            if default is MISSING:
                default = Parameter.empty
            elif get_origin(read) is not None or not isinstance(default, read):
                read, default = read | None, None
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[read, option])


def _made(kind: type[Given], given: Mapping[str, Any]) -> Given:
    made: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if isinstance(field.type, type) and is_dataclass(field.type):
            made[field.name] = _made(field.type, given)
        elif _option(field) is not None and given[field.name] is not None:
            made[field.name] = given[field.name]
    return kind(**made)


def _option(field: Field[Any]) -> ParameterInfo | None:
    """Return how a field is given on the command line, or None where the command line does not have it."""
    marks = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
    mark = next((mark for mark in marks if isinstance(mark, (ParameterInfo, Option))), None)
    return _typer_option(mark) if isinstance(mark, Option) else mark


def _typer_option(option: Option) -> ParameterInfo:
    """Return typer's form of an option that a room below the command line describes."""
    made: ParameterInfo = typer.Option(
        *option.flags,
        help=option.help,
        metavar=option.metavar,
        min=option.min,
        max=option.max,
        rich_help_panel=option.panel,
    )
    return made


def _read_as(kind: Any) -> Any:
    """The type that typer reads for a field of this type, which may be None besides."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    some = [part for part in kinds if part is not NoneType]
    return some[0] if len(some) == 1 and some[0] in _READ else str
