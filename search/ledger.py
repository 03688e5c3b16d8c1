"""The ledger: a study's trials in an Optuna storage, kept as they complete, to resume and for several workers."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from selfspec.basics.checked_model import Data, Positive
from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.module_files_spec import ModuleFile
from selfspec.profile.schema import Calibration
from selfspec.types.acceptance import AcceptanceCurve, Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet

from .objective import Score
from .options import STUDY
from .space import Space
from .space_filter import Choices
from .storage import MEMORY, display_name, is_database, open_storage, resolve_storage, storage_errors
from .strategies import Gains

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of data not as written
PATIENCE = 10.0  # a worker's claim lapses after a minute plus this many times the seconds of the longest trial

T = TypeVar("T")
Kept = TypeVar("Kept", bound=Data)


class ScoredTexts(Data):
    """The numbers of prompts and of new tokens that a study's trials are scored on.

    `max_new_tokens`: the most tokens after each prompt. In a search of limited time both numbers depend on how fast the
    model runs, so they are fixed once for all workers. `calibration`: the profile's record of these prompts.
    """

    prompts: Positive
    max_new_tokens: Positive
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One completed trial.

    `draft_cost`: a draft step as a share of a plain decoding step; None without a cost model. `seconds`: the time of
    scoring. `worker`: the id of the worker that scored the path.
    """

    score: Score
    draft_cost: float | None
    seconds: float
    worker: str


