"""Methods whose arguments are the fields of an options class, so that the fields are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from selfspec.basics.keywords import show_signature
from selfspec.llm.options import Options

P = ParamSpec("P")
Of = TypeVar("Of")
Asked = TypeVar("Asked")
Made = TypeVar("Made")
Given = TypeVar("Given", bound=Options)


def takes(
    options: Callable[P, Given], call: Callable[[Of, Asked, Given], Made]
) -> Callable[Concatenate[Of, Asked, P], Made]:
    """Return a method that takes a request and the fields of the options, and passes both to `call`.

    The method has the name (without a leading `_`), the docstring and the return type of `call`.
    """

    def method(self: Of, asked: Asked, /, *given: P.args, **named: P.kwargs) -> Made:
        return call(self, asked, options(*given, **named))

    method.__name__, method.__doc__ = call.__name__.removeprefix("_"), call.__doc__
    known = list(inspect.signature(call).parameters.values())[:2]  # `self` and the request
    show_signature(method, options, *known, returns=call.__annotations__["return"])
    return method
