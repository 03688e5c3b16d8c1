"""Measure everything that is to be known of a GPU, in two runs of less than ten minutes on one machine.

    python tests/scripts/gpu/pack.py --out build/gpu                                          # here, beforehand
    python3 tests/scripts/gpu/drive.py --wheels build/gpu --out results --call 1              # there
    python3 tests/scripts/gpu/drive.py --wheels build/gpu --out results-2 --call 2            # there
    python tests/scripts/gpu/drive.py --table tests/scripts/gpu/results/NAME.jsonl            # Markdown for the docs
    python tests/scripts/gpu/drive.py --rehearse --out build/rehearsal                        # on a CPU, at toy size

Each part is a process of its own with a time limit, since a device fault stays with the process that met it: a part
that fails, hangs or is killed is reported, and the next one starts. Parts append JSON lines to `results.jsonl` as they
go, so whatever was measured is kept. `log.txt` holds what they print. The table comes last.

This file imports the standard library alone, nothing of selfspec, and unpacks the wheels by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEAST = 10.0  # seconds without which a part is not begun
TAIL = 1500  # characters of a failed part's output that are reported


@dataclass(frozen=True)
class Part:
    """A script of `parts/`, its limit in seconds, and its call, 1 or 2; 0: both, 3: rehearsals alone, 4: on request."""

    name: str
    seconds: float
    call: int


PARTS = (
    Part("start", 60, 0),  # the first imports and the first use of the device, whose libraries are read from disk
    Part("fake", 60, 3),  # passes on a pretended CUDA device, which torch's CUDA builds have without a GPU
    Part("machine", 25, 1),  # imports, copy bandwidth, launches
    Part("attention", 30, 1),  # backends of scaled_dot_product_attention
    Part("tests", 70, 1),  # those marked gpu
    Part("capture", 30, 1),  # one pass captured and replayed, and one that cannot be
    Part("values", 35, 1),  # each product against float64
    Part("exact", 105, 1),  # float64 texts against transformers', audits below
    Part("products", 60, 1),  # GB/s of each product at the shapes of Llama 3 8B
    Part("llama", 100, 1),  # passes and rounds of Llama 3 8B with random weights
    Part("tuning", 150, 4),  # sizes of the Triton kernels' blocks
    Part("llama_rounds", 55, 2),  # passes and rounds on the device of Llama 3 8B with random weights
    Part("triton_kernels", 60, 2),  # the Triton kernels: values, bits, products, passes
    Part("rounds", 70, 2),  # rounds on the device beside rounds on the host
    Part("widened", 110, 2),  # texts with real acceptance at 1B and 7B
    Part("batches", 65, 2),  # 1, 8 and 32 sequences together
    Part("traces", 50, 2),  # a profiler's trace of a few rounds
    Part("search", 70, 2),  # a search as the command does it
)


def environment(site: Path | None, caches: Path) -> dict[str, str]:
    """Return the environment of a part: `site` holds the unpacked wheels, `caches` all that is kept on disk."""
    helpers = HERE.parents[1] / "helpers"
    paths = [*([str(site)] if site else []), str(HERE), str(helpers), str(HERE.parent)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",  # the repository's own folders named selfspec and search are not to be imported
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "SELFSPEC_NATIVE": "0",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "SELFSPEC_CACHE": str(caches / "selfspec"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "HF_HOME": str(caches / "huggingface"),
        "MPLCONFIGDIR": str(caches / "matplotlib"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def unpack(wheels: Path, site: Path) -> None:
    """Unpack wheels into one folder, and put the repository's own sources over selfspec's.

    So what is measured is what travelled, however old the wheel. Raises `FileNotFoundError` when there are no wheels.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"{wheels}: no wheels; expected the folder that pack.py makes")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    root, ours = HERE.parents[2], site / "selfspec"
    for name, target in (("selfspec", ours), ("search", ours / "search"), ("profiles", ours / "profiles")):
        shutil.copytree(root / name, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def append(lines: Path, **values: Any) -> None:
    """Append one JSON line."""
    with lines.open("a") as file:
        file.write(json.dumps(values, default=str) + "\n")


def run_part(part: Part, *, lines: Path, log: Path, env: Mapping[str, str], seconds: float, options: list[str]) -> bool:
    """Run one part, kill it and its children after `seconds`, and append how it ended; return whether it succeeded."""
    script = HERE / "parts" / f"{part.name}.py"
    begun = time.monotonic()  # which all processes of a machine share
    command = [sys.executable, str(script), "--lines", str(lines), "--end", str(begun + seconds), *options]
    with log.open("ab") as output:
        output.write(f"== {part.name}\n".encode())
        output.flush()
        at = output.tell()
        process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=output, start_new_session=True)
        try:
            code: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = f"killed after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started, too
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the device's driver
                process.wait(timeout=10)
    took = round(time.monotonic() - begun, 1)
    said = {} if code == 0 else {"failure": log.read_bytes()[at:].decode(errors="replace")[-TAIL:]}
    append(lines, part=part.name, what="part", ended=code, seconds=took, **said)
    print(f"{part.name:10s} {took:6.1f} s  {'passed' if code == 0 else f'FAILED ({code})'}", flush=True)
    return code == 0


