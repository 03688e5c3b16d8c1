"""CUDA graphs of passes over few tokens: captured once for each path and shape, and replayed as one launch.

A pass over few tokens launches hundreds of small kernels, which takes the host longer than the device needs to run the
kernels. A captured pass reads tokens, positions, slots and masks from tensors of fixed shape, which are filled before
each replay. Its KV length is rounded up, and the additional slots are masked. It copies no value back to the host.

A pass is captured when its shape first occurs. The clock that times rounds stands still meanwhile
(`basics/machine.py`), so that no draft is charged for a capture.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.basics.errors import reason, switched
from selfspec.basics.machine import clock_stopped
from selfspec.models.linears import is_plain
from selfspec.models.shards import is_sharded
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.attention_inputs import PassInputs, fused_backends
from selfspec.runtime.compiled_path import LeanPath
from selfspec.runtime.eager_runner import EagerRunner
from selfspec.runtime.workspace import Scratch
from selfspec.speculation.forward_output import ForwardOutput

ENV_VAR = "SELFSPEC_GRAPHS"  # environment variable: 0 disables capture
ROWS = 64  # most tokens of a captured pass: running a larger pass takes longer than launching its kernels
SHAPES = 512  # most shapes captured for a path
_KV_LEN_STEP = 1024  # slots: the least multiple that the KV length is rounded up to, see `rounded_up`
# Operations whose result the host has to wait for: values, sizes that depend on values, numbers brought from the host.
_HOST_READS = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "lift_fresh", "lift_fresh_copy"}
_COPIES = {"copy_", "_to_copy"}
_log = logging.getLogger("selfspec")

Replay = Callable[[], object]
Result = TypeVar("Result")


def check_capturable(func: Any, args: Sequence[Any], out: Any) -> None:
    """Raise `RuntimeError` for an operation that no capture can hold, as the host waits for it."""
    name = func.overloadpacket.__name__
    if name in _HOST_READS or (name in _COPIES and args[1 if name == "copy_" else 0].device.type != out.device.type):
        raise RuntimeError(f"{func} moves values between host and device, which cannot be captured")


class CaptureCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations as they are, and raises `RuntimeError` as `check_capturable` does.

    A capture that fails halfway can leave allocator and random number generator unusable, so that whether a pass can be
    captured is found out in its warm-up, before anything is captured.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and check one operation."""
        out = func(*args, **(kwargs or {}))
        check_capturable(func, args, out)
        return out


class Recorder(Protocol):
    """Capture and replay of a device's work."""

    def pool(self) -> Any:
        """Return a memory pool that all captured passes of one cache share, as only one of them runs at a time."""

    def record(self, body: Callable[[], Result], pool: Any) -> tuple[Result, Replay]:
        """Return the result of `body`, and a function that replays the capture into the result's tensors.

        Raises `RuntimeError` if `body` cannot be captured, for example because it copies values to the host.
        """


class CudaRecorder:
    """Capture as CUDA graphs on one device.

    All captures use one side stream: torch keeps memory, and cuBLAS a workspace of 32 MiB, for every stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = None  # made at the first capture, as it needs the device
        self._lock = (
            threading.Lock()
        )  # runtimes with a cache of their own share a recorder, and a stream holds one capture

    def pool(self) -> Any:
        """Return a handle of a new CUDA graph memory pool."""
        with torch.cuda.device(self._device):
            return torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Result], pool: Any) -> tuple[Result, Replay]:
        """Run `body` once as a warm-up, then capture it; CUDA work of other threads does not break the capture."""
        with torch.cuda.device(self._device), self._lock:
            side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            before = torch.cuda.current_stream()
            side.wait_stream(before)
            with torch.cuda.stream(side), CaptureCheck():  # type: ignore[no-untyped-call]
                body()
            before.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    result = body()
            except BaseException:
                torch.cuda.set_stream(before)  # a capture that cannot end leaves its own stream the current one
                raise
        return result, graph.replay


def recorder_for(model: Any, skeleton: Skeleton) -> Recorder | None:
    """Return a recorder if the whole model is on one CUDA device, unsharded, and `ENV_VAR` is not off; else None.

    Also None for a model with adapters: a replay would compute with the adapter that was active at the capture.
    """
    device = skeleton.device
    places = {device, *(block.device for block in skeleton.blocks)}
    off = switched(ENV_VAR) is False or hasattr(model, "peft_config")
    return None if off or device.type != "cuda" or len(places) > 1 or is_sharded(model) else CudaRecorder(device)


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether any module has hooks, a replaced forward or parametrisations, which a replay would not run."""
    return not all(map(is_plain, modules))


