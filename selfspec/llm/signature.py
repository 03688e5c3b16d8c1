"""Methods whose keyword arguments are the fields of an options class, so that each field is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from selfspec.basics.option import show_signature
from selfspec.llm.options import Options

P = ParamSpec("P")
OwnerT = TypeVar("OwnerT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
OptionsT = TypeVar("OptionsT", bound=Options)


def options_method(
    options: Callable[P, OptionsT], call: Callable[[OwnerT, RequestT, OptionsT], ResultT]
) -> Callable[Concatenate[OwnerT, RequestT, P], ResultT]:
    """Return a method that takes a request and the fields of `options`, and calls `call(self, request, options)`.

    The method has the name (without a leading `_`), the docstring and the return type of `call`.
    """

    def method(self: OwnerT, request: RequestT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return call(self, request, options(*args, **kwargs))

    method.__name__, method.__doc__ = call.__name__.removeprefix("_"), call.__doc__
    known = list(inspect.signature(call).parameters.values())[:2]  # `self` and the request
    show_signature(method, options, *known, returns=call.__annotations__["return"])
    return method
