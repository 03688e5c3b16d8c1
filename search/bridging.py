"""Additions to the best path, used if predicted to be faster: bridges over skipped layers, and smaller vocabularies.

A bridge is a linear map that replaces a run of adjacent skipped layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from selfspec.basics.files import cache_folder, make_folder
from selfspec.draft_modules.module_files import path_part, write_part
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import SUFFIX, ModuleFile, sha256_of
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.text.detokenizer import frequent
from selfspec.training.bridges import fit_bridges
from selfspec.training.texts import TrainingText
from selfspec.types.draft_path import DraftPath

from .objective import ReplayObjective, Score

NAME = "bridge"  # the module's name in a profile
LONGEST = 512  # tokens of each text that bridges are fitted to
HELD_OUT = 4  # the ridge is chosen on every fourth text


def with_bridges(
    objective: ReplayObjective,
    score: Score,
    *,
    runtime: Runtime,
    texts: Sequence[Sequence[int]],
    seconds: Callable[[int], float] = lambda tokens: 0.0,
    allows: Callable[[float], bool] = lambda seconds: True,
) -> Score | None:
    """Score the path of `score` with a bridge over each run of layers skipped whole; return the score if faster.

    The bridges are fitted to `texts` (token ids), which must not hold the tokens that scores depend on. The cost of a
    bridge, a few hundredths of a layer, is not predicted. Returns None if the path with bridges is not faster, if no
    layer is skipped whole, if the model does not support bridges, if there are fewer than two texts, and if
    `allows` is false for the seconds of two passes over the texts for each run; `seconds(tokens)`: the time of a pass.
    Raises `SelfspecError` or `OSError` if the bridges cannot be written to the cache.
    """
    runs = score.path.runs(runtime.layers)
    took = 2 * len(runs) * sum(seconds(min(len(tokens), LONGEST)) for tokens in texts)
    if not runs or not runtime.supports_trained or len(texts) < 2 or not allows(took):
        return None
    read = [TrainingText(torch.tensor(tokens[:LONGEST]), torch.empty(0), 0) for tokens in texts]
    unseen = read[::HELD_OUT]
    trained = fit_bridges(runtime, score.path, [text for i, text in enumerate(read) if i % HELD_OUT], unseen)
    make_folder(parts_folder())
    made = parts_folder() / f"{os.getpid()}{SUFFIX}"
    write_part(made, path_part("bridge", {"rank": None}, trained, runtime))
    path = replace(score.path, trained=sha256_of(made))
    made.replace(_file(path))
    runtime.register_trained(path.trained or "", trained)
    bridged = objective.score(path)
    return bridged if not bridged.pruned and bridged.tokens_per_second > score.tokens_per_second else None


def attach_bridges(profile: Profile, path: DraftPath) -> Profile:
    """Return `profile` with the bridges that `path` names; if there are none, return `profile` unchanged."""
    if path.trained is None:
        return profile
    file = _file(path)
    assert isinstance(profile.draft, LayerSkipSpec)
    draft = profile.draft.model_copy(update={"trained": NAME})
    parts = {**profile.parts, NAME: ModuleFile(file=file.name, sha256=path.trained)}
    return profile.model_copy(update={"draft": draft, "parts": parts}).with_folder(file.parent)


def parts_folder() -> Path:
    """Return the folder in the cache that holds the parts of profiles that searches made."""
    return cache_folder() / "parts"


def _file(path: DraftPath) -> Path:
    return parts_folder() / f"{NAME}-{(path.trained or '')[:12]}{SUFFIX}"


SHARES = (4, 16)  # the most frequent quarter and sixteenth of the vocabulary are tried
WORTH_TRYING = 0.1  # the head's least share of a draft step for which smaller vocabularies are tried


def with_smaller_head(
    objective: ReplayObjective, score: Score, *, texts: Iterable[Sequence[int]], size: int
) -> Score | None:
    """Score the path of `score` with smaller draft vocabularies; return the best score if faster than `score`.

    Returns None if no score is faster, and also, without reading `texts`, if the head takes less than `WORTH_TRYING` of
    a draft step. `size`: the size of the model's vocabulary. `texts`: token ids, whose most frequent tokens make the
    draft vocabularies. `texts` must differ from the texts that `objective` scores on: vocabularies counted on the
    scored texts could hold all tokens of these texts, so the score would be higher than on other texts.
    """
    if not objective.head_share_reaches(WORTH_TRYING, score.path):
        return None
    counted = list(texts)
    tried = sorted({tuple(frequent(counted, size // share, size)) for share in SHARES} - {()})
    best = objective.score_with(score.path, tried)
    return best if best is not None and best.tokens_per_second > score.tokens_per_second else None
