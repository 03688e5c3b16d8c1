"""Commands whose options are the fields of dataclasses, with shared options, and the help of commands.

An option that is declared `hidden` is rare: `--help` leaves it out and `--help-all` shows it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
import typer.core
from typer.models import OptionInfo, ParameterInfo

from selfspec.basics.errors import SelfspecError
from selfspec.basics.option import Option
from selfspec.models.hub_names import with_revision


class _PlainFlags:
    """Mixin of commands whose flags, `--help` among them, have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, of which flags have an empty metavar."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class PlainCommand(_PlainFlags, typer.core.TyperCommand):
    """A command without types of flags in its help."""


class PlainGroup(_PlainFlags, typer.core.TyperGroup):
    """A group of commands without types of flags in its help."""


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help of a command with its hidden options, and exit."""
    if not wanted:
        return
    for param in ctx.command.params:
        if isinstance(param, typer.core.TyperOption):
            param.hidden = False
    typer.echo(ctx.get_help(), nl=False)
    raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all options, also rare ones."
    ),
]


Level = Literal["quiet", "normal", "verbose"]
_LOG_LEVELS = {"quiet": logging.ERROR, "normal": logging.WARNING, "verbose": logging.INFO}
_level: ContextVar[Level] = ContextVar("level", default="normal")


def verbosity() -> Level:
    """Return how much the running command says: what `--quiet` or `--verbose` set, else `normal`."""
    return _level.get()


@contextmanager
def speaking(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Set `verbosity`, and the level of selfspec's log, for the time of a command.

    Raises `SelfspecError` if both are given.
    """
    if quiet and verbose:
        raise SelfspecError("--quiet and --verbose: expected only one of the two")
    token = _level.set("quiet" if quiet else "verbose" if verbose else "normal")
    log = logging.getLogger("selfspec")
    before = log.level
    log.setLevel(_LOG_LEVELS[verbosity()])
    try:
        yield
    finally:
        log.setLevel(before)
        _level.reset(token)


_OPTIONS = {
    "revision": Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id that --model names; also as ID@REVISION.")
    ],
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress, notes and warnings; errors are printed.")
    ],
    "verbose": Annotated[
        bool, typer.Option("--verbose", "-v", help="Print also what was chosen, and the messages of libraries.")
    ],
    "help_all": HelpAll,
}


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer with the further options; `command` has the parameter `model`.

    The command raises `SelfspecError` if the options do not go together.
    """

    @functools.wraps(command)
    def run(*, revision: str | None, quiet: bool, verbose: bool, **values: Any) -> None:
        with speaking(quiet=quiet, verbose=verbose):
            if revision is not None:
                values["model"] = with_revision(values["model"], revision)
            command(**values)

    signature = inspect.signature(command)
    own = signature.parameters.values()
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None if name == "revision" else False, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *more]
    )
    return run


CommandT = TypeVar("CommandT")
_PARSED_TYPES = (
    bool,
    int,
    float,
    str,
    Path,
    list[str],
)  # types that typer parses; options of other types are read as text
_METAVARS = {str: "TEXT", Path: "PATH", int: "N", float: "X", list[str]: "TEXT"}  # of options that declare none


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


def _name_types(command: Callable[..., Any]) -> None:
    """Give the options of a command a metavar by their type where they declare none."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *marks = get_args(parameter.annotation)
        for mark in marks:
            if isinstance(mark, OptionInfo) and mark.metavar is None:
                mark.metavar = _METAVARS.get(_parsed_type(kind))


def add_command(
    app: typer.Typer, page: str, example: str, *, name: str | None = None, panel: str | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Return a decorator that adds a function to `app` as a command.

    The help ends with the example command line and the command's page in docs/. A function of a dataclass gets an
    option for each of its fields, and the shared options. `name`: by default the function's. `panel`: the group of the
    command in the help.
    """

    def add(function: Callable[..., int | None]) -> Callable[..., int | None]:
        epilog = f"Example: {example}\n\nMore: docs/{page}"
        takes_dataclass = is_dataclass(next(iter(get_type_hints(function).values())))
        called = with_shared_options(flatten_options(function)) if takes_dataclass else function
        _name_types(called)
        app.command(name, cls=PlainCommand, rich_help_panel=panel, epilog=epilog)(called)
        return function

    return add
