"""Making the texts that parts are fitted to, and telling how it goes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from selfspec.basics.files import cached_file
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import fitting
from selfspec.text.prompt import Prompt
from selfspec.training.options import TrainOptions
from selfspec.training.texts import TextStore, make
from selfspec.training.training_prompts import beginnings, made_up

MAKING = 0.4  # of the time, which making texts may take
MOST_TEXTS = 100_000


class TrainingCallbacks(Protocol):
    """Is told how it goes."""

    def stage(self, name: str, total: float | None) -> None:
        """What happens now, and how much of it there is."""

    def step(self, done: float, said: str) -> None:
        """So much of the stage is done."""


class SilentTraining:
    """Tells nobody."""

    def stage(self, name: str, total: float | None) -> None:
        """Nothing."""

    def step(self, done: float, said: str) -> None:
        """Nothing."""


def folder_of(llm: LLM, prompts: Sequence[Prompt] | None, chat: bool, options: TrainOptions) -> Path:
    """Where texts are kept that begin so, by all that they depend on."""
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
    watch: TrainingCallbacks,
) -> None:
    """Make as many texts as were asked for, or as there is time for."""
    seconds = 60 * options.minutes * MAKING
    own, given = None, None
    if prompts is None:
        config = llm.model.config
        own = made_up(llm.tokenizer, llm.runtime.skeleton.ends, getattr(config, "bos_token_id", None))
    else:
        room = options.max_new_tokens
        given = [llm.encode(fitting(llm, text, room, chat=chat)) for text in prompts]
    watch.stage("making texts", seconds if options.texts is None else options.texts)
    begun, tokens = time.perf_counter(), 0

    def count(new: int) -> None:
        nonlocal tokens
        tokens += new
        done = time.perf_counter() - begun if options.texts is None else len(texts)
        watch.step(done, f"{len(texts)} texts, {tokens:,} new tokens")

    make(
        llm.runtime,
        texts,
        beginnings(given, own, seed=options.seed),
        room=options.max_new_tokens,
        most=options.texts or MOST_TEXTS,
        go_on=lambda: options.texts is not None or time.perf_counter() - begun < seconds,
        on_tokens=count,
        rows=options.rows,
    )