class _Record(Generic[T]):
    """An attribute of a ledger: what the study's record of this kind holds; None until it is kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, ledger: Ledger, owner: type) -> T | None:
        value: T | None = ledger._records.get(self._name)
        return value


class Ledger:
    """The trials of one study, by every worker that shares it.

    A trial is added only when it is complete, so that a kill leaves no unfinished trial. Results that all trials depend
    on (the settings, the amount of text, the cost model, the narrowed space, the confidence, the gains of single
    changes) are stored as trials marked failed: the storage numbers trials in one order for all workers, and the first
    record of each kind counts, so that workers that start together agree. (Of a study's attribute, the value written
    last counts: a worker could go on with a value that another one has replaced.) While a worker scores a path, it
    claims the path in an attribute of the study. `settings` None: the study is opened for reading and must exist;
    `study` None: the only study in the storage. Raises `SelfspecError` when the study has other settings, is damaged,
    or cannot be reached.
    """

    texts = _Record[ScoredTexts]()  # the amount of text that trials are scored on
    costs = _Record[CostModel]()  # the cost model that all scores depend on
    confidence = _Record[Confidence]()  # the fitted estimate of the chance that a drafted token is right
    choices = _Record[Choices]()  # the modes that the search space was narrowed to
    gains = _Record[Gains]()  # the speedup for each mode of each variable if only this variable is changed
    int4 = _Record[ModuleFile]()  # the file of the int4 weights that paths were scored with

    def __init__(
        self,
        where: str | Path = MEMORY,
        study: str | None = STUDY,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.worker = uuid.uuid4().hex[:12]
        self.scores: dict[DraftPath, Score] = {}
        self.entries: list[Entry] = []
        self._where = where = resolve_storage(where)
        self._begun = time.time()
        self._records: dict[str, Any] = {}
        self._finishers: list[tuple[str, float, str, int]] = []  # worker, time, host, process
        self._read: set[int] = set()
        storage = open_storage(where, write=settings is not None)
        with self._errors():
            self._study = _study(storage, study, make=settings is not None)
        own = is_database(where) or self._study.study_name != STUDY
        self.description = f"study '{self._study.study_name}' of {display_name(where)}" if own else display_name(where)
        self._delete = "name another study" if own else "delete it"
        self.refresh()
        if settings is not None:
            self._check(json.loads(json.dumps(settings)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the search. Raises `SelfspecError` if the study holds no search."""
        settings: dict[str, Any] | None = self._records.get("settings")
        if settings is None:
            raise SelfspecError(f"{self.description}: holds no search of selfspec")
        return settings

    def _check(self, settings: dict[str, Any]) -> None:
        stored = self._store_once("settings", settings)
        keys = {*stored, *settings} - {"name", "held"}  # the model's path and layout may differ between machines
        stored = {"device": settings.get("device"), **stored}  # older studies do not say it
        other = sorted(key for key in keys if stored.get(key) != settings.get(key))
        if other:
            raise SelfspecError(
                f"{self.description} holds the trials of another search (of other {', '.join(other)}); "
                f"resume with its options, or {self._delete}"
            )

    @property
    def longest(self) -> float:
        """The most seconds that a trial took; 0 without trials."""
        return max((entry.seconds for entry in self.entries), default=0.0)

    def keep_texts(self, texts: ScoredTexts) -> ScoredTexts:
        """Store the numbers of prompts and tokens, unless another worker has stored them; return the stored numbers."""
        return self._keep("texts", texts)

    def keep_costs(self, costs: CostModel) -> None:
        """Store the cost model, unless another worker has stored a cost model."""
        self._keep("costs", costs)

    def keep_confidence(self, confidence: Confidence) -> Confidence:
        """Store the confidence, unless another worker has stored it, and return the stored confidence."""
        return self._keep("confidence", confidence)

    def keep_choices(self, choices: Choices) -> Choices:
        """Store the modes of the narrowed space, unless another worker has stored modes; return the stored modes."""
        return self._keep("choices", choices)

    def keep_int4(self, file: ModuleFile) -> None:
        """Store the file of the int4 weights, unless another worker has stored one."""
        self._keep("int4", file)

    def keep_gains(self, gains: Gains) -> None:
        """Store the speedup of each single change, unless another worker has stored these speedups."""
        self._store_once("gains", [list(row) for row in gains])

    def _keep(self, key: str, record: Kept) -> Kept:
        stored: Kept = self._store_once(key, record.model_dump(mode="json"))
        return stored

    def _store_once(self, key: str, value: Any) -> Any:
        """Store `value` under `key`, unless the study has a value for `key`; return the stored value."""
        if key not in self._records:
            with self._errors():
                attrs = {"kind": key, "value": value}
                self._study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=attrs))
            self.refresh()
        return self._records[key]

    def keep_score(self, score: Score, space: Space, *, draft_cost: float | None = None, seconds: float = 0.0) -> None:
        """Add a completed trial to the study."""
        chosen = zip(space.names, space.choices, space.point(score.path), strict=True)
        attrs = {"score": _as_json(score), "draft_cost": draft_cost, "seconds": seconds, "worker": self.worker}
        with self._errors():
            self._study.add_trial(
                create_trial(
                    value=score.tokens_per_second,
                    params={name: modes[number] for name, modes, number in chosen},
                    distributions={
                        name: CategoricalDistribution(modes)
                        for name, modes in zip(space.names, space.choices, strict=True)
                    },
                    user_attrs=attrs,
                )
            )
        self.refresh()

    def refresh(self) -> None:
        """Read the trials that any worker has added since the last call."""
        with self._errors():
            trials = self._study.get_trials(deepcopy=False)
        try:
            for trial in sorted(trials, key=lambda t: t.number):
                if trial.number not in self._read and trial.state.is_finished():
                    self._take(trial)
                    self._read.add(trial.number)
        except DAMAGE as error:
            raise self.damaged(error) from None

    def damaged(self, error: Exception) -> SelfspecError:
        """Return the error to raise where the study's data caused `error`."""
        return SelfspecError(f"{self.description} is damaged ({type(error).__name__}); {self._delete} to start anew")

    def _take(self, trial: FrozenTrial) -> None:
        attrs = trial.user_attrs
        if trial.state == TrialState.FAIL:
            key, value = attrs["kind"], attrs["value"]
            if key == "finish":
                host, process = str(value.get("host", "")), int(value.get("process", 0))
                self._finishers.append((str(value["worker"]), float(value["time"]), host, process))
            else:
                self._records.setdefault(key, _RECORDS[key](value))
        else:
            score = _score(attrs["score"])
            draft_cost = None if attrs["draft_cost"] is None else _figure(attrs["draft_cost"])
            self.entries.append(Entry(score, draft_cost, _figure(attrs["seconds"]), str(attrs["worker"])))
            self.scores.setdefault(score.path, score)

    def claim_finish(self) -> bool:
        """Return whether this worker measures the finalists: the first running worker of the study that asks does.

        A worker that died before `mark_finished` does not count.
        """
        value = {"worker": self.worker, "time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        with self._errors():
            self._study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"kind": "finish", "value": value}))
            attrs = self._study.user_attrs
        self.refresh()
        first = next(
            worker
            for worker, asked, host, process in self._finishers
            if worker == self.worker
            or (asked > self._begun and (f"finished {worker}" in attrs or not _has_died(host, process)))
        )
        return first == self.worker

    def mark_finished(self) -> None:
        """Record that this worker has measured the finalists."""
        with self._errors():
            self._study.set_user_attr(f"finished {self.worker}", True)

    def claim(self, path: DraftPath | None) -> None:
        """Claim the path that this worker is about to score; None releases the claim."""
        if self._where != MEMORY:
            claimed = None if path is None else [_path_as_json(path), time.time(), socket.gethostname(), os.getpid()]
            with self._errors():
                self._study.set_user_attr(f"claim {self.worker}", claimed)

    def claimed(self) -> set[DraftPath]:
        """Return the paths that other workers are scoring now: workers that live, and are not silent for too long."""
        if self._where == MEMORY:
            return set()
        with self._errors():
            attrs = self._study.user_attrs
        oldest = time.time() - 60 - PATIENCE * self.longest
        claims = [value for key, value in attrs.items() if key.startswith("claim ") and not key.endswith(self.worker)]
        try:
            return {_path(path) for path, begun, *who in filter(None, claims) if begun > oldest and not _has_died(*who)}
        except DAMAGE as error:
            raise self.damaged(error) from None

    def _errors(self) -> Any:
        return storage_errors(self._where if isinstance(self._where, Path) else display_name(self._where))


