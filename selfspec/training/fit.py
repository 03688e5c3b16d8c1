"""Fitting a part: make texts, fit until time is up, keep the best; killed at any point, it goes on where it was."""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, kind, write_text
from selfspec.basics.machine import machine
from selfspec.draft_modules.module_files import PartFile, write_part
from selfspec.draft_modules.registry import make_head
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.runtime.worker_group import check_alone
from selfspec.text.prompt import Prompt
from selfspec.text.token_counts import frequent
from selfspec.training.distill import DistillLearner, write_student
from selfspec.training.layerskip import LayerSkipLearner, write_layerskip
from selfspec.training.learner import Learner
from selfspec.training.making import MAKING, SilentTraining, TrainingCallbacks, folder_of, make_texts
from selfspec.training.options import FEWEST, OF_PATHS, Kind, TrainOptions, check_kind
from selfspec.training.path_learner import PathLearner
from selfspec.training.path_training import RANK, OwnPath, bridged, write_path_profile
from selfspec.training.profiles import write_profiles
from selfspec.training.state import Fittable, Progress, State
from selfspec.training.texts import TextStore, TrainingText, layers_of

WINDOW = 128  # pairs of a text that are fitted to at once
BATCH = 8  # windows that are fitted to at once
RATE = 1.5e-3  # of what begins at random
WARM_UP, WARM_SHARE = 50, 0.05  # steps, or the share of fitting where that is less, until the learning rate is reached
LOWEST = 0.05  # of it, at the end
CLIP = 1.0
EVERY = 60.0  # seconds between looks at what was held out, which are also what is kept
LOOKED_AT = 48  # held-out texts, at most
BRIDGED = 32  # texts that are made for bridges, where it is not said, and that they are fitted to at most
AGREED = 16  # held-out texts that a draft path is held against the model on, at most
DECODED = 4  # held-out prompts that are decoded in the end
_log = logging.getLogger("selfspec")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted part: its file, profiles that draft with it, and how it went. `interrupted`: time was not up.

    `told`: how it went as the file beside the part tells it, for plots. `changed`: the part is the model, changed.
    """

    part: Path
    profiles: tuple[Path, ...]
    progress: Progress
    texts: int
    interrupted: bool
    told: dict[str, Any]
    changed: bool = False


def fit(
    llm: LLM,
    *,
    part: Kind = "eagle",
    out: Path,
    prompts: Sequence[Prompt] | None = None,
    chat: bool = False,
    profile: Profile | None = None,
    options: TrainOptions | None = None,
    watch: TrainingCallbacks | None = None,
) -> Fitted:
    """Fit a part of a model to its own texts, in `options.minutes`; save it, and profiles that use it, in `out`.

    `prompts`: what texts begin with, as user's messages with `chat`; the model makes them up when left out. `profile`:
    its draft path is to have the part below it. The same call after an interrupt goes on. Raises `SelfspecError` where
    nothing can be fitted, and where `out` is no folder to write to.
    """
    options, watch = options or TrainOptions(), watch or SilentTraining()
    check_kind(part)
    check_alone(llm.runtime, "training")
    check_folder(out)
    own = OwnPath.of(llm.runtime, profile, part) if part in OF_PATHS else None
    texts = TextStore(folder_of(llm, prompts, chat, options), options.texts)
    if part == "bridge" and own is not None:
        make_texts(llm, texts, prompts, chat, replace(options, texts=options.texts or BRIDGED), watch)
        fitted, progress = bridged(llm, own, *_some(texts), options, watch)
        return _finished(llm, part, out, fitted, profile, own, texts, progress, options, watch, interrupted=False)
    state = State(out / f"{part}.checkpoint", _told(llm, part, options, own))
    interrupted = False
    student = _student(llm, part, options)  # before minutes are spent on texts
    try:
        if not state.begun:
            make_texts(llm, texts, prompts, chat, options, watch)
        learner = student or _learner(llm, part, texts, options, own)
        _fit(learner, texts, options, state, watch)
    except KeyboardInterrupt:
        interrupted = True
        if not state.begun:
            raise
        learner = student or _learner(llm, part, texts, options, own)
    state.best_into(learner)
    if isinstance(learner, DistillLearner):
        watch.stage("measuring", None)
        return _finished_model(llm, part, out, learner, texts, state.progress, options, interrupted=interrupted)
    return _finished(
        llm, part, out, learner.part(), profile, own, texts, state.progress, options, watch, interrupted=interrupted
    )


def _some(texts: TextStore) -> tuple[list[TrainingText], list[TrainingText]]:
    """Those that bridges are fitted to, and those that they are held against."""
    fitted, unseen = (texts.numbers(held_out=held_out)[:BRIDGED] for held_out in (False, True))
    return [texts.read(number) for number in fitted], [texts.read(number) for number in unseen]


def _finished(
    llm: LLM,
    part: Kind,
    out: Path,
    fitted: PartFile,
    profile: Profile | None,
    own: OwnPath | None,
    texts: TextStore,
    progress: Progress,
    options: TrainOptions,
    watch: TrainingCallbacks,
    *,
    interrupted: bool,
) -> Fitted:
    """Write it all."""
    path = out / f"{part}.safetensors"
    write_part(path, fitted)
    watch.stage("measuring", None)
    unseen = [texts.read(number) for number in texts.numbers(held_out=True)[: DECODED if own is None else AGREED]]
    if own is None:
        begun: list[list[int]] = [text.tokens[: text.answer].tolist() for text in unseen]
        agrees: dict[str, Any] = {}
        profiles = write_profiles(llm, path, make_head(llm.runtime, fitted), profile, begun)
    else:
        written, agrees = write_path_profile(llm, path, fitted, own, unseen)
        profiles = (written,)
    if own is not None and not progress.history:  # a bridge's, for one drafted token
        before, after = agrees["right"]
        progress.history, progress.best, progress.acceptance = [(0.0, 1 + before)], 1 + after, [after]
        progress.history.append((progress.seconds, 1 + after))
    told = {**_story(llm, part, options, texts, progress), **agrees}
    write_text(path.with_suffix(".json"), json.dumps(told, indent=1) + "\n")
    return Fitted(path, profiles, progress, len(texts), interrupted, told)


def _finished_model(
    llm: LLM,
    part: Kind,
    out: Path,
    learner: DistillLearner,
    texts: TextStore,
    progress: Progress,
    options: TrainOptions,
    *,
    interrupted: bool,
) -> Fitted:
    """Write a model."""
    more: dict[str, Any] = {}
    changed = isinstance(learner, LayerSkipLearner)
    if isinstance(learner, LayerSkipLearner):
        unseen = [texts.read(number) for number in texts.numbers(held_out=True)[:LOOKED_AT]]
        folder, profile, more = write_layerskip(llm, learner, out, unseen)
    else:
        folder, profile = write_student(llm, learner, out)
    told = {**_story(llm, part, options, texts, progress), **more}
    write_text(out / f"{part}.json", json.dumps(told, indent=1) + "\n")
    return Fitted(folder, (profile,), progress, len(texts), interrupted, told, changed)


def _story(llm: LLM, part: Kind, options: TrainOptions, texts: TextStore, done: Progress) -> dict[str, Any]:
    """How it went."""
    return {
        "kind": part,
        "model": llm.name,
        "machine": machine(llm.runtime.device),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.runtime.dtype).removeprefix("torch."),
        "vocabulary": options.vocabulary,
        "texts": len(texts),
        "tokens": texts.total,
        "steps": done.steps,
        "seconds": done.seconds,
        "tokens_per_pass": done.best,
        "acceptance": done.acceptance,
        "history": done.history,
    }


def check_folder(out: Path) -> None:
    """Raise `SelfspecError` unless a part can be written in the folder, which is made where it is missing."""
    if kind(out) == "missing" and kind(out.parent) == "folder":
        out.mkdir()
    if kind(out) != "folder":
        raise SelfspecError(f"{out} is no folder; expected one that parts can be written to")
    check_writable(out / "part.safetensors")


def _told(llm: LLM, of: str, options: TrainOptions, own: OwnPath | None) -> dict[str, Any]:
    """What a checkpoint must have been made with to be gone on from."""
    identity = llm.identity.model_dump(mode="json", exclude={"name"})
    told = {"version": 2, "kind": of, "model": identity, "vocabulary": options.vocabulary, "seed": options.seed}
    if of in ("distill", "layerskip"):
        return {**told, "student": options.student, "layers": options.layers, "loss": options.loss}
    return told if own is None else {**told, **own.story(), "rank": options.rank or RANK, "loss": options.loss}


def _learner(
    llm: LLM, part: Kind, texts: TextStore, options: TrainOptions, own: OwnPath | None
) -> Learner | PathLearner:
    if own is not None:
        rank = options.rank or RANK
        return PathLearner(llm.runtime, own.path, own.trained, rank=rank, loss=options.loss, seed=options.seed)
    read = (texts.tokens(number).tolist() for number in texts.numbers(held_out=False))
    words = frequent(read, options.vocabulary, llm.identity.vocabulary or 0)
    return Learner(llm.runtime, part, words, layers_of(llm.runtime.layers), seed=options.seed)


def _student(llm: LLM, part: Kind, options: TrainOptions) -> DistillLearner | None:
    """What is fitted where that is a model."""
    told: dict[str, Any] = {"layers": options.layers, "loss": options.loss, "seed": options.seed}
    if part == "layerskip":
        return LayerSkipLearner(llm.runtime, **told)
    return DistillLearner(llm.runtime, student=options.student, **told) if part == "distill" else None


def _fit(learner: Fittable, texts: TextStore, options: TrainOptions, state: State, watch: TrainingCallbacks) -> None:
    """Steps until all are done or time is up, a look at what was held out now and then."""
    if len(texts.numbers(held_out=False)) < FEWEST:
        raise SelfspecError("there was too little time to make texts to fit to; give more --minutes")
    device = learner.runtime.device.type
    fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if fast else "no")
    rate = getattr(learner, "rate", RATE)
    optimizer = torch.optim.AdamW(learner.net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    state.into(learner, optimizer)
    fitted = [number for number in texts.numbers(held_out=False) if texts.pairs(number, learner.depth) > 0]
    if not fitted:
        raise SelfspecError(f"no text is longer than {learner.depth + 1} tokens; give more --max-new-tokens")
    unseen = [texts.read(number) for number in texts.numbers(held_out=True)[:LOOKED_AT] or fitted[:1]]
    done = state.progress
    watch.stage("fitting", 1.0)

    def look() -> None:
        with accelerator.autocast():
            state.keep(learner, optimizer, learner.acceptance(unseen))

    if not state.begun:
        look()
    kept = done.seconds
    losses: list[float] = []
    while _share(options, done) < 1:
        begun = time.perf_counter()
        _set_rate(optimizer, rate, done.steps, _share(options, done))
        draw = random.Random(f"{options.seed} {done.steps}")
        windows = _windows(texts, draw.choices(fitted, k=BATCH), learner.depth, draw)
        with accelerator.autocast():
            loss = learner.loss(windows)
        optimizer.zero_grad()
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(learner.net.parameters(), CLIP)
        optimizer.step()
        done.steps += 1
        losses = [*losses[-49:], float(loss.detach())]
        done.seconds += time.perf_counter() - begun
        watch.step(_share(options, done), f"loss {statistics.mean(losses):.2f}, {done.best:.2f} tokens a pass held out")
        if done.seconds - kept >= EVERY:
            begun = time.perf_counter()
            look()
            done.seconds += time.perf_counter() - begun
            kept = done.seconds
    look()


def _share(options: TrainOptions, done: Progress) -> float:
    """How much of fitting is done; it has all minutes where making texts may take whatever it takes."""
    if options.steps is not None:
        return done.steps / options.steps
    return done.seconds / (60 * options.minutes * (1 - MAKING if options.texts is None else 1))


def _windows(texts: TextStore, numbers: Sequence[int], depth: int, draw: random.Random) -> list[TrainingText]:
    """Of texts, windows that all have as many pairs as the shortest text, `WINDOW` at most."""
    every = [texts.pairs(number, depth) for number in numbers]
    pairs = min(WINDOW, *every)
    firsts = [draw.randrange(of - pairs + 1) for of in every]
    return [texts.read(n, first, first + pairs + depth) for n, first in zip(numbers, firsts, strict=True)]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float, steps: int, share: float) -> None:
    fallen = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, max((steps + 1) / WARM_UP, share / WARM_SHARE)) * fallen
