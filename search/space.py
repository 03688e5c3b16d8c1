"""The search space: its variables, which are the draft modes of sub-layers, and draft paths as its points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import LOW, MODES, NOTHING_SKIPPED, DraftPath, Mode, SkipSet, as_path

GRANULARITIES = ("sublayer", "layer")
BYPASSING: tuple[Mode, ...] = ("full", "skip")  # the modes of Draft & Verify
HEAD = "head"

Point = tuple[int, ...]
"""A point of the search space: for each variable, the index of its mode in `Space.choices`."""


@dataclass(frozen=True)
class Space:
    """The search space: a variable for each sub-layer, or each layer, in execution order, and a variable for the head.

    `keep`: layers that are never skipped; `granularity`: one of `GRANULARITIES`. `modes`: the modes that sub-layers may
    have. `fixed`: sub-layers that cannot be quantised; `head`: the modes of the head. A sub-layer or layer that may
    only run in full is not a variable; nor is a head with a single mode, which always has this mode. Raises
    `SelfspecError` for a layer that does not exist, and if there is no variable.
    """

    layers: int
    keep: tuple[int, ...] = ()
    granularity: str = "sublayer"
    modes: tuple[Mode, ...] = BYPASSING
    fixed: SkipSet = NOTHING_SKIPPED
    head: tuple[Mode, ...] = ("full",)

    def __post_init__(self) -> None:
        wrong = next((layer for layer in self.keep if not 0 <= layer < self.layers), None)
        if wrong is not None:
            raise SelfspecError(
                f"keep: layer {wrong} does not exist; the model has {self.layers} layers, 0 to {self.layers - 1}"
            )
        if not self.variables and len(self.head) < 2:
            if "skip" in self.modes and len({*self.keep}) == self.layers:
                raise SelfspecError("keep: every layer is kept, so that nothing can be skipped")
            raise SelfspecError("modes: every sub-layer can only run in full here; expected skip among the modes")

    @cached_property
    def _parts(self) -> tuple[tuple[SkipSet, tuple[Mode, ...]], ...]:
        each = [(SkipSet((i,), ()), SkipSet((), (i,))) for i in range(self.layers)]
        by_layer = self.granularity == "layer"
        parts = (
            [SkipSet((i,), (i,)) for i in range(self.layers)] if by_layer else [part for pair in each for part in pair]
        )
        part_modes = ((part, self._modes_of(part)) for part in parts)
        return tuple((part, modes) for part, modes in part_modes if len(modes) > 1)

    def _modes_of(self, part: SkipSet) -> tuple[Mode, ...]:
        (layer,) = {*part.attention, *part.mlp}
        stays = set(part.attention) & set(self.fixed.attention) or set(part.mlp) & set(self.fixed.mlp)
        left_out = {"skip"} if layer in self.keep else set()
        left_out |= {*LOW} if stays else set()
        return tuple(mode for mode in MODES if mode in self.modes and mode not in left_out)

    @cached_property
    def variables(self) -> tuple[SkipSet, ...]:
        """The sub-layers of each variable except the head."""
        return tuple(part for part, _ in self._parts)

    @cached_property
    def choices(self) -> tuple[tuple[Mode, ...], ...]:
        """The modes of each variable, full first; the head comes last, if it has a choice."""
        head = [self.head] if len(self.head) > 1 else []
        return (*(modes for _, modes in self._parts), *head)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the variables, such as `attention 3`, `mlp 3`, `layer 3` and `head`."""
        kinds = {(True, True): "layer", (True, False): "attention", (False, True): "mlp"}
        names = [f"{kinds[bool(p.attention), bool(p.mlp)]} {(p.attention or p.mlp)[0]}" for p in self.variables]
        return (*names, HEAD) if len(self.head) > 1 else tuple(names)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def base(self) -> Mode:
        """The mode that sub-layers have by default: the first allowed of int8 and int4, else full."""
        return next((mode for mode in LOW if mode in self.modes), "full")

    @cached_property
    def start(self) -> Point:
        """The point with every variable in the base mode if the variable may have it, else in full."""
        return self.all_in(self.base)

    @cached_property
    def uniform(self) -> tuple[DraftPath, ...]:
        """The paths with every sub-layer in one mode: for each quantised mode of the space, the base mode first."""
        return tuple(self.path(self.all_in(mode)) for mode in LOW if mode in self.modes)

    def all_in(self, mode: Mode) -> Point:
        """Return the point with each variable in the first mode allowed for it of: `mode`, the base mode, full.

        The head is in int8 if it may be, unless `mode` is full.
        """
        wanted: tuple[Mode, ...] = (mode, self.base)
        points = [next((modes.index(m) for m in wanted if m in modes), 0) for _, modes in self._parts]
        return (*points, int(mode != "full")) if len(self.head) > 1 else tuple(points)

    def path(self, point: Sequence[int]) -> DraftPath:
        """Return the draft path of a point."""
        modes: list[Mode] = ["full"] * (2 * self.layers)
        for part, choices, number in zip(self.variables, self.choices, point, strict=False):
            for i in (*part.attention, *(self.layers + i for i in part.mlp)):
                modes[i] = choices[number]
        head = self.choices[-1][point[-1]] if len(self.head) > 1 else self.head[0]
        return DraftPath.from_modes(modes, head="full" if head == "skip" else head)

    def point(self, path: DraftPath | SkipSet) -> Point:
        """Return the nearest point to a path; a variable with mixed modes, or a mode not among its choices is full."""
        path = as_path(path)
        modes = path.modes(self.layers)
        indices = []
        for part, choices in zip(self.variables, self.choices, strict=False):
            mine = {modes[i] for i in (*part.attention, *(self.layers + i for i in part.mlp))}
            mode = mine.pop() if len(mine) == 1 else "full"
            indices.append(choices.index(mode) if mode in choices else 0)
        if len(self.head) > 1:
            indices.append(self.head.index(path.head) if path.head in self.head else 0)
        return tuple(indices)

    def nearest(self, path: DraftPath | SkipSet) -> DraftPath:
        """Return the nearest path in this space."""
        return self.path(self.point(path))

    def choose(self, numbers: Collection[int], mode: Mode = "skip", *, rest: Point | None = None) -> DraftPath:
        """Return the path with variables `numbers` in `mode`, if allowed, and all others as in `rest` (None: full)."""
        point = list(rest or (0,) * len(self))
        for i in numbers:
            if mode in self.choices[i]:
                point[i] = self.choices[i].index(mode)
        return self.path(point)


def parse_keep(text: str) -> tuple[int, ...]:
    """Parse layer numbers such as `0,15`. Raises `SelfspecError` for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise SelfspecError(f"keep '{text}': expected layer numbers such as 0,15")
    return tuple(sorted({int(part) for part in parts}))


def parse_modes(text: str) -> tuple[Mode, ...]:
    """Parse modes such as `full,int8,skip`, sorted as in `MODES`. Raises `SelfspecError` for anything else."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    wrong = next((part for part in names if part not in MODES), None)
    if wrong is not None:
        raise SelfspecError(f"modes: '{wrong}' is not known; known: {', '.join(MODES)}")
    modes: tuple[Mode, ...] = tuple(mode for mode in MODES if mode in (*names, "full"))
    if len(modes) < 2:
        raise SelfspecError(f"modes '{text}': expected at least one mode beside full, of {', '.join(MODES[1:])}")
    return modes