class GraphKey(NamedTuple):
    """The key of a captured pass: batch size, tokens per row, rounded KV length, cache rows, masks, hidden states.

    `masks` is the batch size of the attention mask. 0 means no mask: slots equal positions and are consecutive, and
    attention is causal. `hidden` is as in `Runtime.forward`.
    """

    batch: int
    n: int
    kv_len: int
    rows: tuple[int | None, int | None]
    masks: int
    hidden: tuple[int, ...]


class _Inputs:
    """The fixed input tensors of a captured pass."""

    def __init__(self, shape: GraphKey, device: torch.device) -> None:
        def empty(rows: int) -> Tensor:
            return torch.zeros(rows, shape.n, dtype=torch.long, device=device)

        self.ids, self.positions = empty(shape.batch), empty(shape.batch)
        self.slots = empty(shape.batch) if shape.masks else self.positions
        mask_shape = (shape.masks, shape.n, shape.kv_len)
        self.mask = torch.zeros(mask_shape, dtype=torch.bool, device=device) if shape.masks else None

    def fill(self, tokens: Tensor, pass_inputs: PassInputs, numbers: Tensor) -> None:
        """Copy a pass's inputs into the fixed tensors; `numbers` is 0, 1, 2, ... on the device."""

        def put(into: Tensor, source: int | Tensor) -> None:
            into.copy_(numbers[source : source + pass_inputs.n] if isinstance(source, int) else source)

        self.ids.copy_(tokens)
        put(self.positions, pass_inputs.positions)
        if self.mask is not None and pass_inputs.mask is not None:
            put(self.slots, pass_inputs.slots)
            kv_len = pass_inputs.mask.shape[-1]
            self.mask[..., :kv_len].copy_(pass_inputs.mask)
            self.mask[..., kv_len:].zero_()


class _Graph(NamedTuple):
    """A captured pass: its input tensors, workspace, output and replay function."""

    inputs: _Inputs
    scratch: Scratch
    step: ForwardOutput
    replay: Replay


class UncapturablePaths:
    """The paths of one model that cannot be captured. Only the first failure is logged, with its reason."""

    def __init__(self) -> None:
        self._paths: WeakSet[LeanPath] = WeakSet()
        self._logged = False

    def __contains__(self, compiled: LeanPath) -> bool:
        return compiled in self._paths

    def add(self, compiled: LeanPath, error: Exception) -> None:
        """Add a path, and log the error if no earlier error was logged."""
        self._paths.add(compiled)
        if not self._logged:
            _log.warning("CUDA graph capture failed; passes run eagerly (%s)", reason(error))
        self._logged = True


