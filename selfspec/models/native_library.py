"""Compilation of `native.cpp` for this machine, once (seconds), and loading of the compiled library (milliseconds).

The C++ compiler is `CXX` (environment variable), or else the system's compiler. `SELFSPEC_ISA` chooses an instruction
set below this processor's. The compiler is called directly: the library takes plain pointers and reads no
header of torch or Python, so `torch.utils.cpp_extension`, which needs ninja, would add a dependency and no feature.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64, c_void_p
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import cache_folder, is_private, open_private, read_cached, write_cached
from selfspec.basics.machine import machine

_log = logging.getLogger("selfspec")
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w")
# Flag sets for OpenMP and this processor's instructions, tried in turn; some compilers have no OpenMP.
_HERE = (("-fopenmp", "-march=native"), ("-fopenmp", "-mcpu=native"), ("-fopenmp",), ("-march=native",), ())
# Instruction sets that `SELFSPEC_ISA` may name: the compiler's flags, and what the (x86) processor must have.
ISAS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "sse": (("-march=x86-64",), frozenset()),
    "avx2": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi2"})),
    "avxvnni": (("-march=x86-64-v3", "-mavxvnni"), frozenset({"avx2", "fma", "f16c", "bmi2", "avx_vnni"})),
    "avx512": (("-march=x86-64-v4",), frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    "avx512vnni": (("-march=x86-64-v4", "-mavx512vnni"), frozenset({"avx512bw", "avx512vl", "avx512_vnni"})),
    "avx512bf16": (
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        frozenset({"avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}),
    ),
}
_OTHERWISE = "set CXX to another compiler, or SELFSPEC_NATIVE=0 to use torch's kernels only"
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE = 600  # timeout of the compiler in seconds; it takes a minute of a busy core


class Kind(IntEnum):
    """The enum `Kind` of `native.cpp`: how a weight is stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    BLOCKS8 = 4
    BLOCKS4 = 5
    BLOCKS5 = 6
    SUPER4 = 7
    SUPER5 = 8
    SUPER6 = 9
    JOINED = 10
    STORED_BFLOAT16 = 16
    FLOAT16 = 17


KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}  # of tensors, by dtype
NORM_KINDS = {"none": 0, "rms": 1, "layer": 2}  # the enum `NormKind`
ACTIVATIONS = {"linear": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}  # the enum `Activation`


def library() -> Any:
    """Return the compiled library, compiled if necessary. Raises `SelfspecError` with the reason if that fails."""
    loaded = _library(*(os.environ.get(name, "") for name in ("SELFSPEC_NATIVE", "CXX", "SELFSPEC_ISA")))
    if isinstance(loaded, str):
        raise SelfspecError(loaded)
    return loaded


def available() -> bool:
    """Return whether the compiled library is available, compiling it if necessary."""
    try:
        library()
    except SelfspecError:
        return False
    return True


def compiler() -> str | None:
    """Return the path of the C++ compiler, with its arguments if `CXX` has any; None if there is none."""
    command = _command(os.environ.get("CXX", ""))
    return None if command is None else shlex.join([shutil.which(command[0]) or command[0], *command[1:]])


def instruction_set() -> str | None:
    """Return the instruction set that `SELFSPEC_ISA` names, else the highest of `ISAS` here; None off x86."""
    if isa := os.environ.get("SELFSPEC_ISA"):
        return isa
    known = [isa for isa in ISAS if _missing(isa) is None]
    tiles = ", amx" if "amx_tile" in _instructions().split() else ""
    return f"{known[-1]}{tiles}" if platform.machine().lower() in ("x86_64", "amd64") else None


def timing_key(device: torch.device) -> list[object]:
    """Return what timings of a model's passes and products depend on besides the model; for the keys of cached ones."""
    settings = [os.environ.get(name) for name in ("THP_MEM_ALLOC_ENABLE", "ONEDNN_MAX_CPU_ISA", "SELFSPEC_ISA")]
    sources = hashlib.sha256("".join(_sources()).encode()).hexdigest()
    native = sources if device.type == "cpu" and available() else None
    return [*settings, machine(device), torch.get_num_threads(), torch.__version__, native]


