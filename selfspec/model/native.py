"""selfspec's own products and passes for processors: `native.cpp`, compiled on the machine that it runs on.

Products of up to `ROWS` rows with float32, bfloat16, 8-bit and 4-bit weights, which read each weight once for all of
them. A row gives the same bits alone and among others. Compiled once, in seconds, with the C++ compiler that `CXX`
names or that the system has, and kept in the cache. Without a compiler, torch's products are what there is. Knows
nothing of families and caches.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import cache_folder
from selfspec.basics.machine import machine
from selfspec.model.linears import Group, PartLinear, join_, whole_of
from selfspec.model.low_precision import Rounded

ROWS = 16  # up to which these products are taken
_log = logging.getLogger("selfspec")
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")
_HERE = (("-march=native",), ("-mcpu=native",), ())  # this processor's own instructions, as compilers take it
_PATIENCE = 120  # seconds for the compiler
KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT8, _INT4 = 2, 3


class Weight(ctypes.Structure):
    """A weight, and what it is scaled by, as `native.cpp` reads it."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "out", "in", "group")),
        *((name, c_void_p) for name in ("values", "scale", "bias")),
    ]


class Layer(ctypes.Structure):
    """A layer; pointers, none where a sub-layer is bypassed."""

    _fields_: ClassVar = [
        (name, c_void_p) for name in ("before_attention", "qkv", "o", "before_mlp", "gate_up", "down")
    ]


class Pass(ctypes.Structure):
    """The layers that a pass goes through."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", c_double),
        ("scaling", c_double),
        ("layer", POINTER(Layer)),
        ("norm", c_void_p),
    ]


class Place(ctypes.Structure):
    """Where a pass's tokens stand in the cache."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "seen", "stride", "each_layer")),
        *((name, c_void_p) for name in ("positions", "slots", "cos", "sin", "mask", "keys", "values")),
    ]


def library() -> Any:
    """The compiled functions. Raises `SelfspecError` that says why there are none."""
    found = _library(os.environ.get("SELFSPEC_NATIVE", ""), os.environ.get("CXX", ""))
    if isinstance(found, str):
        raise SelfspecError(found)
    return found


def available() -> bool:
    """Whether there are compiled functions."""
    try:
        library()
    except SelfspecError:
        return False
    return True


@lru_cache
def _library(wanted: str, compiler: str) -> Any:
    """The functions, or why there are none."""
    if wanted == "0":
        return "native products are turned off by SELFSPEC_NATIVE=0"
    names = [compiler] if compiler else ["c++", "g++", "clang++"]
    command = next((parts for name in names if (parts := shlex.split(name)) and shutil.which(parts[0])), None)
    if command is None:
        return f"native products need a C++ compiler; none found ({', '.join(names)}); install g++, or name one by CXX"
    key = [_SOURCE.read_text(), machine(torch.device("cpu")), platform.machine(), _instructions(), torch.__version__]
    name = hashlib.sha256("\0".join([*key, *command]).encode()).hexdigest()[:32] + ".so"
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _own(folder):
            raise OSError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="selfspec-native-"))
    file = folder / name
    if not (file.exists() and _own(file)) and (problem := _compile(command, file)):
        return f"native products: {problem}"
    try:
        return _typed(ctypes.CDLL(str(file)))
    except (OSError, AttributeError) as error:
        return f"native products: {file} cannot be loaded ({error}); delete it"


def _own(path: Path) -> bool:
    """Whether only this user can have put it there: what is loaded is run."""
    known = path.stat()
    return not hasattr(os, "getuid") or (known.st_uid == os.getuid() and not known.st_mode & 0o022)


