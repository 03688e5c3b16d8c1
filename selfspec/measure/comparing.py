"""Choice of a method by benchmark: which methods apply to a model, which method is fastest, and its profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.basics.files import read_cached
from selfspec.llm.llm import LLM
from selfspec.measure.bench_methods import THEIR_DRAFT_MODEL, find_method
from selfspec.profile.schema import Measurement, Profile
from selfspec.types.methods import EARLY_EXIT, FREE, NAMED


def applicable(profile: Profile, draft_model: str | None = None) -> list[str]:
    """Return the names of the methods that a benchmark can measure with a profile.

    `draft_model`: the name of a smaller model; the methods that draft with it are added (None: no such methods). The
    baselines by `transformers`' own generate are included.
    """
    names = ["plain"]
    if profile.drafts:
        names.append("profile")
        names += ["path"] if profile.path.cheaper and (profile.also or profile.path_only.draft != profile.draft) else []
    names += [*FREE, EARLY_EXIT]
    names += [f"{kind}{draft_model}" for kind in NAMED] if draft_model else []
    names += ["hf", "hf-prompt-lookup"]
    return [*names, f"{THEIR_DRAFT_MODEL}{draft_model}"] if draft_model else names


def by_turns(tasks: Sequence[str]) -> list[int]:
    """Return the prompts' indices in an order that alternates between tasks; `tasks`: the task name of each prompt."""
    counts: dict[str, int] = {}
    ranked = []
    for number, task in enumerate(tasks):
        ranked.append((counts.setdefault(task, 0), number))
        counts[task] += 1
    return [number for _, number in sorted(ranked)]


@dataclass(frozen=True)
class Recommendation:
    """The fastest method of a benchmark.

    `speedups`: for each temperature, the method's speedup over plain decoding: the median over prompts, and the ends
    `low` and `high` of its 95% interval. `rivals`: the methods whose intervals reach the interval of the fastest method
    at every temperature.
    """

    method: str
    speedups: Mapping[float, tuple[float, float, float]]
    rivals: tuple[str, ...]

    @property
    def faster(self) -> bool:
        """Whether the method's median speedup over plain decoding is above 1 at every temperature."""
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
    """Return the method with the highest geometric mean of its speedups at a benchmark's temperatures.

    `measured`: the results of `Benchmark.run_temperature`. Methods of `transformers` and methods that the benchmark
    dropped are not recommended.
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
    """Return, for each task, the number of its prompts and the mean speedup of selfspec's methods, fastest first.

    Speedups are over plain decoding. Only methods that ran on all prompts count. The list is empty if the prompts have
    no tasks.
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
    """Return the method names by speedup over plain decoding, fastest first; dropped methods come last."""
    methods = measured["methods"]
    return sorted(
        methods, key=lambda n: (methods[n]["dropped_after"] is not None, -methods[n]["ratio"]["plain"]["median"])
    )


def profile_of(llm: LLM, name: str, profile: Profile) -> Profile:
    """Return the profile that selfspec's method `name` drafts with; for plain decoding, a profile without drafts."""
    known = find_method(name)
    return Profile(model=llm.identity) if known.profile is None else known.profile(llm, profile)


def preparation(profile: Profile) -> float | None:
    """Return the minutes that a profile's search and the training of its parts took; None if neither is known.

    Trained parts are draft heads, bridges and adapters; each training wrote its seconds to a JSON file beside the part.
    """
    seconds = [] if profile.search is None else [profile.search.seconds]
    if profile.folder is not None:
        files = [part.file for part in profile.parts.values()]
        own = getattr(profile.draft, "model", None)
        for file in [*files, *([own] if own is not None else [])]:
            story = (profile.folder / file).with_suffix(".json")
            record = read_cached(story)  # of the training, if it can be read
            if isinstance(record, dict) and isinstance(record.get("seconds"), int | float):
                seconds.append(record["seconds"])
    return sum(seconds) / 60 if seconds else None


def measurements(bench: Mapping[str, Any], name: str, *, held_out: bool) -> list[Measurement]:
    """Return the figures of method `name` in a benchmark, one `Measurement` per temperature, as profiles store them.

    `held_out`: whether the benchmark's prompts were not used to search for the profile.
    """
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
