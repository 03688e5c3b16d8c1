"""The journal: a search's trials on disk as they are made, so that an interrupted search resumes where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from selfspec.acceptance import AcceptanceCurve
from selfspec.costs import CostModel
from selfspec.errors import SelfspecError
from selfspec.files import kind, read_text, write_text
from selfspec.profile import ControllerSpec
from selfspec.skip import SkipSet

from .objective import Score

START = '{"settings": '


class Journal:
    """JSON lines: the search's settings, what was measured beforehand, then every trial.

    Without a path it keeps nothing. Raises `SelfspecError` when the file is of a search with other settings, or is
    no journal; a last line that was cut short is dropped.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.costs: CostModel | None = None
        self.gains: tuple[float, ...] | None = None
        self.scores: dict[SkipSet, Score] = {}
        if path is None:
            return
        self._settings = settings
        if kind(path) != "missing":
            lines = self._read(path, settings)
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines))

    def _read(self, path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
        text = read_text(path)
        whole = text[: text.rfind("\n") + 1].splitlines()
        if not text.startswith(START[: len(text)]):
            raise SelfspecError(f"{path} holds something else; delete it, or save the profile elsewhere")
        if not whole:
            return [{"settings": settings}]  # killed before the first line was whole
        try:
            lines = [json.loads(line) for line in whole]
            if lines[0]["settings"] != json.loads(json.dumps(settings)):
                raise SelfspecError(f"{path} holds the trials of another search; resume with its options, or delete it")
            for line in lines[1:]:
                self._take(line)
        except SelfspecError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise SelfspecError(f"{path} is damaged ({type(error).__name__}); delete it to start anew") from None
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        if "costs" in line:
            self.costs = CostModel.model_validate(line["costs"])
        elif "gains" in line:
            self.gains = tuple(map(float, line["gains"]))
        else:
            trial = dict(line["trial"])
            trial["skip"] = SkipSet(*map(tuple, trial["skip"]))
            trial["controller"] = ControllerSpec.model_validate(trial["controller"])
            trial["vocabulary"] = tuple(trial.get("vocabulary", ()))
            if trial.get("acceptance") is not None:
                trial["acceptance"] = AcceptanceCurve.model_validate(trial["acceptance"])
            score = Score(**trial)
            self.scores[score.skip] = score

    def keep_costs(self, costs: CostModel) -> None:
        """Keep the cost model that all scores rest on."""
        self.costs = costs
        self._append({"costs": costs.model_dump(mode="json")})

    def keep_gains(self, gains: Sequence[float]) -> None:
        """Keep what skipping each variable alone brings."""
        self.gains = tuple(gains)
        self._append({"gains": list(gains)})

    def keep_score(self, score: Score) -> None:
        """Keep a trial."""
        self.scores[score.skip] = score
        trial = asdict(score) | {"skip": [score.skip.attention, score.skip.mlp]}
        trial["controller"] = score.controller.model_dump(mode="json")
        trial["acceptance"] = None if score.acceptance is None else score.acceptance.model_dump(mode="json")
        self._append({"trial": trial})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            if not self.path.exists():
                write_text(self.path, json.dumps({"settings": self._settings}) + "\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
