"""Records of trainings, and data frames of these records for plots. Does not import torch.

`selfspec train` writes a record, a JSON file, next to each trained part (draft head, bridge or adapter).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec.basics.errors import SelfspecError, one_line
from selfspec.basics.files import files_in, kind, read_text

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Training(BaseModel):
    """The record of one training.

    `history`: pairs (seconds of fitting, tokens per target pass on held-out texts). `acceptance`: the share of drafts
    of held-out texts that match the text up to each draft position.
    """

    model_config = ConfigDict(extra="ignore")
    kind: str
    model: str
    machine: str
    threads: int
    texts: int
    tokens: int
    steps: int
    seconds: Figure
    tokens_per_pass: Figure
    acceptance: Annotated[list[Share], Field(min_length=1)]
    history: Annotated[list[tuple[Figure, Figure]], Field(min_length=1)]


def read_trainings(source: Path) -> list[Training]:
    """Return the record in a file that `selfspec train` wrote, or all such records in a folder.

    Raises `SelfspecError` for any other file, and for a folder without records.
    """
    if kind(source) == "folder":
        files = [path for path in files_in(source) if path.suffix == ".json" and '"history"' in read_text(path)]
        if not files:
            raise SelfspecError(
                f"{source}: holds no .json file of a training; expected the folder of selfspec train --out"
            )
        return [_read(path) for path in sorted(files)]
    return [_read(source)]


def _read(path: Path) -> Training:
    try:
        return Training.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise SelfspecError(f"{path}: not what selfspec train writes ({where}: {one_line(first['msg'])})") from None


def learning_frame(trainings: list[Training]) -> pd.DataFrame:
    """Return a frame with a row for each evaluation on held-out texts during the trainings.

    Columns: `kind` of the trained part, `minutes` of fitting before it, `tokens_per_pass`.
    """
    rows = [(training.kind, seconds / 60, brings) for training in trainings for seconds, brings in training.history]
    return pd.DataFrame(rows, columns=["kind", "minutes", "tokens_per_pass"])


def place_frame(trainings: list[Training]) -> pd.DataFrame:
    """Return a frame with a row for each draft position, from 1: `kind`, `place`, `acceptance`.

    `acceptance`: the share of drafts of held-out texts that match the text up to that position.
    """
    rows = [
        (training.kind, place, share)
        for training in trainings
        for place, share in enumerate(training.acceptance, start=1)
    ]
    return pd.DataFrame(rows, columns=["kind", "place", "acceptance"])
