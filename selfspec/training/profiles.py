"""Profiles that draft with a trained or published head, with the measured cost of its draft steps on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.draft_modules.heads import Head
from selfspec.draft_modules.module_files import write_part
from selfspec.draft_modules.published_heads import read_published
from selfspec.draft_modules.registry import make_head
from selfspec.drafters import make_drafter
from selfspec.engine.engine import decode
from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import forward_seconds
from selfspec.profile.draft_spec import Below, LayerSkipSpec, ProposerSpec
from selfspec.profile.drafter_specs import HeadSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile, bring_path
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.controller import ControllerSpec

CONTEXT = 128  # keys in the KV cache while steps are timed
REPEATS = 30
DRAFTED = 4  # draft length while steps are timed
LONGEST = 6  # longest draft of a head alone
TOKENS = 48  # tokens decoded after each prompt, to measure the saving by the head


def write_profiles(
    llm: LLM, part: Path, head: Head, own: Profile | None, prompts: Sequence[Sequence[int]]
) -> tuple[Path, ...]:
    """Write profiles that draft with `head` next to its part file; return the paths of the profiles.

    One profile drafts with the head alone. If `own` has a draft path, a second profile drafts along this path, with the
    head below the path: the path checks tokens that the head proposes. `prompts` (token ids) are decoded to measure how
    much of the draft path's cost the head saves.
    """
    step, plain = _step_seconds(head), forward_seconds(llm.runtime, CONTEXT, repeats=REPEATS)
    parts = {head.kind: ModuleFile(file=part.name, sha256=sha256_of(part))}
    controller = ControllerSpec(name="rate", options={"k_max": min(LONGEST, head.places)})
    draft = HeadSpec(part=head.kind, step=round(step / plain, 4), controller=controller, proposers=[ProposerSpec()])
    alone = Profile(model=llm.identity, draft=draft, parts=parts, costs=None if own is None else own.costs)
    written = [part.with_suffix(".yaml")]
    write_profile(alone, written[0])
    if own is not None and isinstance(own.draft, LayerSkipSpec) and own.drafts:
        drafted = forward_seconds(llm.runtime, CONTEXT, repeats=REPEATS, path=own.path)
        below = Below(part=head.kind, step=round(step / drafted, 4))
        spec = own.draft.model_copy(update={"below": below, "spared": None})
        parts |= bring_path(own, part.parent)
        joined = own.model_copy(
            update={"draft": spec, "parts": parts, "measured": [], "predicted": None, "also": []}
        ).with_folder(part.parent)
        spared = _spared(llm, joined, prompts)
        written.append(part.with_name(f"{part.stem}-below.yaml"))
        write_profile(joined.model_copy(update={"draft": spec.model_copy(update={"spared": spared})}), written[1])
    return tuple(written)


def _step_seconds(head: Head) -> float:
    """Return the median seconds per drafted token of a draft, leaving out the first runs, which warm caches up.

    A draft reads one (token, hidden state) pair, then its own tokens.
    """
    head.reserve(CONTEXT + DRAFTED)
    device = head.target.device
    tokens = torch.zeros(CONTEXT, dtype=torch.long, device=device)
    shape = CONTEXT, head.target.skeleton.sizes.hidden * len(head.layers)
    streams = torch.zeros(shape, dtype=head.target.dtype, device=device)
    head.read(0, 0, tokens[1:], streams[1:])
    drafted, times = min(DRAFTED, head.places), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        logits, state = head.read(0, CONTEXT - 1, tokens[:1], streams[:1])
        for place in range(1, drafted):
            logits, state = head.draft_step(0, CONTEXT, place, 0, state)
        float(logits[0])  # waits for the device
        times.append((time.perf_counter() - begun) / drafted)
    return statistics.median(times[REPEATS // 3 :])


def _spared(llm: LLM, profile: Profile, prompts: Sequence[Sequence[int]]) -> float | None:
    """Return the share of a draft step's cost that a head below the path saves per drafted token (None: no drafts)."""
    payoff, drafter = profile.payoff, make_drafter(llm.runtime, profile)
    took = tokens = 0.0
    for prompt in prompts:
        tokens_left = min(TOKENS, llm.max_new(len(prompt)))
        seq = SequenceState(list(prompt), tokens_left, Sampler(), llm.runtime.skeleton.ends)
        for outcome in decode(llm.runtime, drafter, seq):
            if outcome.draft.confidence:
                took += payoff.cost(outcome.draft.work)
                tokens += len(outcome.draft.confidence)
    return round(min(max(1 - took / (tokens * payoff.draft), 0.0), 0.95), 4) if tokens else None


def convert(llm: LLM, folder: Path, out: Path, profile: Profile | None) -> tuple[Path, tuple[Path, ...], str, float]:
    """Convert a published head in `folder`, and write its part file and profiles to the folder `out`.

    `profile` is as `own` in `write_profiles`. Returns the part file, the profiles, the kind of the head, and the
    megabytes of its weights in memory. Raises `SelfspecError` for an unknown kind of head, a head for another model,
    and where `out` holds a trained head of that kind.
    """
    part = read_published(folder, llm.runtime)
    head = make_head(llm.runtime, part)
    path = out / f"{part.kind}.safetensors"
    if kind(path.with_suffix(".json")) == "file":  # the record of a training
        raise SelfspecError(f"{path} was trained; expected another --out for the converted head")
    write_part(path, part)
    return path, write_profiles(llm, path, head, profile, []), part.kind, round(head.bytes / 1e6, 2)
