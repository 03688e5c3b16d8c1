"""Tensor parallel processes: the first process decides everything, the others compute their shards of each pass.

The first process has rank 0. Its runtime (`LeadingRuntime`) sends the others (`Follower`) each pass before running it
itself, and each move within the cache. Only the first process samples, measures times and serves requests, so that the
processes can never decide differently. Commands are broadcast over gloo on the CPU, whatever backend the model's
all-reduces use.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.models.families.base import SubLayer
from selfspec.models.linears import Call
from selfspec.models.shards import check_unsharded
from selfspec.runtime.attention_inputs import PassInputs
from selfspec.runtime.base import Logits, Runtime, Wanted
from selfspec.runtime.cache import Cache, Move
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.paged import BlockTables
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.draft_path import DraftPath

_FOR_EVER = timedelta(days=3650)  # timeout of followers; they notice sooner that the first process ended
_FIRST = 4096  # bytes of the first message, which fits most commands: each message costs a round trip
_LOST = "tensor parallel: a pass was interrupted, so the processes are out of step; start all processes again"

Command = tuple[str, int, tuple[Any, ...]]
"""A command: its name, the number of the runtime or path, and its arguments."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """The channel that sends commands from the first process to all other processes.

    A command without collective work (`enqueue`) is sent together with the next `collective` command. `under_way` is
    true while all processes run one command together, and stays true if that command was interrupted. `numbers` yields
    the numbers of new runtimes and paths.
    """

    group: Any = field(default_factory=lambda: dist.new_group(backend="gloo", timeout=_FOR_EVER))
    waiting: deque[Command] = field(default_factory=deque)
    under_way: bool = False
    lock: Any = field(default_factory=threading.RLock)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def enqueue(self, what: str, number: int, *args: Any) -> None:
        """Queue a command to be sent before the next one that all processes run together."""
        self.waiting.append((what, number, args))

    @contextmanager
    def collective(self, what: str, number: int, *args: Any) -> Iterator[None]:
        """Send a command now; the body of the context runs this process's share, in step with the other processes.

        Raises `SelfspecError` if another process has ended, or if an earlier command was interrupted, as the processes
        are then out of step.
        """
        with self.lock:
            if self.under_way:
                raise SelfspecError(_LOST)
            self.under_way = True
            try:
                self.send(what, number, *args)
                yield
            except RuntimeError as error:  # torch raises it when a process is lost, too
                raise SelfspecError(f"{_LOST} ({reason(error)})") from error
            self.under_way = False

    def send(self, what: str, number: int, *args: Any) -> None:
        """Send the queued commands, then this one, to all other processes."""
        commands = [self.waiting.popleft() for _ in range(len(self.waiting))]
        data = pickle.dumps([*commands, (what, number, args)])
        first = bytearray(_FIRST)
        first[:8] = len(data).to_bytes(8, "little")
        first[8 : 8 + len(data)] = data[: _FIRST - 8]
        self._broadcast(first)
        if len(data) > _FIRST - 8:
            self._broadcast(bytearray(data))

    def receive(self) -> list[Command]:
        """Wait for the next commands of the first process and return them."""
        first = self._broadcast(bytearray(_FIRST))
        size = int.from_bytes(first[:8], "little")
        data = first[8 : 8 + size] if size <= _FIRST - 8 else self._broadcast(bytearray(size))
        commands: list[Command] = pickle.loads(data)
        return commands

    def _broadcast(self, data: bytearray) -> bytearray:
        """Broadcast `data` from the first process, overwriting `data` in all other processes; return `data`."""
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self.group)
        return data

    def all_can(self, done: bool) -> bool:
        """Return whether `done` is true in every process."""
        can = torch.tensor([int(done)])
        dist.all_reduce(can, op=dist.ReduceOp.MIN, group=self.group)
        return bool(can)

    def end(self) -> None:
        """Tell the other processes to end; do nothing if a command is under way or was interrupted."""
        if not self.under_way and dist.is_initialized():
            self.under_way = True
            with suppress(RuntimeError):  # one is gone already
                self.send("end", 0)


def runtime_over(model: Any) -> Runtime:
    """Return a runtime over a tensor parallel model.

    Every process has to call this function. It returns only in the process of rank 0: all others run that process's
    commands until that process ends, then raise `SystemExit`. Raises as `Runtime` does.
    """
    team = WorkerGroup()
    if dist.get_rank() == 0:
        return LeadingRuntime(model, team)
    Follower(model, team).run()
    raise SystemExit(0)


def check_runtime_unsharded(runtime: Runtime, what: str) -> None:
    """Raise `SelfspecError` if a runtime's model is tensor parallel; `what` (in the message) reads whole weights."""
    check_unsharded(runtime.model, what)


