"""Choice of a method: the methods that apply to a model, the fastest one by measurement, and its profile."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.llm.llm import LLM
from selfspec.measure.bench_methods import THEIR_DRAFT_MODEL, find_method
from selfspec.profile.schema import Measurement, Profile
from selfspec.types.methods import EARLY_EXIT, FREE, NAMED


def applicable(profile: Profile, draft_model: str | None = None) -> list[str]:
    """Return the names of the methods that can be measured with a profile, and with a draft model if there is one.

    `transformers`' own methods are among them, as baselines.
    """
    names = ["plain"]
    if profile.drafts:
        names.append("skip")
        names += ["path"] if profile.path.cheaper and profile.path_only != profile else []
    names += [*FREE, EARLY_EXIT]
    names += [f"{kind}{draft_model}" for kind in NAMED] if draft_model else []
    names += ["hf", "hf-prompt-lookup"]
    return [*names, f"{THEIR_DRAFT_MODEL}{draft_model}"] if draft_model else names


def by_turns(tasks: Sequence[str]) -> list[int]:
    """Return the indices of the prompts in an order that alternates between the tasks."""
    counts: dict[str, int] = {}
    ranked = []
    for number, task in enumerate(tasks):
        ranked.append((counts.setdefault(task, 0), number))
        counts[task] += 1
    return [number for _, number in sorted(ranked)]


@dataclass(frozen=True)
class Recommendation:
    """The fastest method. `speedups`: by temperature, the speedup over plain decoding as (median, low, high).

    `rivals`: methods whose intervals overlap the fastest method's at every temperature.
    """

    method: str
    speedups: Mapping[float, tuple[float, float, float]]
    rivals: tuple[str, ...]

    @property
    def faster(self) -> bool:
        """Whether it is faster than plain decoding at every temperature."""
        return all(median > 1 for median, _, _ in self.speedups.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the recommendation, ready for JSON."""
        return {
            "method": self.method,
            "faster": self.faster,
            "speedups": [
                {"temperature": t, "median": median, "low": low, "high": high}
                for t, (median, low, high) in self.speedups.items()
            ],
            "rivals": list(self.rivals),
        }


def recommend(measured: Sequence[Mapping[str, Any]]) -> Recommendation:
    """Return the method with the highest geometric mean speedup over a benchmark's temperatures (from `Benchmark.at`).

    `transformers`' own methods are not recommended, nor are dropped methods, which were not measured to the end.
    """
    names = [name for name in measured[0]["methods"] if find_method(name).weights != "hf"]
    complete = [name for name in names if all(result["methods"][name]["dropped_after"] is None for result in measured)]
    speedups = {name: _speedups(measured, name) for name in complete}
    best = max(speedups, key=lambda name: math.prod(median for median, _, _ in speedups[name].values()))
    rivals = (
        name
        for name in complete
        if name not in (best, "plain") and all(speedups[name][t][2] >= low for t, (_, low, _) in speedups[best].items())
    )
    return Recommendation(best, speedups[best], tuple(rivals))


def _speedups(measured: Sequence[Mapping[str, Any]], name: str) -> dict[float, tuple[float, float, float]]:
    ratios = {result["temperature"]: result["methods"][name]["ratio"]["plain"] for result in measured}
    return {t: (ratio["median"], ratio["low"], ratio["high"]) for t, ratio in ratios.items()}


def fastest_by_task(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for each task, its prompts and our methods' mean speedup over plain decoding, fastest first.

    Only methods that ran on all prompts count. The list is empty if prompts have no tasks.
    """
    methods = {name: m["by_task"]["tasks"] for name, m in measured["methods"].items() if "by_task" in m}
    ours = {name: tasks for name, tasks in methods.items() if find_method(name).weights != "hf"}
    rows = []
    for number, row in enumerate(methods.get("plain", ())):
        speeds = {name: tasks[number]["speedup"]["plain"] for name, tasks in ours.items()}
        order = sorted(speeds, key=lambda name: -speeds[name])
        rows.append(
            {"task": row["task"], "prompts": row["prompts"], "speedups": {name: speeds[name] for name in order}}
        )
    return rows


def fastest_first(measured: Mapping[str, Any]) -> list[str]:
    """Return the methods by their speedup over plain decoding, fastest first; dropped ones come last."""
    methods = measured["methods"]
    return sorted(
        methods, key=lambda n: (methods[n]["dropped_after"] is not None, -methods[n]["ratio"]["plain"]["median"])
    )


def profile_of(llm: LLM, name: str, profile: Profile) -> Profile:
    """Return the profile that a method of ours drafts with; for plain decoding, one that drafts nothing."""
    known = find_method(name)
    return Profile(model=llm.identity) if known.profile is None else known.profile(llm, profile)


def preparation(profile: Profile) -> float | None:
    """Return the minutes that a profile's search and the training of its parts took; None if neither is known."""
    seconds = [] if profile.search is None else [profile.search.seconds]
    if profile.folder is not None:
        files = [part.file for part in profile.parts.values()]
        own = getattr(profile.draft, "model", None)
        for file in [*files, *([own] if own is not None else [])]:
            story = (profile.folder / file).with_suffix(".json")
            if story.is_file():
                seconds.append(json.loads(story.read_text())["seconds"])
    return sum(seconds) / 60 if seconds else None


def measurements(bench: Mapping[str, Any], name: str, *, held_out: bool) -> list[Measurement]:
    """Return a method's own figures from a benchmark, in the form that profiles store."""
    made = []
    for result in bench["temperatures"]:
        mine, ratio = result["methods"][name], result["methods"][name]["ratio"]["plain"]
        made.append(
            Measurement(
                **{key: bench[key] for key in ("machine", "device", "dtype", "threads", "prompts", "rounds")},
                held_out=held_out,
                max_new_tokens=bench["max_new_tokens"],
                temperature=result["temperature"],
                plain_tokens_per_second=round(result["methods"]["plain"]["tokens_per_second"], 1),
                tokens_per_second=round(mine["tokens_per_second"], 1),
                speedup=round(ratio["median"], 3),
                interval=[round(ratio["low"], 3), round(ratio["high"], 3)],
                acceptance_rate=round(mine["acceptance_rate"] or 0.0, 3),
                tokens_per_round=round(mine["tokens_per_round"], 3),
            )
        )
    return made
