"""Every causal model type of the installed `transformers`: what selfspec's text is against that of its `generate`."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from model_types import tiny_model
from models import plain, run
from toys import RandomTree

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import AdaptiveThreshold, FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, LookupDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.proposers.lookup import Lookup
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
ROOM = 32
LIMIT = 400  # seconds for one type: only what hangs takes that long


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a model type: `equal`, `different` (in which modes), `error`, `refused` or `not tried`; why."""

    model_type: str
    outcome: str
    runtime: str = ""
    drafts: str = ""
    modes: tuple[str, ...] = ()
    why: str = ""

    @property
    def line(self) -> str:
        """A row of a Markdown table."""
        why = ", ".join(self.modes) if self.outcome == "different" else self.why
        cells = (f"`{self.model_type}`", self.outcome, self.runtime, self.drafts, why)
        return f"| {' | '.join(cells)} |"


HEAD = "| `model_type` | text | runtime | drafts | why not |\n|---|---|---|---|---|"


class _Timeout(BaseException):
    """A type took too long; no `Exception`, which models catch themselves."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(model_type: str, *, raising: bool = False) -> Row:
    """Try one type: its own text first, then selfspec's in every mode. `raising`: an error of selfspec's is raised."""
    try:
        with _limited(LIMIT):
            try:
                model = tiny_model(model_type)
                texts = [theirs(model, prompt) for prompt in (PROMPT, PROMPT[:5])]
            except Exception as error:  # whatever a model raises without selfspec
                return Row(model_type, "not tried", why=f"no tiny model: {_first_line(error)}")
            try:
                runtime = open_runtime(model)
            except SelfspecError as error:
                return Row(model_type, "refused", why=_first_line(error))
            kind = "own forward" if isinstance(runtime, GenericRuntime) else "lean"
            kind += ", states" if runtime.stateful else ""
            drafts = "trees" if runtime.trees else "chains"
            try:
                different = [mode for mode, ours in _modes(runtime) if ours != texts]
            except Exception as error:
                if raising:
                    raise
                return Row(model_type, "error", kind, drafts, why=f"{type(error).__name__}: {_first_line(error)}")
            outcome = "different" if different else "equal"
            return Row(model_type, outcome, kind, drafts, tuple(different) or MODES)
    except _Timeout:
        return Row(model_type, "not tried", why=f"took more than {LIMIT} s")


def _first_line(error: Exception) -> str:
    return f"{error}".strip().splitlines()[0].replace("|", "/")[:200] if f"{error}".strip() else type(error).__name__


def theirs(model: Any, prompt: list[int]) -> list[int]:
    """The text of `generate`."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": ROOM, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: list[int] = copy.deepcopy(model).generate(ids, **options)[0, len(prompt) :].tolist()
    return out


MODES = ("plain", "skip", "lookup", "trees or chains", "conversation", "batch")


def _modes(runtime: Runtime) -> Iterator[tuple[str, list[list[int]]]]:
    """The texts of every mode."""
    last = runtime.layers - 1
    path = DraftPath(SkipSet((last,), (0,)))
    prompts = (PROMPT, PROMPT[:5])
    skipping = LayerSkipDrafter(runtime, path, AdaptiveThreshold(), candidates=2)
    drafters = {
        "skip": skipping,
        "lookup": LookupDrafter([Lookup()], StaticThreshold(0.0, 5)),
        "trees or chains": RandomTree(runtime.skeleton.identity.vocabulary or 61, (2, 1, 1)),
    }
    yield "plain", [plain(runtime, prompt, ROOM) for prompt in prompts]
    for name, drafter in drafters.items():
        yield name, [run(runtime, drafter, prompt, ROOM)[0] for prompt in prompts]
    yield "conversation", [_continued(runtime, skipping, prompt) for prompt in prompts]
    yield "batch", _together(runtime, path, prompts)


def _continued(runtime: Runtime, drafter: Any, prompt: list[int]) -> list[int]:
    """A text in three calls, each of which goes on with the cache of the one before; one prompt is another's."""
    for room in (ROOM // 2, ROOM // 3):
        list(decode(runtime, drafter, SequenceState(list(prompt), room, Sampler()), reuse=True))
    half = SequenceState(list(prompt), ROOM // 2, Sampler())
    list(decode(runtime, drafter, half, reuse=True))
    rest = SequenceState(list(half.tokens), ROOM - ROOM // 2, Sampler())
    list(decode(runtime, drafter, rest, reuse=True))
    return rest.tokens[len(prompt) :]


def _together(runtime: Runtime, path: DraftPath, prompts: tuple[list[int], ...]) -> list[list[int]]:
    """Both texts in one batch."""
    batch = runtime.with_new_cache(rows=len(prompts))
    seqs = [SequenceState(list(prompt), ROOM, Sampler()) for prompt in prompts]
    with Engine(batch, LayerSkipDrafter(batch, path, FixedK(3))) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            engine.step()
    return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]