def _has_died(host: str = "", process: int = 0) -> bool:
    """Return whether a process of this machine has ended; False for one of another machine, or an unknown one."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it runs, for another user
        return False
    return False


Given = ParamSpec("Given")
Result = TypeVar("Result")


def reads_study(function: Callable[Concatenate[Ledger, Given], Result]) -> Callable[Concatenate[Ledger, Given], Result]:
    """Let a function of a ledger raise `SelfspecError`, which names the study, where the study's data is damaged."""

    @functools.wraps(function)
    def reader(ledger: Ledger, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return function(ledger, *args, **kwargs)
        except SelfspecError:
            raise
        except DAMAGE as error:
            raise ledger.damaged(error) from None

    return reader


def _gains(value: Sequence[Sequence[float]]) -> Gains:
    return tuple(tuple(map(float, row)) for row in value)


_RECORDS: dict[str, Callable[[Any], Any]] = {
    "settings": dict,
    "texts": ScoredTexts.model_validate,
    "costs": CostModel.model_validate,
    "choices": Choices.model_validate,
    "confidence": Confidence.model_validate,
    "gains": _gains,
    "int4": ModuleFile.model_validate,
}


def _study(storage: BaseStorage, name: str | None, *, make: bool) -> optuna.Study:
    """Open the study `name` (None: the only study in the storage); with `make`, create a missing study."""
    if make:
        return optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    names = sorted(optuna.get_all_study_names(storage))
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        wanted = "study: not named" if name is None else f"study '{name}': not in this storage"
        raise SelfspecError(f"{wanted}; the storage holds {', '.join(names) or 'no study'}")
    return optuna.load_study(study_name=name, storage=storage)


def _as_json(score: Score) -> dict[str, Any]:
    acceptance = None if score.acceptance is None else score.acceptance.model_dump(mode="json")
    controller = score.controller.model_dump(mode="json")
    proposers = [proposer.model_dump(mode="json") for proposer in score.proposers]
    nested = {"path": _path_as_json(score.path), "controller": controller, "acceptance": acceptance}
    return asdict(score) | nested | {"proposers": proposers}


def _score(data: Mapping[str, Any]) -> Score:
    trial = dict(data)
    trial["path"] = _path(trial["path"])
    trial["controller"] = ControllerSpec.model_validate(trial["controller"])
    if trial["acceptance"] is not None:
        trial["acceptance"] = AcceptanceCurve.model_validate(trial["acceptance"])
    trial["proposers"] = tuple(map(ProposerSpec.model_validate, trial.get("proposers", ())))
    for name in ("tokens_per_second", "speedup", "acceptance_rate", "tokens_per_round"):
        trial[name] = _figure(trial[name])
    return Score(**trial)


def _figure(value: Any) -> float:
    """Return a finite number as a float. Raises `TypeError` or `ValueError` for anything else."""
    if isinstance(value, bool | str) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _path_as_json(path: DraftPath) -> dict[str, Any]:
    sets = {
        mode: [list(sublayers.attention), list(sublayers.mlp)]
        for mode in ("skip", "int8", "int4")
        for sublayers in [getattr(path, mode)]
    }
    return sets | {"head": path.head, "vocabulary": None if path.vocabulary is None else list(path.vocabulary)}


def _path(data: Mapping[str, Any]) -> DraftPath:
    sets = {mode: SkipSet(*map(tuple, data[mode])) for mode in ("skip", "int8", "int4")}
    vocabulary = None if data["vocabulary"] is None else tuple(data["vocabulary"])
    return DraftPath(sets["skip"], vocabulary, sets["int8"], sets["int4"], data["head"])
