"""Controllers: when has the draft's confidence dropped so far that the model should verify?

A controller sees the confidence of each drafted token and, after verification, how many were accepted. It may end
a draft after any token, but never withhold the token it was just shown: that would change the distribution of
what is emitted. Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from selfspec.errors import SelfspecError
from selfspec.profile import ControllerSpec

K_LIMIT = 64  # widest draft that any controller may ask for


class Controller(Protocol):
    """Decides, token by token, whether drafting goes on."""

    def go_on(self, confidence: float, drafted: int) -> bool:
        """Whether to draft another token after the `drafted`-th, whose draft probability was `confidence`."""

    def lowest(self, drafted: int) -> float:
        """The lowest confidence of the `drafted`-th token after which it may go on; infinite where it never does."""

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Learn from a verified draft: each token's confidence, and how many from the first on were accepted."""

    def fresh(self) -> Controller:
        """A copy in the state this controller was made in."""

    def spec(self) -> ControllerSpec:
        """Name and options as they now stand (a learnt threshold included), for `make_controller`."""


@dataclass
class _Options:
    """What the controllers share: they are made of their options, which are their dataclass fields."""

    name: ClassVar[str]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Learn nothing."""

    def fresh(self) -> Self:
        """A copy in the state this controller was made in."""
        return dataclasses.replace(self)

    def spec(self) -> ControllerSpec:
        """Name and options, as they now stand."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return ControllerSpec(name=self.name, options=options)

    def _count(self, option: str) -> None:
        value = getattr(self, option)
        if value != int(value) or not 1 <= value <= K_LIMIT:
            raise SelfspecError(f"controller '{self.name}': {option} {value}: want a whole number from 1 to {K_LIMIT}")
        setattr(self, option, int(value))

    def _shares(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option)
            if not 0 <= value <= 1:
                raise SelfspecError(f"controller '{self.name}': {option} {value}: want a number from 0 to 1")


@dataclass
class FixedK(_Options):
    """Always draft `k` tokens (Leviathan et al. 2211.17192)."""

    name: ClassVar[str] = "fixed"
    k: int = 4

    def __post_init__(self) -> None:
        self._count("k")

    def go_on(self, confidence: float, drafted: int) -> bool:
        """Whether fewer than `k` are drafted."""
        return drafted < self.k

    def lowest(self, drafted: int) -> float:
        """Any confidence will do."""
        return 0.0 if drafted < self.k else math.inf


@dataclass
class StaticThreshold(_Options):
    """Draft until a token's confidence is below `threshold`, at most `k_max` tokens."""

    name: ClassVar[str] = "static"
    threshold: float = 0.6
    k_max: int = 12

    def __post_init__(self) -> None:
        self._shares("threshold")
        self._count("k_max")

    def go_on(self, confidence: float, drafted: int) -> bool:
        """Whether the last token was confident enough."""
        return drafted < self.k_max and confidence >= self.threshold

    def lowest(self, drafted: int) -> float:
        """The threshold."""
        return self.threshold if drafted < self.k_max else math.inf


@dataclass
class AdaptiveThreshold(_Options):
    """Draft & Verify's adaptive draft-exiting threshold (2309.08168, section 3.3), its flaws mended.

    After each verified draft, with a = accepted / drafted:

        m <- momentum * m + (1 - momentum) * a
        threshold' = threshold + step  if m < target  else  threshold - step
        threshold <- inertia * threshold + (1 - inertia) * threshold'

    Mended: m starts from the first observation, not from 0; the threshold stays within `floor` and `ceiling`; the
    step is ten times the published one, so that a prompt's worth of rounds can move it; a draft of full length
    counts like any other; and a round that drafted nothing changes nothing.
    """

    name: ClassVar[str] = "adaptive"
    threshold: float = 0.6
    k_max: int = 12
    target: float = 0.9
    momentum: float = 0.5
    inertia: float = 0.9
    step: float = 0.1
    floor: float = 0.05
    ceiling: float = 0.95
    acceptance: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._shares("threshold", "target", "momentum", "inertia", "step", "floor", "ceiling")
        self._count("k_max")
        if not self.floor <= self.threshold <= self.ceiling:
            raise SelfspecError(
                f"controller 'adaptive': threshold {self.threshold} is not between "
                f"floor {self.floor} and ceiling {self.ceiling}"
            )
        self._start = self.threshold

    def go_on(self, confidence: float, drafted: int) -> bool:
        """Whether the last token was confident enough for the threshold as it now stands."""
        return drafted < self.k_max and confidence >= self.threshold

    def lowest(self, drafted: int) -> float:
        """The floor of the threshold."""
        return self.floor if drafted < self.k_max else math.inf

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Update the acceptance estimate and the threshold."""
        if not confidences:
            return
        rate = accepted / len(confidences)
        past = rate if self.acceptance is None else self.acceptance
        self.acceptance = self.momentum * past + (1 - self.momentum) * rate
        moved = self.threshold + (self.step if self.acceptance < self.target else -self.step)
        threshold = self.inertia * self.threshold + (1 - self.inertia) * moved
        self.threshold = min(max(threshold, self.floor), self.ceiling)

    def fresh(self) -> Self:
        """A copy whose threshold is where this one's began."""
        return dataclasses.replace(self, threshold=self._start)


CONTROLLERS: dict[str, type[FixedK] | type[StaticThreshold] | type[AdaptiveThreshold]] = {
    kind.name: kind for kind in (FixedK, StaticThreshold, AdaptiveThreshold)
}


def make_controller(spec: ControllerSpec) -> Controller:
    """The controller that `spec` names. Raises `SelfspecError` for an unknown name or option, or a bad value."""
    if spec.name not in CONTROLLERS:
        raise SelfspecError(f"controller '{spec.name}' is not known; known: {', '.join(CONTROLLERS)}")
    kind = CONTROLLERS[spec.name]
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for option in spec.options:
        if option not in known:
            raise SelfspecError(f"controller '{spec.name}' has no option '{option}'; it has: {', '.join(known)}")
    options: Mapping[str, Any] = spec.options
    return kind(**options)


def parse_controller(text: str) -> ControllerSpec:
    """A controller from text such as `fixed`, `fixed:k=6` or `adaptive:threshold=0.5,k_max=8`.

    Raises `SelfspecError` for anything that `make_controller` would refuse.
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
            raise SelfspecError(f"controller '{text}': want option=number, got '{part}'") from None
        if not equals or not math.isfinite(options[option.strip()]):
            raise SelfspecError(f"controller '{text}': want option=number, got '{part}'")
    spec = ControllerSpec(name=name.strip(), options=options)
    make_controller(spec)
    return spec