class Graphs:
    """The captured passes of one cache.

    A shape is captured when it first occurs. Passes of more than `ROWS` tokens, and passes over several tokens without
    logits for each, are never captured: they are prompts', whose lengths seldom recur.
    """

    def __init__(
        self, passes: EagerRunner, recorder: Recorder, uncapturable: UncapturablePaths, positions: int
    ) -> None:
        """Prepare to capture passes of the eager runner `passes`, whose RoPE tables have `positions` positions."""
        self.passes, self._recorder, self._pool, self._uncapturable = passes, recorder, recorder.pool(), uncapturable
        self._slots, self.device = passes.cache.slots, passes.skeleton.device
        self.end = min(positions, self._slots)  # captured passes are over slots and positions before this one
        self._numbers = torch.arange(self._slots, device=self.device)
        self._made: WeakKeyDictionary[LeanPath, dict[GraphKey, _Graph]] = WeakKeyDictionary()
        self._used: WeakKeyDictionary[LeanPath, set[int]] = WeakKeyDictionary()  # rounded KV lengths

    def first_use(self, compiled: LeanPath, kv_len: int) -> bool:
        """Return whether this is called for the first time for a path and a rounded KV length."""
        used, rounded = self._used.setdefault(compiled, set()), self.kv_len(kv_len)
        first = rounded not in used
        used.add(rounded)
        return first

    def forward(
        self,
        compiled: LeanPath,
        tokens: Tensor,
        pass_inputs: PassInputs,
        *,
        logits: Literal["all", "last"] | None,
        hidden: Sequence[int],
    ) -> ForwardOutput | None:
        """Replay a pass and return its output; None if the pass is not captured, so that the caller runs it eagerly."""
        shape = self._shape(pass_inputs, logits, hidden)
        if shape is None or compiled in self._uncapturable:
            return None
        made = self._made.setdefault(compiled, {})
        graph = made.get(shape)
        if graph is None and len(made) >= SHAPES:
            return None
        inputs = _Inputs(shape, self.device) if graph is None else graph.inputs
        inputs.fill(tokens, pass_inputs, self._numbers)
        if graph is None:
            graph = self._capture(compiled, shape, inputs, pass_inputs.rows)
            if graph is None:
                return None
            made[shape] = graph
        graph.replay()
        step = graph.step  # cloned, as the next replay overwrites it
        assert step.logits is not None
        return ForwardOutput(step.logits.clone(), {layer: stream.clone() for layer, stream in step.hidden.items()})

    def _shape(
        self, pass_inputs: PassInputs, logits: Literal["all", "last"] | None, hidden: Sequence[int]
    ) -> GraphKey | None:
        """Return the graph key of a pass, or None if it is not to be captured."""
        batch, n, positions, slots, mask, rows, _ = pass_inputs
        ends = [start + n for start in (positions, slots) if isinstance(start, int)]
        if logits is None or (logits == "last" and n > 1) or batch * n > ROWS or max(ends, default=0) > self.end:
            return None
        if mask is not None:
            kv_len, masks = mask.shape[-1], len(mask)
        elif isinstance(slots, int) and isinstance(positions, int) and slots == positions:
            kv_len, masks = slots + n, 0
        else:
            return None
        if kv_len > self._slots:
            return None
        return GraphKey(batch, n, self.kv_len(kv_len), (rows.start, rows.stop), masks, tuple(hidden))

    def kv_len(self, kv_len: int) -> int:
        """Return the KV length to capture for one of `kv_len`: all slots if passes read the length on the device."""
        return self._slots if self.passes.reads_lengths else min(rounded_up(kv_len), self._slots)

    def capture(self, body: Callable[[], Result]) -> tuple[Result, Replay]:
        """Capture `body` as `Recorder.record` does; the time that this takes is charged to no round."""
        with clock_stopped(), fused_backends(self.device):
            return self._recorder.record(body, self._pool)

    def causal_inputs(self, slots: Tensor, positions: Tensor, kv_len: int, rows: slice, *, alike: bool) -> PassInputs:
        """Return the inputs of a pass to capture over tokens at `slots` `[B, n]`, each of which sees all up to its own.

        Slots equal positions, except those of padding. `kv_len`: the KV length that is captured, beyond every slot but
        padding's. `alike`: whether all sequences have the same slots.
        """
        batch, n = slots.shape
        mask = self._numbers[:kv_len] <= (slots[:1] if alike else slots).unsqueeze(-1)
        return PassInputs(batch, n, positions, slots, mask, rows, causal=True)

    def tree_inputs(
        self,
        slots: Tensor,
        positions: Tensor,
        visible: Callable[[Tensor, Tensor], Tensor],
        kv_len: int,
        rows: slice,
    ) -> PassInputs:
        """Return the inputs of a pass to capture over token trees at `slots` `[B, n]`; a tree's root comes first.

        `visible`: from the roots' slots `[B]` and all slots `[S]`, which of these each token sees `[B, n, S]`.
        """
        mask = visible(slots[:, 0], self._numbers[:kv_len])
        return PassInputs(len(slots), slots.shape[1], positions, slots, mask, rows)

    def _capture(self, compiled: LeanPath, shape: GraphKey, inputs: _Inputs, rows: slice) -> _Graph | None:
        """Capture a pass whose inputs are filled in. Return None and warn if the capture fails."""
        scratch = Scratch(self.passes.skeleton.sizes, shape.batch, shape.n, self.device)

        def body() -> ForwardOutput:
            if inputs.mask is None:
                pass_inputs = self.causal_inputs(inputs.slots, inputs.slots, shape.kv_len, rows, alike=True)
            else:
                pass_inputs = PassInputs(shape.batch, shape.n, inputs.positions, inputs.slots, inputs.mask, rows)
            return self.passes.forward(
                compiled, inputs.ids, pass_inputs, logits="all", hidden=shape.hidden, scratch=scratch
            )

        try:
            return _Graph(inputs, scratch, *self.capture(body))
        except RuntimeError as error:
            self._made.pop(compiled, None)
            self._uncapturable.add(compiled, error)
            return None


def rounded_up(slots: int) -> int:
    """Round a KV length up to a multiple of 1024 or, if larger, of a quarter of the power of two at or below it."""
    step = max(_KV_LEN_STEP, 1 << max(slots.bit_length() - 3, 0))
    return -(-slots // step) * step