def _sources() -> list[str]:
    return [part.read_text(encoding="utf-8") for part in (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))]


@lru_cache
def _library(wanted: str, compiler: str, isa: str = "") -> Any:
    """Return the compiled library, or why there is none.

    The arguments are the environment variables `SELFSPEC_NATIVE`, `CXX` and `SELFSPEC_ISA`.
    """
    if wanted == "0":
        return "native kernels are turned off by SELFSPEC_NATIVE=0"
    if isa and (problem := _missing(isa)):
        return problem
    command = _command(compiler)
    if command is None:
        names = ", ".join([compiler] if compiler else _COMPILERS)
        return f"native kernels: no C++ compiler found ({names}); install g++, or set CXX to a compiler"
    key = [*_sources(), machine(torch.device("cpu")), platform.machine(), _instructions(), torch.__version__]
    key.append(str(Path(shutil.which(command[0]) or "").stat().st_mtime_ns))  # compile again with a new compiler
    here = _HERE if not isa else tuple((*openmp, *ISAS[isa][0]) for openmp in (("-fopenmp",), ()))
    name = hashlib.sha256(repr([*key, *command, _FLAGS, here]).encode()).hexdigest()[:32]
    folders = _folders()
    for known in (file for folder in folders for file in folder.glob(f"{name}.*.so")):
        try:
            if (loaded := _load(known)) is not None:
                return loaded
        except (OSError, AttributeError):
            with contextlib.suppress(OSError):
                known.unlink()
    try:
        writable = next((folder for folder in folders if os.access(folder, os.W_OK)), None)
        folder = writable or Path(tempfile.mkdtemp(prefix="selfspec-native-"))
        failed = folder / f"{name}.failed"  # cached, so that not every process retries a failing compiler
        if isinstance(problem := read_cached(failed), str):
            return problem
        made = _compile(command, here, folder, name)
    except OSError as error:  # such as a full disk; not cached, as it is temporary
        return f"native kernels: {shlex.join(command)} failed: {error}; {_OTHERWISE}"
    try:
        if not isinstance(made, str) and (loaded := _load(made)) is not None:
            return loaded
        problem = f"native kernels: {made if isinstance(made, str) else f'{made} was exchanged; {_OTHERWISE}'}"
    except (OSError, AttributeError) as error:
        problem = f"native kernels: {made} cannot be loaded ({error}); {_OTHERWISE}"
    if not _is_temporary(problem):
        write_cached(failed, problem)
    return problem


def _is_temporary(problem: str) -> bool:
    """Return whether what a compiler says is of the machine's state."""
    signs = ("Killed", "No space left", "out of memory", "memory exhausted", "Cannot allocate memory")
    return any(sign in problem for sign in signs)


def _missing(isa: str) -> str | None:
    """Return why the instruction set `isa` cannot be used here; None if it can."""
    if isa not in ISAS:
        return f"SELFSPEC_ISA={isa} is not known; expected one of {', '.join(ISAS)}"
    missing = sorted(ISAS[isa][1] - set(_instructions().split()))
    return f"SELFSPEC_ISA={isa}: this processor has no {', '.join(missing)}" if missing else None


def _command(compiler: str) -> list[str] | None:
    """Return the words of the command of a compiler: `compiler`, or if it is "" the system's; None if it is missing."""
    names = [compiler] if compiler else _COMPILERS
    return next((parts for name in names if (parts := _words(name)) and shutil.which(parts[0])), None)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _places() -> Iterator[Path]:
    """Yield the folders for compiled libraries: in the cache folder, and in the folder for temporary files.

    The second is for a cache folder that cannot be written to, such as on a read-only disk.
    """
    yield cache_folder() / "native"
    with contextlib.suppress(OSError):  # no folder for temporary files
        user = os.getuid() if hasattr(os, "getuid") else "all"
        yield Path(tempfile.gettempdir()) / f"selfspec-native-{user}"


