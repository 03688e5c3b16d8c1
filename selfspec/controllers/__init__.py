"""Controllers decide when drafting stops and the target verifies, by the draft's confidence in its tokens.

A controller sees the confidence of each drafted token and, after verification, the number of accepted tokens. It may
end a draft after any token, but must never withhold the token it was just shown: that would change the distribution of
the emitted tokens. `DraftLoop` applies a controller to one draft; `register` adds a controller. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from selfspec.basics.errors import SelfspecError, check_registered
from selfspec.types.acceptance import PayoffModel
from selfspec.types.controller import ControllerSpec

from .base import Controller
from .batch_scheduler import BatchDraftScheduler
from .draft_loop import DraftLoop
from .rate import RateOptimal
from .thresholds import AdaptiveThreshold, FixedK, StaticThreshold

__all__ = [
    "CONTROLLERS",
    "AdaptiveThreshold",
    "BatchDraftScheduler",
    "Controller",
    "DraftLoop",
    "FixedK",
    "RateOptimal",
    "StaticThreshold",
    "make_controller",
    "parse_controller",
    "register",
]

KINDS: tuple[type[Controller], ...] = (FixedK, StaticThreshold, AdaptiveThreshold, RateOptimal)
CONTROLLERS = {kind.name: kind for kind in KINDS}


def register(kind: type[Controller]) -> None:
    """Make a controller known by its `name`, for `make_controller`, profiles and `--controller`.

    A class may be registered again, as in a re-run notebook. Raises `SelfspecError` for a class without a name, and for
    a name that another class has.
    """
    name = getattr(kind, "name", None)
    if not isinstance(name, str):
        raise SelfspecError(f'{kind.__name__}: no name; expected the class variable name: ClassVar[str] = "..."')
    check_registered(f"controller '{name}'", kind, CONTROLLERS.get(name))
    CONTROLLERS[name] = kind


def make_controller(spec: ControllerSpec, payoff: PayoffModel | None = None) -> Controller:
    """Make the controller that `spec` names; `payoff`: the costs for a rate-optimal controller (None: default costs).

    Raises `SelfspecError` for an unknown name or option, or a bad value.
    """
    if spec.name not in CONTROLLERS:
        raise SelfspecError(f"controller '{spec.name}' is not known; known: {', '.join(CONTROLLERS)}")
    kind = CONTROLLERS[spec.name]
    known = kind.known()
    for option in spec.options:
        if option not in known:
            raise SelfspecError(f"controller '{spec.name}' has no option '{option}'; it has: {', '.join(known)}")
    options: Mapping[str, Any] = spec.options
    controller = kind(**options)
    return controller if payoff is None else controller.with_payoff(payoff)


def parse_controller(text: str) -> ControllerSpec:
    """Parse a controller from text such as `fixed`, `fixed:k=6` or `adaptive:threshold=0.5,k_max=8`.

    Raises `SelfspecError` for a malformed text, and as `make_controller` does.
    """
    name, _, rest = text.partition(":")
    options: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if option.strip() in options:
            raise SelfspecError(f"controller '{text}': {option.strip()} is given twice")
        try:
            options[option.strip()] = float(value)
        except ValueError:
            raise SelfspecError(f"controller '{text}': expected option=number, got '{part}'") from None
        if not equals or not math.isfinite(options[option.strip()]):
            raise SelfspecError(f"controller '{text}': expected option=number, got '{part}'")
    spec = ControllerSpec(name=name.strip(), options=options)
    make_controller(spec)
    return spec
