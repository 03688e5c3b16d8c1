"""Plant bugs one at a time, and see that tests notice each.

    python tests/scripts/mutants.py                       # all of them, and the table
    python tests/scripts/mutants.py --only guard,rules    # those whose names contain one of these
    python tests/scripts/mutants.py --check               # only whether each place is still in the sources

Each mutant replaces one text, which must be in its file exactly once, in a copy of the repository, and runs the test
files that should notice, all of which must pass without it. It is caught when one of them fails. Exits with 1 when one
survives or its place in the sources is gone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "selfspec"


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file`, `old` becomes `new`; `tests` are the files that should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "int8 copies: of keys and values that were overwritten",
        "selfspec/runtime/cache.py", "[min(count, start) for count in self.valid[row]]", "list(self.valid[row])",
        "runtime/test_int8_copies.py",
    ),
    Mutant(
        "int8 copies: of layers that an earlier path skipped",
        "selfspec/runtime/cache.py", "(valid[layer] for layer in layers)", "valid[layers[0]:][:1]",
        "runtime/test_int8_copies.py",
    ),
    Mutant(
        "draft models: drafts beyond their context, where sequences decide together",
        "selfspec/drafters/autoregressive.py", "self._most_drafted(seq, min(limit.depth, limit.nodes))",
        "min(limit.depth, limit.nodes)",
        "drafters/test_draft_model.py drafters/test_cross_vocabulary.py",
    ),
    Mutant(
        "windows: slots that a row takes over stand where rejected nodes stood",
        "selfspec/runtime/cache.py", "self._settle_positions(row, self.length[row], length)", "pass",
        "runtime/test_windows.py engine/test_reuse.py",
    ),
    # -- found by planting bugs before
    Mutant(
        "stop strings: the first that was found, not the earliest",
        "selfspec/text/detokenizer.py", "self._delayed[: min(positions)]", "self._delayed[: positions[0]]",
        "text/test_detokenizer.py",
    ),
    Mutant(
        "guard: no plain round after 128 drafted tokens",
        "selfspec/drafters/guard.py", "PROBE = 128", "PROBE = 10**9",
        "drafters/test_guard.py",
    ),
    Mutant(
        "profile: the confidence of autoregressive drafters is dropped",
        "selfspec/drafters/registry.py",
        "\"confidence\": spec.confidence or PROBABILITY", "\"confidence\": PROBABILITY",
        "drafters/test_every_field.py",
    ),
    # -- acceptance
    Mutant(
        "acceptance: token rejection accepts a little too often",
        "selfspec/speculation/rules.py",
        "sampler.coin(min(1.0, ratios[num_accepted]))", "sampler.coin(min(1.0, 1.02 * ratios[num_accepted]))",
        "speculation/test_law.py",
    ),
    Mutant(
        "acceptance: a node below a rejected one is kept",
        "selfspec/speculation/rules.py",
        "matches.append(matches[parent + 1] and token == target_tokens[parent + 1])",
        "matches.append(token == target_tokens[parent + 1])",
        "speculation/test_rules.py engine/test_loop.py",
    ),
    Mutant(
        "acceptance: the first path that matches, not the deepest",
        "selfspec/speculation/rules.py",
        "if matches[-1] and (deepest < 0 or draft.depths[node] > draft.depths[deepest]):",
        "if matches[-1] and (deepest < 0 or draft.parents[node] == deepest):",
        "speculation/test_rules.py",
    ),
    Mutant(
        "acceptance: block verification forgets the ratios before",
        "selfspec/speculation/rules.py",
        "weights.append(min(1.0, weights[-1] * ratio))", "weights.append(min(1.0, ratio))",
        "speculation/test_law.py",
    ),
    # -- residuals
    Mutant(
        "residual: p itself after a rejection",
        "selfspec/speculation/rules.py",
        "return _normalised((r - q).clamp(min=0), otherwise=otherwise)", "return _normalised(r, otherwise=otherwise)",
        "speculation/test_law.py",
    ),
    Mutant(
        "residual: a rejected candidate takes nothing away",
        "selfspec/speculation/rules.py",
        "        residual = _residual(residual, q, otherwise=otherwise)\n    return -1, residual",
        "    return -1, residual",
        "speculation/test_law.py",
    ),
    Mutant(
        "residual: candidates drawn before stay in q",
        "selfspec/speculation/rules.py", "        q[removed] = 0\n", "",
        "speculation/test_law.py",
    ),
    Mutant(
        "residual: a block's chance without what its weight lacks",
        "selfspec/speculation/rules.py", "denominator = left[i] + 1 - weights[i]", "denominator = left[i] + 1",
        "speculation/test_law.py",
    ),
    # -- rounds on the device
    Mutant(
        "device rounds: a block's residual without its weight",
        "selfspec/runtime/device_rules.py",
        "left = _left(of_target, _at(drafts.q, last), weight)",
        "left = _left(of_target, _at(drafts.q, last), torch.ones_like(weight))",
        "runtime/test_device_rules.py",
    ),
    Mutant(
        "device rounds: the token after a draft is drawn with the number of a coin",
        "selfspec/runtime/device_rules.py", "used = drafts.length + coins", "used = drafts.length",
        "runtime/test_device_rules.py",
    ),
    Mutant(
        "device rounds: the host's stream stays where it was",
        "selfspec/runtime/device_rounds.py", "        seq.sampler.skip(used)\n", "",
        "engine/test_overlapped_sampling.py",
    ),
    Mutant(
        "device rounds: keys and values of a tree's accepted tokens stay where they were computed",
        "selfspec/runtime/cache.py", "part.scatter_(3, there, part.gather(3, here))", "part.gather(3, here)",
        "engine/test_overlapped_trees.py",
    ),
    Mutant(
        "device rounds: a text without the token behind the accepted ones",
        "selfspec/runtime/device_rounds.py",
        "torch.where(order == count, after.unsqueeze(1), emitted.roll(-1, 1))", "emitted.roll(-1, 1)",
        "engine/test_overlapped_trees.py",
    ),
    # -- the cache: commits and growth
    Mutant(
        "cache: the only accepted node of a tree is not moved",
        "selfspec/runtime/cache.py",
        "if any(node != place for place, node in enumerate(path)):",
        "if len(path) > 1 and any(node != place for place, node in enumerate(path)):",
        "engine/test_loop.py",
    ),
    Mutant(
        "cache: when it grows, the first row's length counts for all",
        "selfspec/runtime/cache.py", "longest = max(other.length)", "longest = other.length[0]",
        "runtime/test_cache.py",
    ),
    Mutant(
        "cache: a commit counts a token too few",
        "selfspec/runtime/cache.py",
        "self.length[row] = end = start + len(path)", "self.length[row] = end = max(start, start + len(path) - 1)",
        "engine/test_loop.py",
    ),
    Mutant(
        "cache: a padded row writes over slot 0",
        "selfspec/speculation/tree_batch.py", "torch.full(shape, spare)", "torch.full(shape, 0)",
        "engine/test_engine.py runtime/test_ragged.py",
    ),
    # -- positions and masks
    Mutant(
        "positions: a tree's nodes stand one after the other",
        "selfspec/speculation/tree_batch.py",
        "positions = torch.tensor([[start, *(start + depth for depth in draft.depths)]], device=device)",
        "positions = torch.tensor([[start + i for i in range(1 + len(draft))]], device=device)",
        "engine/test_loop.py",
    ),
    Mutant(
        "masks: a row among others does not see its root",
        "selfspec/speculation/tree_batch.py", "mask[b, :n, : start + 1] = True", "mask[b, :n, :start] = True",
        "engine/test_engine.py",
    ),
    Mutant(
        "masks: a sliding window is one token too long",
        "selfspec/runtime/attention_inputs.py", ".tril(end - n - window)", ".tril(end - n - window - 1)",
        "runtime/test_windows.py models/test_every_family.py",
    ),
    Mutant(
        "masks: a tree's window is one token too long",
        "selfspec/runtime/cache.py",
        "> positions.unsqueeze(-1) - window", ">= positions.unsqueeze(-1) - window",
        "runtime/test_windows.py models/test_every_family.py",
    ),
    # -- seeds
    Mutant(
        "seeds: neighbouring places share noise",
        "selfspec/speculation/sampling.py", "counter=position << 64", "counter=position",
        "speculation/test_match.py",
    ),
    Mutant(
        "seeds: noise by depth is noise by order",
        "selfspec/speculation/rules.py",
        "[position + depth for depth in depths]", "[position + order for order in range(len(depths))]",
        "speculation/test_match.py",
    ),
    Mutant(
        "seeds: a controller goes on from the prompt before",
        "selfspec/controllers/thresholds.py",
        "return dataclasses.replace(self, threshold=self._start)", "return dataclasses.replace(self)",
        "controllers speculation/test_match.py",
    ),
    # -- stop strings
    Mutant(
        "stop strings: a beginning that is all of the text is shown",
        "selfspec/text/detokenizer.py",
        "range(min(len(text), len(stop)), 0, -1)", "range(min(len(text) - 1, len(stop)), 0, -1)",
        "text/test_detokenizer.py",
    ),
    Mutant(
        "stop strings: what was held back is lost at the end",
        "selfspec/text/detokenizer.py",
        "        if not self.stopped:\n            self._ready.append(self._delayed)\n", "",
        "text/test_detokenizer.py",
    ),
    # -- ends
    Mutant(
        "ends: more tokens than there is room for",
        "selfspec/speculation/sequence.py", "for token in tokens[: self.remaining]:", "for token in tokens:",
        "speculation/test_sequence.py",
    ),
    Mutant(
        "ends: `stop` is not told of an end token",
        "selfspec/speculation/sequence.py",
        "if (self.stop is not None and self.stop(token)) or ended:",
        "if ended or (self.stop is not None and self.stop(token)):",
        "speculation/test_sequence.py",
    ),
    # -- the guard
    Mutant(
        "guard: tokens are credited with what a slow machine took before",
        "selfspec/drafters/guard.py", "tokens * min(round_times.step, rest) - now", "tokens * round_times.step - now",
        "drafters/test_guard.py",
    ),
    Mutant(
        "guard: twice the loss is allowed",
        "selfspec/drafters/guard.py", "SHARE, START = 0.015, 1.65", "SHARE, START = 0.03, 3.3",
        "drafters/test_guard.py",
    ),
    Mutant(
        "guard: each of several sequences spends the time of all",
        "selfspec/drafters/guard.py",
        "share = 1 / max(1, len(timed.intersection(seqs)))", "share = 1.0",
        "drafters/test_guard.py",
    ),
    # -- controllers
    Mutant(
        "controllers: the adaptive threshold moves the wrong way",
        "selfspec/controllers/thresholds.py",
        "if self.acceptance < self.target else", "if self.acceptance > self.target else",
        "controllers",
    ),
    Mutant(
        "controllers: one token more than the most",
        "selfspec/controllers/thresholds.py",
        "reaches the threshold.\"\"\"\n        return len(confidences) < self.k_max",
        "reaches the threshold.\"\"\"\n        return len(confidences) <= self.k_max",
        "controllers",
    ),
    Mutant(
        "controllers: the rate learns from tokens after a rejection",
        "selfspec/controllers/rate.py", "for i in range(min(accepted + 1, drafted)):", "for i in range(drafted):",
        "controllers",
    ),
    Mutant(
        "controllers: a candidate's chance without the tokens before it",
        "selfspec/controllers/rate.py", "further.append((before * chance, i))", "further.append((chance, i))",
        "controllers",
    ),
    # -- profiles
    Mutant(
        "profile: candidates of autoregressive drafters are dropped",
        "selfspec/drafters/registry.py",
        "        \"candidates\": spec.candidates,\n", "",
        "drafters/test_every_field.py",
    ),
    # -- the server's accounts
    Mutant(
        "server: prompts' tokens are not counted",
        "selfspec/server/metrics.py", "        self.prompt_tokens.inc(call.parsed.prompt_tokens)\n", "",
        "server/test_metrics.py",
    ),
    Mutant(
        "server: usage counts the first text alone",
        "selfspec/server/request_state.py",
        "return sum(getattr(update, name) for update in self.latest)", "return getattr(self.latest[0], name)",
        "server",
    ),
    # -- quantisers
    Mutant(
        "quantised: the zero of 4 bits is a step off",
        "selfspec/models/low_precision.py", "zero = (low + 8 * scale.float()).bfloat16()",
        "zero = (low + 7 * scale.float()).bfloat16()",
        "models/test_low_precision.py",
    ),
    Mutant(
        "quantised: one scale for all outputs",
        "selfspec/models/low_precision.py", "weight.abs().amax(1, keepdim=True).float()",
        "weight.abs().amax().expand(out, 1).float()",
        "models/test_low_precision.py",
    ),
    Mutant(
        "quantised: values are cut, not rounded to the nearest",
        "selfspec/models/low_precision.py",
        "values = (weight.float() / scale.float()).round_()", "values = (weight.float() / scale.float()).trunc_()",
        "models/test_low_precision.py",
    ),
)  # fmt: skip


def lacking() -> list[str]:
    """Return the names of mutants whose place is not in the sources exactly once, or whose tests are gone."""
    gone = []
    for mutant in MUTANTS:
        source, tests = ROOT / mutant.file, [TESTS / name for name in mutant.tests.split()]
        if not source.exists() or source.read_text().count(mutant.old) != 1 or not all(map(Path.exists, tests)):
            gone.append(mutant.name)
    return gone


def copy_to(folder: Path) -> Path:
    """Copy what tests import, with `search` and `profiles` where they are imported from."""
    for name in ("selfspec", "search", "profiles", "tests", "notebooks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("search", "profiles"):
        (folder / "selfspec" / name).symlink_to(folder / name)
    kept = ROOT / "build" / "tests"
    if kept.exists():
        shutil.copytree(kept, folder / "build" / "tests")
    return folder


def first_failure(folder: Path, tests: Sequence[str], *options: str) -> str | None:
    """Run test files in a copy; return the first test that failed, or None."""
    found = [folder / "tests" / "selfspec" / name for name in tests]
    assert all(path.exists() for path in found), f"{tests}: not all of them exist"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *map(str, found)]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if done.returncode not in (1, 2):  # tests failed, or could not be collected
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    lines = done.stdout.splitlines()
    first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else done.stderr)
    return re.sub(r"^(FAILED|ERROR) (tests/selfspec/)?", "", first.split(" - ")[0])


def main() -> int:
    """Plant them and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if gone := lacking():
        print("\n".join(f"not in the sources exactly once, or without its tests: {name}" for name in gone))
        return 1
    if given.check:
        print(f"{len(MUTANTS)} mutants, each in its place")
        return 0
    chosen = [mutant for mutant in MUTANTS if any(part in mutant.name for part in given.only)]
    if not chosen:
        parser.error(f"--only {','.join(given.only)}: no such mutant; expected parts of their names")
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(given.processes):
            (Path(temporary) / str(number)).mkdir()
            copies.put(copy_to(Path(temporary) / str(number)))

        def plant(mutant: Mutant) -> bool:
            folder, begun = copies.get(), time.monotonic()
            source = folder / mutant.file
            before = source.read_text()
            source.write_text(before.replace(mutant.old, mutant.new))
            try:
                seen = first_failure(folder, mutant.tests.split())
            finally:
                source.write_text(before)
                copies.put(folder)
            told = f"{'SURVIVED' if seen is None else 'caught'} | {seen or ''} | {time.monotonic() - begun:.0f} s"
            print(f"| {mutant.name} | {told} |", flush=True)
            return seen is not None

        every = sorted({name for mutant in chosen for name in mutant.tests.split()})
        processes = ["-n", str(given.processes)]
        if (wrong := first_failure(Path(temporary) / "0", every, *processes)) is not None:
            print(f"fails without any bug: {wrong}")
            return 1
        print("| bug | | by | in |\n|---|---|---|---|", flush=True)
        with ThreadPoolExecutor(given.processes) as pool:
            caught = list(pool.map(plant, chosen))
    print(f"\n{sum(caught)} of {len(caught)} caught")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