def _folders() -> list[Path]:
    """Return the folders to look for libraries in, up to the first that can be written to."""
    folders = list[Path]()
    for place in _places():
        if (folder := _private(place)) is not None:
            folders.append(folder)
            if os.access(folder, os.W_OK):
                break
    return folders


def _private(folder: Path) -> Path | None:
    """Return the folder, made if it is missing; None if it cannot be made, or others can write to it or above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    if is_private(folder):
        return folder
    _log.warning("%s: others may write there or above; compiled kernels are kept elsewhere", folder)
    return None


def _load(file: Path) -> Any:
    """Load a compiled library. Return None unless only this user can have written it, in the size that its name states.

    A truncated library would crash the process. The library is loaded through the descriptor that was checked. Raises
    `OSError` or `AttributeError` if the file is not a library with the functions.
    """
    descriptor = open_private(file)
    if descriptor is None:
        return None
    loaded = None
    try:
        if str(os.fstat(descriptor).st_size) == file.name.split(".")[1]:
            checked = Path(f"/proc/self/fd/{descriptor}")  # not on all systems
            loaded = _typed(ctypes.CDLL(str(checked if checked.exists() else file)))
    finally:
        if loaded is None:  # else it stays open: the loader takes another library of the same path for this one
            os.close(descriptor)
    return loaded


def _instructions() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(command: Sequence[str], flags: Sequence[Sequence[str]], folder: Path, name: str) -> Path | str:
    """Compile to a file atomically and return its path, or the compiler's error. Raises `OSError` if it cannot run.

    `flags`: sets of flags, tried in turn.
    """
    _log.warning("compiling native kernels for this processor, once ...")
    problem = ""
    handle, made = tempfile.mkstemp(dir=folder, suffix=".so")
    try:
        for tried in flags:
            call = [*command, *_FLAGS, *tried, str(_SOURCE), "-o", made]
            done = subprocess.run(call, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            if done.returncode == 0:
                _warn_of_missing(command, tried)
                os.chmod(made, 0o700)
                return Path(made).replace(folder / f"{name}.{Path(made).stat().st_size}.so")
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            temporary = next((line for line in lines if _is_temporary(line)), None)
            if temporary is not None:  # no reason to do with fewer instructions for good
                problem = temporary
                break
            problem = problem or next((line for line in lines if "error" in line), " ".join(lines[:1]))
    except subprocess.TimeoutExpired as error:
        problem = f"{error}; delete {folder / name}.failed to try again"
    finally:
        os.close(handle)
        Path(made).unlink(missing_ok=True)
    return f"{shlex.join(command)} failed{': ' * bool(problem)}{problem}; {_OTHERWISE}"


def _warn_of_missing(command: Sequence[str], flags: Sequence[str]) -> None:
    """Log what a compiler that rejected some flags leaves out."""
    if "-fopenmp" not in flags:
        _log.warning("%s has no OpenMP: native kernels use one thread; %s", shlex.join(command), _OTHERWISE)
    if not any(flag.startswith(("-march", "-mcpu")) for flag in flags):
        _log.warning("%s does not know this processor's instructions; %s", shlex.join(command), _OTHERWISE)


def _typed(lib: Any) -> Any:
    pointer, number = c_void_p, c_int64
    lib.selfspec_vector.argtypes, lib.selfspec_vector.restype = [], number
    lib.selfspec_many_by_vectors.argtypes, lib.selfspec_many_by_vectors.restype = [number], number
    lib.selfspec_multiply.argtypes = [pointer, pointer, number, pointer, number, number, number, number]
    lib.selfspec_multiply.restype = None
    lib.selfspec_multiply_many.argtypes = [pointer, pointer, number, pointer, number, number, number]
    lib.selfspec_multiply_many.restype = number
    lib.selfspec_quantize.argtypes = [number, number, pointer, number, number, number, pointer, pointer, number]
    lib.selfspec_quantize.restype = None
    lib.selfspec_scratch.argtypes, lib.selfspec_scratch.restype = [pointer, pointer, number], number
    lib.selfspec_pass.argtypes = [pointer, pointer, pointer, pointer, pointer, number]
    lib.selfspec_pass.restype = None
    return lib
