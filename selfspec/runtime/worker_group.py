"""Processes that share a model: the first decides everything, the others do in their part what it does.

The first one's runtime (`LeadingRuntime`) tells the others (`follow`) each pass before it makes it, and each move of
keys in the cache. So whatever is drawn, timed, or read from a clock or a network is the first one's alone, and the
others can never come to another decision. They are told over the CPU, whatever the model's own sums go over. Knows
nothing of drafts, samplers and prompts.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.models.linears import Call
from selfspec.models.shards import check_whole
from selfspec.runtime.cache import ALL_ROWS, Cache, Move
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.runtime.forward import Runtime
from selfspec.runtime.paged import BlockTables
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.draft_path import DraftPath

_FOR_EVER = timedelta(days=3650)  # that the others wait to be told what to do; the end of the first one is told sooner
_FIRST = 4096  # bytes of the first message, which holds most of what is told: each message costs a round trip
_LOST = "a pass was broken off between the processes that share the model, which cannot go on; start them again"

Told = tuple[str, int, tuple[Any, ...]]
"""What to do, with the runtime of which number, and what with."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """How the first process tells the others. What moves nothing between processes waits for the next pass.

    `under_way`: all are at one thing together; where it stays so, that was broken off.
    """

    group: Any = field(default_factory=lambda: dist.new_group(backend="gloo", timeout=_FOR_EVER))
    waiting: deque[Told] = field(default_factory=deque)
    under_way: bool = False
    lock: Any = field(default_factory=threading.RLock)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def later(self, what: str, number: int, *args: Any) -> None:
        """Tell it with the next pass, before that."""
        self.waiting.append((what, number, args))

    @contextmanager
    def together(self, what: str, number: int, *args: Any) -> Iterator[None]:
        """Tell it now, and do one's own part of it inside, where all wait for each other.

        Raises `SelfspecError` where another process is gone, and where one's own part was broken off before: the others
        are then somewhere else.
        """
        with self.lock:
            if self.under_way:
                raise SelfspecError(_LOST)
            self.under_way = True
            try:
                self.tell(what, number, *args)
                yield
            except RuntimeError as error:  # which is what the loss of a process is, too
                raise SelfspecError(f"{_LOST} ({reason(error)})") from error
            self.under_way = False

    def tell(self, what: str, number: int, *args: Any) -> None:
        """To all others, after what waits."""
        told = [self.waiting.popleft() for _ in range(len(self.waiting))]
        data = pickle.dumps([*told, (what, number, args)])
        first = bytearray(_FIRST)
        first[:8] = len(data).to_bytes(8, "little")
        first[8 : 8 + len(data)] = data[: _FIRST - 8]
        self._broadcast(first)
        if len(data) > _FIRST - 8:
            self._broadcast(bytearray(data))

    def hear(self) -> list[Told]:
        """What the first process tells."""
        first = self._broadcast(bytearray(_FIRST))
        size = int.from_bytes(first[:8], "little")
        data = first[8 : 8 + size] if size <= _FIRST - 8 else self._broadcast(bytearray(size))
        told: list[Told] = pickle.loads(data)
        return told

    def _broadcast(self, data: bytearray) -> bytearray:
        """Fill the others' with the first process's."""
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self.group)
        return data

    def all_can(self, done: bool) -> bool:
        """Whether every process has done its part."""
        can = torch.tensor([int(done)])
        dist.all_reduce(can, op=dist.ReduceOp.MIN, group=self.group)
        return bool(can)

    def end(self) -> None:
        """Let the others go."""
        if not self.under_way and dist.is_initialized():
            self.under_way = True
            with suppress(RuntimeError):  # one is gone already
                self.tell("end", 0)


def runtime_over(model: Any) -> Runtime:
    """A runtime over a model that is spread over processes.

    There every process has to ask for it, and only the first gets it: the others follow that one as long as it is
    there, and end then (`SystemExit`). Raises as `Runtime` does.
    """
    team = WorkerGroup()
    if dist.get_rank() == 0:
        return LeadingRuntime(model, team)
    Follower(model, team).run()
    raise SystemExit(0)


def check_alone(runtime: Runtime, what: str) -> None:
    """Raise `SelfspecError` where processes share the model of a runtime, for `what` reads the whole of it."""
    check_whole(runtime.model, what)


class LeadingRuntime(Runtime):
    """The first process's: the others make each pass and each move of keys with it, each with what it has."""

    def __init__(self, model: Any, team: WorkerGroup) -> None:
        self._team, self._number = team, 0
        self._numbers = WeakKeyDictionary[CompiledPath, int]()
        super().__init__(model)
        self.skeleton = replace(self.skeleton, embed=_in_passes(self.skeleton.embed, team))
        weakref.finalize(self, team.end)

    def with_new_cache(self, *, rows: int = 1, blocks: int | None = None, pool: BlockTables | None = None) -> Runtime:
        """As a runtime's, in all processes."""
        other = super().with_new_cache(rows=rows, blocks=blocks, pool=pool)
        assert isinstance(other, LeadingRuntime)
        other._number = next(self._team.numbers)
        other._tell_of_moves()
        self._team.later("beside", other._number, rows)
        weakref.finalize(other, self._team.later, "drop", other._number)
        return other

    def reserve(self, slots: int) -> None:
        """As a runtime's, in all processes. Raises as that does."""
        if slots <= self.cache.slots:
            return
        with self._team.together("reserve", self._number, slots, list(self.cache.length)):
            failed = None
            try:
                super().reserve(slots)
            except SelfspecError as error:
                failed = error
            if not self._team.all_can(failed is None) and failed is None:
                raise RuntimeError(f"another process has no memory for {slots} positions")
        if failed is not None:
            raise failed

    def _allocate(self, slots: int) -> None:
        super()._allocate(slots)
        self._tell_of_moves()

    def _tell_of_moves(self) -> None:
        self._rectangle.told = partial(self._team.later, "move", self._number)

    def compile(self, path: DraftPath) -> CompiledPath:
        """As a runtime's, in all processes. Raises as that does, and for what was trained."""
        if path.trained is not None:
            raise SelfspecError("trained paths read whole weights; expected a path without them in tensor parallel")
        found = super().compile(path)
        if found not in self._numbers:
            number = self._numbers[found] = next(self._team.numbers)
            self._team.later("compile", number, path)
            weakref.finalize(found, self._team.later, "drop", number)
        return found

    def forward(
        self,
        tokens: Tensor,
        positions: int | Tensor,
        *,
        path: CompiledPath | None = None,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
        logits: Literal["all", "last"] | None = "all",
        hidden: Sequence[int] = (),
        between: Sequence[int] = (),
    ) -> ForwardOutput:
        """As a runtime's, in all processes."""
        number = None if path is None else self._numbers[path]
        more = {"slots": slots, "mask": mask, "rows": rows, "logits": logits}
        with self._team.together("forward", self._number, tokens.cpu(), _sent(positions), number, _all_sent(more)):
            return super().forward(
                tokens,
                positions,
                path=path,
                slots=slots,
                mask=mask,
                rows=rows,
                logits=logits,
                hidden=hidden,
                between=between,
            )

    def branch(
        self,
        index: int,
        part: Literal["attention", "mlp"],
        x: Tensor,
        positions: int | Tensor,
        *,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
    ) -> Tensor:
        """As a runtime's, in all processes."""
        more = {"slots": slots, "mask": mask, "rows": rows}
        with self._team.together("branch", self._number, index, part, x.cpu(), _sent(positions), _all_sent(more)):
            return super().branch(index, part, x, positions, slots=slots, mask=mask, rows=rows)