def _instructions() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(command: Sequence[str], file: Path) -> str | None:
    """Compile to `file`, whole or not at all; what was wrong."""
    _log.warning("compiling products for this processor, once ...")
    problem = ""
    handle, made = tempfile.mkstemp(dir=file.parent, suffix=".so")
    os.close(handle)
    try:
        for here in _HERE:
            call = [*command, *_FLAGS, *here, str(_SOURCE), "-o", made]
            done = subprocess.run(call, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            if done.returncode == 0:
                os.chmod(made, 0o700)
                os.replace(made, file)
                return None
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            problem = problem or next((line for line in lines if "error" in line), " ".join(lines[:1]))
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        Path(made).unlink(missing_ok=True)
    return f"{command[0]} failed: {problem}"


def _typed(found: Any) -> Any:
    pointer, number = c_void_p, c_int64
    found.selfspec_vector.argtypes, found.selfspec_vector.restype = [], number
    found.selfspec_multiply.argtypes = [pointer, pointer, number, pointer, number, number, number, number]
    found.selfspec_multiply.restype = None
    found.selfspec_shared.argtypes, found.selfspec_shared.restype = [pointer, number], number
    found.selfspec_own.argtypes, found.selfspec_own.restype = [pointer, number, number], number
    found.selfspec_pass.argtypes = [pointer, pointer, pointer, pointer, pointer, number, number]
    found.selfspec_pass.restype = None
    return found


class NativeProduct:
    """Multiplies rows `[N, in]` with a weight `[out, in]`: float32 or bfloat16, stored by rows, or in few bits.

    Sums are float32. More than `ROWS` rows are torch's to multiply; with a weight in few bits, with what it stands for,
    held in bfloat16 from the first such rows on. Raises `SelfspecError` without compiled functions.
    """

    def __init__(self, weight: Tensor | Rounded, bias: Tensor | None = None) -> None:
        self._multiply = library().selfspec_multiply
        self._of, self._wide = weight, weight.t() if isinstance(weight, Tensor) else None
        self.bias = None if bias is None else bias.float().contiguous()
        scale = None
        if isinstance(weight, Rounded):
            values, scale, zero = weight.values, weight.scale.contiguous(), weight.zero
            (self.out, self.into), group = values.shape, 0
            kind = _INT8 if zero is None else _INT4
            if zero is not None:
                group = (values.shape[1] // scale.shape[1]).bit_length() - 1
                scale = torch.stack([scale, zero], -1)
                halves = values.view(self.out, -1, 2, 16)
                values = halves[:, :, 0] | (halves[:, :, 1] << 4)
                self._of = replace(weight, values=values, scale=scale[..., 0], zero=scale[..., 1])
        else:
            values, kind, group = weight, KINDS[weight.dtype], 0
            self.out, self.into = weight.shape
        self.values = values.contiguous()
        self._held = (self.values, scale, self.bias)
        pointers = [None if t is None else t.data_ptr() for t in self._held]
        self.described = Weight(kind, self.out, self.into, group, *pointers)
        self.address = ctypes.addressof(self.described)

    def __call__(self, x: Tensor) -> Tensor:
        """The product, of the dtype of `x`."""
        if len(x) > ROWS:
            return self._of_many(x)
        out = torch.empty(len(x), self.out)
        self._run(x, out, add=False)
        return out.to(x.dtype)

    def write(self, x: Tensor, out: Tensor) -> None:
        """The product, written to `out` `[N, out]`."""
        if len(x) > ROWS or out.dtype != torch.float32:
            out.copy_(self(x))
        else:
            self._run(x, out, add=False)

    def add(self, base: Tensor, x: Tensor) -> None:
        """The product, added to `base` `[N, out]`."""
        if len(x) > ROWS or base.dtype != torch.float32:
            base.add_(self(x))
        else:
            self._run(x, base, add=True)

    def _run(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        if x.dtype != torch.float32 or x.stride(1) != 1:
            x = x.float().contiguous()
        self._multiply(
            self.address, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), len(x), add, torch.get_num_threads()
        )

    def _of_many(self, x: Tensor) -> Tensor:
        if self._wide is None:
            self._wide = self._unpacked().weight(torch.bfloat16).t()
        out = x.to(self._wide.dtype) @ self._wide
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _unpacked(self) -> Rounded:
        assert isinstance(self._of, Rounded)
        if self._of.bits == 8:
            return self._of
        halves = self.values.view(self.out, -1, 1, 16)
        return replace(self._of, values=torch.cat([halves & 15, (halves >> 4) & 15], 2).view(self.out, self.into))

    def with_bias(self, bias: Tensor) -> NativeProduct:
        """The same with a bias `[out]`."""
        return NativeProduct(self._of if isinstance(self._of, Tensor) else self._unpacked(), bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeProduct:
        return self


class _Held:
    """A weight in full that several linears are parts of."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.product, self.out = NativeProduct(weight, bias), len(weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


class NativeLinear(PartLinear):
    """Takes the place of an `nn.Linear`, whose parameters it keeps, where the runtime multiplies natively.

    Called by others it computes as before; so it does, everywhere, once its weight has been moved or cast.
    """

    whole: _Held
    readable: ClassVar[bool] = True

    def __init__(self, whole: _Held, start: int, linear: nn.Linear) -> None:
        super().__init__(whole, start, linear)
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def current(self) -> bool:
        """Whether its weight still is a part of `whole`."""
        values, weight = self.whole.product.values, self.weight
        own = values.data_ptr() + self.start * values.stride(0) * values.element_size()
        return weight.dtype == values.dtype and weight.data_ptr() == own

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x` `[.., in]`."""
        return F.linear(x, self.weight, self.bias)


@torch.no_grad()
def nativise_(group: Group) -> None:
    """Lay a group's exact linears side by side by rows, and replace them by `NativeLinear`.

    Where only some have a bias, each is by itself.
    """
    join_(group)
    modules = group.modules
    weight = whole_of([module.weight.detach() for module in modules])
    if weight is None or any((module.bias is None) != (modules[0].bias is None) for module in modules):
        for name in group.names if len(modules) > 1 else ():
            nativise_(Group(group.parent, (name,)))
        return
    bias = None
    if modules[0].bias is not None:
        biases = [module.bias.detach() for module in modules]
        bias = torch.cat(biases) if (joined := whole_of(biases)) is None else joined
    held, start = _Held(weight, bias), 0
    for name, module in zip(group.names, modules, strict=True):
        setattr(group.parent, name, NativeLinear(held, start, module))
        start += module.out_features
