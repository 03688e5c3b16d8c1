"""Generation of the texts that draft modules are trained on, with callbacks for the progress."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from selfspec.basics.files import cached_file
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import fit_prompt
from selfspec.text.prompt import Prompt
from selfspec.training.options import TrainOptions
from selfspec.training.texts import TextStore, make
from selfspec.training.training_prompts import beginnings, synthetic_beginning

MAKING = 0.4  # share of the time that is spent on generating texts
MOST_TEXTS = 100_000


class TrainingCallbacks(Protocol):
    """Callbacks of a training's progress."""

    def stage(self, name: str, total: float | None) -> None:
        """Begin the stage `name`; `total`: the value of `done` at which the stage is complete (None: unknown)."""

    def step(self, done: float, message: str) -> None:
        """Report that `done` of the stage's `total` is complete; `message` describes the progress."""


class SilentTraining:
    """Training callbacks that do nothing."""

    def stage(self, name: str, total: float | None) -> None:
        """Ignore the stage."""

    def step(self, done: float, message: str) -> None:
        """Ignore the progress."""


def folder_of(llm: LLM, prompts: Sequence[Prompt] | None, chat: bool, options: TrainOptions) -> Path:
    """Return the folder that caches the texts; its name depends on everything that the texts depend on."""
    digest = None if prompts is None else hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    what = {
        "version": 2,
        "model": llm.identity.model_dump(mode="json", exclude={"name"}),
        "dtype": str(llm.runtime.dtype),
        "prompts": digest,
        "chat": chat,
        "room": options.max_new_tokens,
        "seed": options.seed,
    }
    return cached_file("texts", what).with_suffix("")


def make_texts(
    llm: LLM,
    texts: TextStore,
    prompts: Sequence[Prompt] | None,
    chat: bool,
    options: TrainOptions,
    callbacks: TrainingCallbacks,
) -> None:
    """Generate training texts into `texts`: `options.texts` many, or as many as the time limit allows."""
    seconds = 60 * options.minutes * MAKING
    own, encoded = None, None
    if prompts is None:
        config = llm.model.config
        own = synthetic_beginning(llm.tokenizer, llm.runtime.skeleton.ends, getattr(config, "bos_token_id", None))
    else:
        max_new_tokens = options.max_new_tokens
        encoded = [llm.encode(fit_prompt(llm, text, max_new_tokens, chat=chat)) for text in prompts]
    callbacks.stage("making texts", seconds if options.texts is None else options.texts)
    begun, tokens = time.perf_counter(), 0

    def count(new: int) -> None:
        nonlocal tokens
        tokens += new
        done = time.perf_counter() - begun if options.texts is None else len(texts)
        callbacks.step(done, f"{len(texts)} texts, {tokens:,} new tokens")

    make(
        llm.runtime,
        texts,
        beginnings(encoded, own, seed=options.seed),
        max_new_tokens=options.max_new_tokens,
        most=options.texts or MOST_TEXTS,
        keep_going=lambda: options.texts is not None or time.perf_counter() - begun < seconds,
        on_tokens=count,
        rows=options.batch_size,
    )