class LeadingRuntime(LeanRuntime):
    """The first process's runtime: all other processes run each pass and each cache move too, on their own shards."""

    def __init__(self, model: Any, team: WorkerGroup) -> None:
        self._team, self._number = team, 0
        self._numbers = WeakKeyDictionary[CompiledPath, int]()
        super().__init__(model)
        self.skeleton = replace(self.skeleton, embed=_in_passes(self.skeleton.embed, team))
        weakref.finalize(self, team.end)

    def with_new_cache(self, *, rows: int = 1, blocks: int | None = None, pool: BlockTables | None = None) -> Self:
        """Return another runtime with a new KV cache, created in all processes."""
        other = super().with_new_cache(rows=rows, blocks=blocks, pool=pool)
        other._number = next(self._team.numbers)
        other._enqueue_moves()
        self._team.enqueue("with_new_cache", other._number, rows)
        weakref.finalize(other, self._team.enqueue, "drop", other._number)
        return other

    def reserve(self, slots: int) -> None:
        """Grow the cache in all processes. Raises as `Runtime.reserve`, also if another process runs out of memory."""
        if slots <= self.cache.slots:
            return
        with self._team.collective("reserve", self._number, slots, list(self.cache.length)):
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
        self._enqueue_moves()

    def _enqueue_moves(self) -> None:
        self._static_cache.on_move = partial(self._team.enqueue, "move", self._number)

    def compile(self, path: DraftPath) -> CompiledPath:
        """Compile a path in all processes.

        Raises as `Runtime.compile`, and `SelfspecError` for a path with trained weights.
        """
        if path.trained is not None:
            raise SelfspecError("draft path: trained weights are not supported in tensor parallel")
        compiled = super().compile(path)
        if compiled not in self._numbers:
            number = self._numbers[compiled] = next(self._team.numbers)
            self._team.enqueue("compile", number, path)
            weakref.finalize(compiled, self._team.enqueue, "drop", number)
        return compiled

    def run_pass(self, tokens: Tensor, inputs: PassInputs, path: CompiledPath | None, wanted: Wanted) -> ForwardOutput:
        """Run `Runtime.forward` in all processes."""
        number = None if path is None else self._numbers[path]
        with self._team.collective("forward", self._number, tokens.cpu(), _moved(inputs), number, wanted.logits):
            return super().run_pass(tokens, inputs, path, wanted)

    def run_branch(self, index: int, part: SubLayer, x: Tensor, inputs: PassInputs) -> Tensor:
        """Run `Runtime.branch` in all processes."""
        with self._team.collective("branch", self._number, index, part, x.cpu(), _moved(inputs)):
            return super().run_branch(index, part, x, inputs)


def _moved(inputs: PassInputs, device: torch.device | str = "cpu") -> PassInputs:
    """Return the inputs with tensors on another device; by default the CPU, from which they are sent to processes."""
    return PassInputs._make(value.to(device) if isinstance(value, Tensor) else value for value in inputs)


def _in_passes(call: Call, team: WorkerGroup) -> Call:
    """Guard a collective call: outside a pass that all processes run together, it raises `SelfspecError`."""

    def called(x: Tensor) -> Tensor:
        if not team.under_way:
            raise SelfspecError("tensor parallel: the embedding is sharded and can be read in passes only")
        return call(x)

    return called


class Follower:
    """The command loop of a process whose rank is not 0: the process runs its share of each command."""

    def __init__(self, model: Any, team: WorkerGroup) -> None:
        self._team, self._first = team, LeanRuntime(model)
        self._runtimes = {0: self._first}
        self._paths: dict[int, CompiledPath] = {}
        self._handlers: dict[str, Callable[..., object]] = {
            "forward": self._forward,
            "branch": self._branch,
            "move": self._move,
            "reserve": self._reserve,
            "with_new_cache": self._with_new_cache,
            "compile": self._compile,
            "drop": self._drop,
        }

    def run(self) -> None:
        """Run the commands that the process of rank 0 sends, until it sends "end".

        Raises `SelfspecError` if another process is lost.
        """
        what = ""
        while what != "end":
            try:
                for what, number, args in self._team.receive():
                    if what != "end":
                        self._handlers[what](number, *args)
            except RuntimeError as error:
                message = f"process {dist.get_rank()} has lost the other tensor parallel processes: {reason(error)}"
                raise SelfspecError(message) from error

    def _forward(self, number: int, tokens: Tensor, inputs: PassInputs, path: int | None, logits: Logits) -> None:
        compiled = None if path is None else self._paths[path]
        device = self._first.device
        self._runtimes[number].run_pass(tokens.to(device), _moved(inputs, device), compiled, Wanted(logits))

    def _branch(self, number: int, index: int, part: SubLayer, x: Tensor, inputs: PassInputs) -> None:
        device = self._first.device
        self._runtimes[number].run_branch(index, part, x.to(device), _moved(inputs, device))

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

    def _with_new_cache(self, number: int, rows: int) -> None:
        self._runtimes[number] = self._first.with_new_cache(rows=rows)

    def _compile(self, number: int, path: DraftPath) -> None:
        self._paths[number] = self._first.compile(path)

    def _drop(self, number: int) -> None:
        self._runtimes.pop(number, None)
        self._paths.pop(number, None)
