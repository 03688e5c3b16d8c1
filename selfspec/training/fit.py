"""Training of a draft module: generate texts, fit until time is up, keep the best weights, resume a killed run."""

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
from selfspec.basics.files import check_writable, kind, make_folder, write_text
from selfspec.basics.machine import machine
from selfspec.draft_modules.module_files import PartFile, write_part
from selfspec.draft_modules.registry import make_head
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.runtime.worker_group import check_runtime_unsharded
from selfspec.text.detokenizer import frequent
from selfspec.text.prompt_template import Prompt
from selfspec.training.distill import DistillLearner, write_student
from selfspec.training.layerskip import LayerSkipLearner, write_layerskip
from selfspec.training.learner import Learner
from selfspec.training.options import FEWEST, OF_PATHS, Kind, TrainOptions, check_kind
from selfspec.training.path_learner import PathLearner
from selfspec.training.path_training import ProfilePath, adapter_rank, bridged, write_path_profile
from selfspec.training.profiles import write_profiles
from selfspec.training.state import (
    MAKING,
    Fittable,
    Progress,
    SilentTraining,
    State,
    TrainingCallbacks,
    folder_of,
    make_texts,
)
from selfspec.training.texts import TextStore, TrainingText, layers_of

WINDOW = 128  # (token, hidden state) pairs per training window
BATCH = 8  # windows per step
RATE = 1.5e-3  # learning rate of randomly initialised weights
WARM_UP, WARM_SHARE = 50, 0.05  # warm-up of the learning rate: steps, or share of fitting
LOWEST = 0.05  # learning rate at the end, as a share of the highest
CLIP = 1.0
EVERY = 60.0  # seconds between held-out evaluations, each with a checkpoint
EVAL_TEXTS = 48  # held-out texts in an evaluation, at most
BRIDGED = 32  # texts generated for bridges by default, and the most texts that bridges are fitted to
AGREED = 16  # held-out texts for a draft path's agreement with the model, at most
DECODED = 4  # held-out prompts decoded at the end
_log = logging.getLogger("selfspec")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a training.

    `part`: the file of the trained draft module, or the folder of a trained model. `profiles`: the files of the
    profiles that draft with it. `texts`: the number of training texts. `interrupted`: whether the training was
    interrupted. `record`: the record of the training, as written to the JSON file in the same folder. `changed`:
    whether the trained model is a fine-tuned copy of the target model itself (LayerSkip).
    """

    part: Path
    profiles: tuple[Path, ...]
    progress: Progress
    texts: int
    interrupted: bool
    record: dict[str, Any]
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
    callbacks: TrainingCallbacks | None = None,
) -> Fitted:
    """Train a draft module on texts that the model generates; save it in `out`, with profiles that draft with it.

    Training takes `options.minutes`. `part`: the kind of the module. `prompts`: the prompts of the texts, as user
    messages if `chat` (None: the model makes up prompts). `profile`: for a bridge or an adapter, the profile whose
    draft path the module is for; for a head, a profile that also gets a variant in which the head drafts below the
    draft path. The same call after an interrupt resumes the training. Raises `SelfspecError` if nothing can be fitted,
    or if `out` is not a writable folder.
    """
    options, callbacks = options or TrainOptions(), callbacks or SilentTraining()
    check_kind(part)
    check_runtime_unsharded(llm.runtime, "training")
    check_folder(out)
    own = ProfilePath.from_profile(llm.runtime, profile, part) if part in OF_PATHS else None
    texts = TextStore(folder_of(llm, prompts, chat, options), options.texts)
    if part == "bridge" and own is not None:
        make_texts(llm, texts, prompts, chat, replace(options, texts=options.texts or BRIDGED), callbacks)
        fitted, progress = bridged(llm, own, *_bridge_texts(texts), options, callbacks)
        return _finished(llm, part, out, fitted, profile, own, texts, progress, options, callbacks, interrupted=False)
    state = State(out / f"{part}.checkpoint", _checkpoint_config(part, texts, options, own))
    if len(texts.numbers(held_out=False)) < FEWEST:
        state.forget()  # its texts are no longer in the cache, and may become others
    interrupted = False
    student = _student(llm, part, options)  # raises before minutes are spent on texts
    try:
        if not state.resumable:
            make_texts(llm, texts, prompts, chat, options, callbacks)
        learner = student or _learner(llm, part, texts, options, own)
        _fit(learner, texts, options, state, callbacks)
    except KeyboardInterrupt:
        interrupted = True
        if not state.resumable:
            raise
        learner = student or _learner(llm, part, texts, options, own)
    state.best_into(learner)
    if isinstance(learner, DistillLearner):
        callbacks.stage("measuring", None)
        return _finished_model(llm, part, out, learner, texts, state.progress, options, interrupted=interrupted)
    return _finished(
        llm, part, out, learner.part(), profile, own, texts, state.progress, options, callbacks, interrupted=interrupted
    )


def _bridge_texts(texts: TextStore) -> tuple[list[TrainingText], list[TrainingText]]:
    """Return the texts that bridges are fitted to, and the held-out ones."""
    fitted, unseen = (texts.numbers(held_out=held_out)[:BRIDGED] for held_out in (False, True))
    return [texts.read(number) for number in fitted], [texts.read(number) for number in unseen]


def _finished(
    llm: LLM,
    part: Kind,
    out: Path,
    fitted: PartFile,
    profile: Profile | None,
    own: ProfilePath | None,
    texts: TextStore,
    progress: Progress,
    options: TrainOptions,
    callbacks: TrainingCallbacks,
    *,
    interrupted: bool,
) -> Fitted:
    """Write the trained module, its profiles and its record.

    `own`: the draft path that a bridge or an adapter is for; None for a head.
    """
    path = out / f"{part}.safetensors"
    write_part(path, fitted)
    callbacks.stage("measuring", None)
    held_out_texts = [
        texts.read(number) for number in texts.numbers(held_out=True)[: DECODED if own is None else AGREED]
    ]
    if own is None:
        begun: list[list[int]] = [text.tokens[: text.answer].tolist() for text in held_out_texts]
        agrees: dict[str, Any] = {}
        profiles = write_profiles(llm, path, make_head(llm.runtime, fitted), profile, begun)
    else:
        written, agrees = write_path_profile(llm, path, fitted, own, held_out_texts)
        profiles = (written,)
    if own is not None and not progress.history:  # a bridge: acceptance of one drafted token
        before, after = agrees["right"]
        progress.history, progress.best, progress.acceptance = [(0.0, 1 + before)], 1 + after, [after]
        progress.history.append((progress.seconds, 1 + after))
    record = {**_training_record(llm, part, options, texts, progress), **agrees}
    write_text(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return Fitted(path, profiles, progress, len(texts), interrupted, record)


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
    """Write a trained model, its profile and its record."""
    more: dict[str, Any] = {}
    changed = isinstance(learner, LayerSkipLearner)
    if isinstance(learner, LayerSkipLearner):
        held_out_texts = [texts.read(number) for number in texts.numbers(held_out=True)[:EVAL_TEXTS]]
        folder, profile, more = write_layerskip(llm, learner, out, held_out_texts)
    else:
        folder, profile = write_student(llm, learner, out)
    record = {**_training_record(llm, part, options, texts, progress), **more}
    write_text(out / f"{part}.json", json.dumps(record, indent=1) + "\n")
    return Fitted(folder, (profile,), progress, len(texts), interrupted, record, changed)


def _training_record(llm: LLM, part: Kind, options: TrainOptions, texts: TextStore, done: Progress) -> dict[str, Any]:
    """Return what is recorded of a training, as JSON data: its settings, machine, sizes and results."""
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
    """Raise `SelfspecError` unless files can be written to the folder `out`, which is created if missing."""
    if kind(out) == "missing" and kind(out.parent) == "folder":
        make_folder(out)
    if kind(out) != "folder":
        raise SelfspecError(f"{out} is no folder; expected one that parts can be written to")
    check_writable(out / "part.safetensors")


def _checkpoint_config(part: str, texts: TextStore, options: TrainOptions, own: ProfilePath | None) -> dict[str, Any]:
    """Return the configuration of a training; only a checkpoint with the same configuration is resumed."""
    config: dict[str, Any] = {"version": 3, "kind": part, "vocabulary": options.vocabulary}
    config |= {"texts": texts.folder.name, "most_texts": options.texts}  # the folder's name is of model and seed, too
    if part in ("distill", "layerskip"):
        return {**config, "student": options.student, "layers": options.layers, "loss": options.loss}
    return (
        config
        if own is None
        else {
            **config,
            **own.checkpoint_settings(),
            "rank": adapter_rank(own.trained, options.rank),
            "loss": options.loss,
        }
    )


def _learner(
    llm: LLM, part: Kind, texts: TextStore, options: TrainOptions, own: ProfilePath | None
) -> Learner | PathLearner:
    if own is not None:
        rank = adapter_rank(own.trained, options.rank)
        return PathLearner(llm.runtime, own.path, own.trained, rank=rank, loss=options.loss, seed=options.seed)
    read = (texts.tokens(number).tolist() for number in texts.numbers(held_out=False))
    words = frequent(read, options.vocabulary, llm.identity.vocabulary or 0)
    return Learner(llm.runtime, part, words, layers_of(llm.runtime.layers), seed=options.seed)


def _student(llm: LLM, part: Kind, options: TrainOptions) -> DistillLearner | None:
    """Return the learner of a whole model for the kinds `distill` and `layerskip`, and None for other kinds."""
    settings: dict[str, Any] = {"layers": options.layers, "loss": options.loss, "seed": options.seed}
    if part == "layerskip":
        return LayerSkipLearner(llm.runtime, **settings)
    return DistillLearner(llm.runtime, student=options.student, **settings) if part == "distill" else None


def _fit(
    learner: Fittable, texts: TextStore, options: TrainOptions, state: State, callbacks: TrainingCallbacks
) -> None:
    """Take steps until all are done or time is up, with held-out evaluations in between."""
    if len(texts.numbers(held_out=False)) < FEWEST:
        more = "give more --minutes" if options.texts is None else "give more --texts"
        raise SelfspecError(f"training texts: too few, as some are held out; {more}")
    device = learner.runtime.device.type
    fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if fast else "no")
    rate = getattr(learner, "rate", RATE)
    optimizer = torch.optim.AdamW(learner.net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    state.into(learner, optimizer)
    if isinstance(learner, LayerSkipLearner):
        learner.steps = state.progress.steps  # the rotation of exits goes on
    fitted = [number for number in texts.numbers(held_out=False) if texts.pairs(number, learner.depth) > 0]
    if not fitted:
        raise SelfspecError(f"no text is longer than {learner.depth + 1} tokens; give more --max-new-tokens")
    held_out_texts = [texts.read(number) for number in texts.numbers(held_out=True)[:EVAL_TEXTS] or fitted[:1]]
    done = state.progress
    callbacks.stage("fitting", 1.0)

    def evaluate() -> None:
        with accelerator.autocast():
            state.save(learner, optimizer, learner.acceptance(held_out_texts))

    if not state.resumable:
        evaluate()
    last_saved = done.seconds
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
        callbacks.step(
            _share(options, done), f"loss {statistics.mean(losses):.2f}, {done.best:.2f} tokens a pass (held out)"
        )
        if done.seconds - last_saved >= EVERY:
            begun = time.perf_counter()
            evaluate()
            done.seconds += time.perf_counter() - begun
            last_saved = done.seconds
    evaluate()


def _share(options: TrainOptions, done: Progress) -> float:
    """Return the share of the fitting that is done, by `options.steps` or by time.

    Fitting has all the minutes if the number of texts is fixed; otherwise generating texts takes a share of them.
    """
    if options.steps is not None:
        return done.steps / options.steps
    return done.seconds / (60 * options.minutes * (1 - MAKING if options.texts is None else 1))


def _windows(texts: TextStore, numbers: Sequence[int], depth: int, draw: random.Random) -> list[TrainingText]:
    """Return a random window of each text; every window has as many pairs as the shortest text, at most `WINDOW`."""
    every = [texts.pairs(number, depth) for number in numbers]
    pairs = min(WINDOW, *every)
    firsts = [draw.randrange(num_pairs - pairs + 1) for num_pairs in every]
    return [texts.read(n, first, first + pairs + depth) for n, first in zip(numbers, firsts, strict=True)]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float, steps: int, share: float) -> None:
    fallen = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, max((steps + 1) / WARM_UP, share / WARM_SHARE)) * fallen