def _sent(value: Any) -> Any:
    """As the others are told it: they have devices of their own."""
    return value.cpu() if isinstance(value, Tensor) else value


def _all_sent(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _sent(value) for name, value in values.items()}


def _in_passes(call: Call, team: WorkerGroup) -> Call:
    """What all processes have to call, and call in passes only."""

    def called(x: Tensor) -> Tensor:
        if not team.under_way:
            raise SelfspecError("this reads the embedding, which is spread over processes; it is not for such a model")
        return call(x)

    return called


class Follower:
    """What another process than the first does: its part of whatever it is told."""

    def __init__(self, model: Any, team: WorkerGroup) -> None:
        self._team, self._first = team, Runtime(model)
        self._runtimes = {0: self._first}
        self._paths: dict[int, CompiledPath] = {}
        self._does: dict[str, Callable[..., object]] = {
            "forward": self._forward,
            "branch": self._branch,
            "move": self._move,
            "reserve": self._reserve,
            "beside": self._beside,
            "compile": self._compile,
            "drop": self._drop,
        }

    def run(self) -> None:
        """Until the first process lets it go. Raises `SelfspecError` where that is gone."""
        what = ""
        while what != "end":
            try:
                for what, number, args in self._team.hear():
                    if what != "end":
                        self._does[what](number, *args)
            except RuntimeError as error:
                said = f"process {dist.get_rank()} has lost the others that share the model: {reason(error)}"
                raise SelfspecError(said) from error

    def _forward(self, number: int, tokens: Tensor, positions: int | Tensor, path: int | None, more: Any) -> None:
        compiled = None if path is None else self._paths[path]
        own = self._runtimes[number]
        own.forward(self._here(tokens), self._here(positions), path=compiled, **self._all_here(more))

    def _branch(self, number: int, index: int, part: Any, x: Tensor, positions: int | Tensor, more: Any) -> None:
        own = self._runtimes[number]
        own.branch(index, part, self._here(x), self._here(positions), **self._all_here(more))

    def _here(self, value: Any) -> Any:
        return value.to(self._first.device) if isinstance(value, Tensor) else value

    def _all_here(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._here(value) for name, value in values.items()}

    def _move(self, number: int, move: Move) -> None:
        cache = self._runtimes[number].cache
        assert isinstance(cache, Cache)
        cache.move(move)

    def _reserve(self, number: int, slots: int, lengths: list[int]) -> None:
        own = self._runtimes[number]
        own.cache.length = lengths
        try:
            own.reserve(slots)
            done = True
        except SelfspecError:
            done = False
        self._team.all_can(done)

    def _beside(self, number: int, rows: int) -> None:
        self._runtimes[number] = self._first.with_new_cache(rows=rows)

    def _compile(self, number: int, path: DraftPath) -> None:
        self._paths[number] = self._first.compile(path)

    def _drop(self, number: int) -> None:
        self._runtimes.pop(number, None)
        self._paths.pop(number, None)