def drive(parts: Sequence[Part], given: argparse.Namespace) -> int:
    """Run parts until there is no time left; return how many failed or were left out."""
    begun, failed = time.monotonic(), 0
    given.out.mkdir(parents=True, exist_ok=True)
    lines, log = given.out / "results.jsonl", given.out / "log.txt"
    options = ["--rehearse"] if given.rehearse else []
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        site = None
        if given.wheels is not None:
            try:
                site = Path(folder) / "site"
                unpack(given.wheels, site)
            except (OSError, zipfile.BadZipFile) as error:
                append(lines, part="wheels", what="part", ended="failed", failure=str(error))
                print(f"wheels: {error}", flush=True)
                failed += 1
        env = environment(site, given.caches or Path(folder) / "caches")
        for part in parts:
            left = given.seconds - (time.monotonic() - begun)
            if left < LEAST:
                append(lines, part=part.name, what="part", ended="left out", failure="no time was left")
                print(f"{part.name:10s} left out: no time was left", flush=True)
                failed += 1
                continue
            seconds = min(part.seconds * (10 if given.rehearse else 1), left)  # a CPU may be slow, or busy
            own = {name: value for name, value in env.items() if part.name != "attention" or "SDPA" not in name}
            if part.name == "triton_kernels" and given.rehearse:
                own |= {"SELFSPEC_TRITON": "1", "TRITON_INTERPRET": "1"}
            failed += not run_part(part, lines=lines, log=log, env=own, seconds=seconds, options=options)
    print(f"{time.monotonic() - begun:.0f} s in all\n\n{table(read(lines))}", flush=True)
    return failed


def read(lines: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file; one that was cut off while it was written is left out."""
    found = []
    for line in lines.read_text().split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one Markdown table for each kind of line (`what`), and below it what failed, with counts.

    Columns stand in the order in which lines first name them. The parts and how they ended come last.
    """
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        part, what = str(line.get("part")), str(line.get("what"))
        kinds.setdefault(("", what) if what == "part" else (part, what), []).append(line)
    texts = []
    for (part, what), rows in sorted(kinds.items(), key=lambda item: item[0][1] == "part"):
        hidden = {"what", "failure", *(["part"] if part else [])}
        names = list(dict.fromkeys(name for row in rows for name in row if name not in hidden))
        shown = [row for row in rows if what == "part" or "failure" not in row]
        text = [f"**{f'{part}: {what}' if part else 'parts'}**", ""]
        if shown:
            text += [
                _row(names),
                "|" + "---|" * len(names),
                *(_row([_cell(row.get(n)) for n in names]) for row in shown),
            ]
        failures = Counter(str(row["failure"]).strip().split("\n")[-1] for row in rows if "failure" in row)
        text += ["", *(f"- failed {count} times: {said}" for said, count in failures.items())] if failures else []
        texts.append("\n".join(text))
    return "\n\n".join(texts)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    """Return a value as a table has it: three significant digits, and whole numbers whole."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "/").replace("\n", " ")


def main() -> int:
    """Run the parts, or print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder for results.jsonl, log.txt and traces")
    parser.add_argument("--wheels", type=Path, help="the folder that pack.py made; left out, what is installed is used")
    parser.add_argument("--call", type=int, choices=(1, 2), help="only the parts of the first or the second call")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), help="only these parts, in this order; NAME:SECONDS sets a limit"
    )
    parser.add_argument("--caches", type=Path, help="a folder for compiled kernels, which several runs may share")
    parser.add_argument("--seconds", type=float, default=560, help="for all parts together (560)")
    parser.add_argument("--rehearse", action="store_true", help="run everything on a CPU at toy size")
    parser.add_argument("--table", type=Path, metavar="LINES", help="print the tables of a results file, and end")
    given = parser.parse_args()
    if given.table is not None:
        print(table(read(given.table)))
        return 0
    if given.out is None:
        parser.error("--out: missing; expected a folder for the results")
    known = {part.name: part for part in PARTS}
    asked = [(name, limit) for name, _, limit in (text.partition(":") for text in given.parts or ())]
    if unknown := [name for name, _ in asked if name not in known]:
        parser.error(f"--parts: {', '.join(unknown)}; expected some of {', '.join(known)}")
    if wrong := [limit for _, limit in asked if limit and not limit.isdecimal()]:
        parser.error(f"--parts: {', '.join(wrong)}; expected whole seconds")
    parts = [replace(known[name], seconds=float(limit or known[name].seconds)) for name, limit in asked] or list(PARTS)
    calls = {0, *([given.call] if given.call else [1, 2]), *([3] if given.rehearse else [])}
    return 1 if drive([part for part in parts if given.parts or part.call in calls], given) else 0


if __name__ == "__main__":
    sys.exit(main())
