"""Tidy data frames of results, one row per observation, for plots and for notebooks. Does not import torch.

The frames of a search's trials are in `selfspec.search.trial_tables`.

`selfspec train` writes a record, a JSON file, next to each trained part (draft head, bridge or adapter).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec.basics.checked_model import Json, NonNegative, Share, first_problem
from selfspec.basics.errors import SelfspecError, one_line
from selfspec.basics.files import files_in, kind, parse_json, read_text
from selfspec.types.stats import Round, acceptance_by_position


class _Read(BaseModel):
    """Base class of the schemas of a benchmark's JSON. Fields that are not declared are ignored."""

    model_config = ConfigDict(extra="ignore")


class _Ratio(_Read):
    median: NonNegative
    low: NonNegative
    high: NonNegative


class _Times(_Read):
    p50: NonNegative | None
    p95: NonNegative | None


class _OfTask(_Read):
    task: str = "all"
    sources: dict[str, Share] = {}


class _ByTask(_Read):
    tasks: list[_OfTask]


class _Method(_Read):
    tokens_per_second: NonNegative
    ratio: dict[str, _Ratio]
    first_token_seconds: _Times
    inter_token_seconds: _Times
    tokens_per_round: NonNegative
    acceptance_rate: Share | None
    acceptance_by_position: list[Share]
    sources: dict[str, Share] = {}
    by_task: _ByTask | None = None


class _Temperature(_Read):
    temperature: NonNegative
    methods: Annotated[dict[str, _Method], Field(min_length=1)]


class _Bench(_Read):
    model: str
    widened: int
    machine: str
    device: str
    dtype: str
    threads: int
    torch: str
    prompts: int
    max_new_tokens: int
    rounds: int
    skipped: int
    sub_layers: int
    source: str
    temperatures: Annotated[list[_Temperature], Field(min_length=1)]


def read_bench(path: Path) -> Json:
    """Return the JSON object in a file written by `selfspec bench --out`. Raises `SelfspecError` for any other file."""
    text = read_text(path)
    try:
        bench: Json = parse_json(text)
        check_bench(bench)
    except SelfspecError as error:
        raise SelfspecError(f"{path}: {error}") from None
    except ValueError as error:
        raise SelfspecError(f"{path}: not valid JSON ({one_line(error)})") from None
    return bench


def check_bench(bench: Any) -> None:
    """Raise `SelfspecError` unless `bench` is a JSON object as `selfspec bench --out` writes it."""
    try:
        _Bench.model_validate(bench)
    except ValidationError as error:
        problem = first_problem(error, "the file")
        raise SelfspecError(f"not what selfspec bench --out writes ({problem})") from None


def bench_frame(bench: Json) -> pd.DataFrame:
    """Return a frame with a row for each temperature and method of a benchmark.

    Columns: `speedup`, the median over prompts of the speedup over plain decoding; `low` and `high`, its 95% bootstrap
    interval; `first_token_ms`, the median TTFT in milliseconds; `next_ms` and `next_ms_95`, the median and the 95%
    quantile of the inter-token latency in milliseconds; further figures as in the JSON. Raises `SelfspecError` if
    `bench` is not a result of `selfspec bench`.
    """
    check_bench(bench)
    rows = []
    for result in bench["temperatures"]:
        for name, method in result["methods"].items():
            ratio = method["ratio"].get("plain", {})
            rows.append(
                {
                    "temperature": float(result["temperature"]),
                    "method": name,
                    "tokens_per_second": method["tokens_per_second"],
                    "speedup": ratio.get("median"),
                    "low": ratio.get("low"),
                    "high": ratio.get("high"),
                    "first_token_ms": _ms(method["first_token_seconds"]["p50"]),
                    "next_ms": _ms(method["inter_token_seconds"]["p50"]),
                    "next_ms_95": _ms(method["inter_token_seconds"]["p95"]),
                    "tokens_per_round": method["tokens_per_round"],
                    "acceptance_rate": method["acceptance_rate"],
                }
            )
    figures = [column for column in rows[0] if column != "method"]
    return pd.DataFrame(rows).astype(dict.fromkeys(figures, float))


def bench_position_frame(bench: Json) -> pd.DataFrame:
    """Return the acceptance by draft position of each drafting method of a benchmark, in the form of `position_frame`.

    The column `drafts` is NaN, as a benchmark does not store it. Raises `SelfspecError` if `bench` is not a result of
    `selfspec bench`.
    """
    check_bench(bench)
    parts = [
        _positions(method["acceptance_by_position"], name, float(result["temperature"]))
        for result in bench["temperatures"]
        for name, method in result["methods"].items()
    ]
    return pd.concat(parts, ignore_index=True)


def source_frame(bench: Json) -> pd.DataFrame:
    """Return a frame with a row for each temperature, method, task and source of tokens of a benchmark.

    The task `all` stands for all prompts. `share`: the share of the emitted tokens that the source (the draft path,
    lookup, ..) proposed; tokens without a source come from the model itself. Methods without known sources are left
    out. Raises `SelfspecError` if `bench` is not a result of `selfspec bench`.
    """
    check_bench(bench)
    rows = []
    for result in bench["temperatures"]:
        for name, method in result["methods"].items():
            tasks = (method.get("by_task") or {"tasks": ()})["tasks"]
            tasks = [entry if entry["task"] != "all" else {**entry, "task": '"all"'} for entry in tasks]
            for entry in (*tasks, {"task": "all", "sources": method.get("sources", {})}):
                shares = entry.get("sources", {}).items()
                rows += [
                    (float(result["temperature"]), name, entry["task"], source, float(share))
                    for source, share in shares
                ]
    return pd.DataFrame(rows, columns=["temperature", "method", "task", "source", "share"]).astype({"share": float})


def position_frame(rounds: Sequence[Round]) -> pd.DataFrame:
    """Return a frame with a row for each draft `position`, from 1.

    `drafts`: the number of drafts that reach the position. `acceptance`: the share of these drafts whose token at the
    position was accepted. The column `method` is `profile`, and `temperature` 0.
    """
    frame = _positions(acceptance_by_position(rounds), "profile", 0.0)
    frame["drafts"] = [float(sum(done.drafted >= place for done in rounds)) for place in frame["position"]]
    return frame


def _positions(shares: Sequence[float], method: str, temperature: float) -> pd.DataFrame:
    places = range(1, len(shares) + 1)
    rows = [(method, temperature, place, share, None) for place, share in zip(places, shares, strict=True)]
    frame = pd.DataFrame(rows, columns=["method", "temperature", "position", "acceptance", "drafts"])
    return frame.astype({"temperature": float, "position": int, "acceptance": float, "drafts": float})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


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
    seconds: NonNegative
    tokens_per_pass: NonNegative
    acceptance: Annotated[list[Share], Field(min_length=1)]
    history: Annotated[list[tuple[NonNegative, NonNegative]], Field(min_length=1)]


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
        problem = first_problem(error, "it")
        raise SelfspecError(f"{path}: not what selfspec train writes ({problem})") from None


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
