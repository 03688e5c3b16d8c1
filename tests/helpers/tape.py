"""Records the operations of a pass on a CPU, and repeats them in the same memory: what a CUDA graph does on a GPU.

Every number that Python took from a tensor, or that was no tensor at all, is then as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec.engine.engine import Engine
from selfspec.runtime.cuda_graphs import Replay, Result, check_capturable
from selfspec.speculation.forward_output import ForwardOutput


class Tape:
    """A recorder. `recorded` and `replayed` count; `fails`: as where nothing can be recorded."""

    def __init__(self, *, fails: bool = False) -> None:
        self.recorded = self.replayed = 0
        self.fails = fails

    def pool(self) -> Any:
        return None

    def record(self, body: Callable[[], Result], pool: Any) -> tuple[Result, Replay]:
        assert pool is None
        body()  # as CUDA's does, so that it may be run more than once
        tape = _Recording()
        with tape:
            result = body()
        for tensor in results_of(result):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)  # recording computes nothing
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return result, replay


class Unreplayed:
    """A recorder that runs what it is to record, and replays nothing: for tensors that hold no values."""

    def pool(self) -> Any:
        return None

    def record(self, body: Callable[[], Result], pool: Any) -> tuple[Result, Replay]:
        body()
        return body(), lambda: None


class Rerun:
    """A recorder that runs its body again: as a graph, it reads nothing but what it was given as tensors.

    For kernels that are no operations of torch, which a tape does not see.
    """

    def __init__(self) -> None:
        self.recorded = 0

    def pool(self) -> Any:
        return None

    def record(self, body: Callable[[], Result], pool: Any) -> tuple[Result, Replay]:
        result = body()
        self.recorded += 1

        def replay() -> None:
            for ours, again in zip(results_of(result), results_of(body()), strict=True):
                ours.copy_(again)

        return result, replay


def results_of(result: object) -> list[Tensor]:
    """The tensors that a captured body returned."""
    return _tensors((result.logits, result.hidden) if isinstance(result, ForwardOutput) else result)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        check_capturable(func, args, out)
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = {_memory(t) for t in _tensors((args, kwargs))}
            fresh = [t for t in _tensors(out) if _memory(t) not in given]
            if not fresh and not func._schema.is_mutable:
                continue  # a view of what is there
            for ours, theirs in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(ours) not in given:
                    ours.copy_(theirs)


def _tensors(of: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Waits(TorchDispatchMode):
    """Counts operations that wait for a device, wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "masked_select")
        return func(*args, **(kwargs or {}))


def noted_reads(monkeypatch: Any) -> list[str]:
    """The names of the methods by which Python takes values of tensors from now on, one for each call."""
    reads: list[str] = []
    for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        taken = getattr(torch.Tensor, method)

        def noted(tensor: Tensor, *args: Any, taken: Any = taken, method: str = method, **kwargs: Any) -> Any:
            reads.append(method)
            return taken(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, noted)
    return reads


def rounds_to_end(engine: Engine, reads: list[str], waits: Waits) -> int:
    """Run what has joined to its end: the number of rounds. Counts their `waits`, and notes their `reads` alone."""
    reads.clear()
    rounds = 0
    with waits:
        while engine.running:
            engine.step()
            rounds += 1
    return rounds
