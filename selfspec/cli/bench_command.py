"""The command `selfspec bench`, with tables by task as in Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_not_read, check_writable, write_text
from selfspec.cli.common import (
    checked_profile,
    drafting_with,
    print_json,
    progress,
    quiet,
    resolve_drafting,
    size,
    stderr,
    stdout,
)
from selfspec.cli.options import BENCHED, BenchCommand
from selfspec.measure.bench_methods import (
    any_drafts,
    check_methods,
    check_supported,
    draft_model,
    is_profile,
    supported,
)
from selfspec.models.loading import check_at_hand, read_identity
from selfspec.profile.shipped import check_profile
from selfspec.types.identity import BitsRead

if TYPE_CHECKING:
    from rich.console import Console

    from selfspec.llm.llm import LLM
    from selfspec.measure.bench import BenchCallbacks, BenchTask, Oracle
    from selfspec.measure.model_copies import ModelCopies
    from selfspec.types.costs import CostModel


MIN_PROMPTS_PER_TASK = 2  # figures by task need at least this mean number of prompts per task
MAX_NAME_WIDTH = 23  # columns of a task's name, so that a table fits 80 columns


def by_task_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table per method except plain decoding: a row per task and one for all tasks, within 80 columns."""
    methods = {name: m["by_task"] for name, m in result["methods"].items() if name != "plain" and _has_task_figures(m)}
    return [_table(f"{name}, temperature {result['temperature']:g}", by_task) for name, by_task in methods.items()]


def by_task_notes(result: Mapping[str, Any]) -> list[str]:
    """Return lines that explain the columns of the tables; empty if there are no tables."""
    if not by_task_tables(result):
        return []
    return [
        "tok/s (mean over prompts), tok/pass and / plain (of tok/s): as in Spec-Bench",
        "median: over prompts, of the speed over plain decoding's, with a 95% bootstrap interval",
    ]


def texts_line(result: Mapping[str, Any]) -> list[str]:
    """Return one line on how many texts of each method equal plain decoding's; empty for sampled texts."""
    by_method = [
        f"{name} {_format_verdicts(m['same_text'])}"
        for name, m in result["methods"].items()
        if m["same_text"] is not None
    ]
    return [f"texts identical to plain decoding's, by token ids: {'; '.join(by_method)}"] if by_method else []


def _has_task_figures(method: Mapping[str, Any]) -> bool:
    """Return whether a method has enough prompts for figures by task."""
    if "by_task" not in method:
        return False
    tasks = method["by_task"]["tasks"]
    return bool(method["by_task"]["overall"]["prompts"] >= MIN_PROMPTS_PER_TASK * len(tasks))


def _table(title: str, by_task: Mapping[str, Any]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("task", no_wrap=True, max_width=MAX_NAME_WIDTH)
    for name in ("n", "tok/s", "tok/pass", "/ plain", "median", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (*by_task["tasks"], {"task": "overall", **by_task["overall"]}):
        ratio, same = row["ratio"]["plain"], row["same_text"]
        table.add_row(
            Text(row["task"]),
            str(row["prompts"]),
            f"{row['mean_tokens_per_second']:.2f}",
            f"{row['mean_accepted_tokens']:.2f}",
            f"{row['speedup']['plain']:.2f}",
            f"{ratio['median']:.2f} {ratio['low']:.2f}-{ratio['high']:.2f}",
            "-" if same is None else str(same["same"]),
        )
    return table


def _format_verdicts(verdicts: Mapping[str, int]) -> str:
    failures = [f"{verdicts['near_ties']} near-ties"] if verdicts["near_ties"] else []
    failures += [f"{verdicts['bugs']} BUGS, please report"] if verdicts["bugs"] else []
    suffix = f" ({', '.join(failures)})" if failures else ""
    return f"{verdicts['same']} of {sum(verdicts.values())}{suffix}"


PROMPTS, TOKENS, ROUNDS = (12, 6), (96, 64), (5, 3)  # defaults for a model as loaded, and for a widened model


def run(options: BenchCommand) -> int:
    """Validate the options before loading the model, then measure; return 130 after an interrupt."""
    quiet()
    name, profile, controller = resolve_drafting(options.drafting)
    methods = tuple(part.strip() for part in options.methods.split(","))
    temperatures = read_temperatures(options.temperature)
    if options.out is not None:
        check_writable(options.out)
        check_not_read(options.out, options.drafting.model, options.drafting.profile, options.drafting.store, *methods)
        options.data.check_not_written(options.out, f"--out {options.out}")
    wide = options.widen > 1
    if wide and options.device_options.device_map is not None:
        raise SelfspecError("--widen and --device-map: a widened model is made on one device; expected one of them")
    raw_prompts = options.data.read(held_out=True)
    limit = options.limit or (PROMPTS[wide] if raw_prompts is None or options.data.preset else len(raw_prompts.texts))
    options.device_options.set_threads()

    from selfspec.llm.prompt_encoding import check_chat
    from selfspec.measure.bench import BenchTask
    from selfspec.measure.model_copies import load_model_copies
    from selfspec.speculation.sampling import check_sampling

    check_methods(methods)
    check_named(methods)
    named = options.drafting.profile if any_drafts(methods) or profile is not None else "none"
    for temperature in temperatures:
        check_sampling(temperature, None, None)
    if profile is not None:
        check_profile(profile, read_identity(name))
    if options.data.chat:
        check_chat(name)
    subjects = load_model_copies(
        name,
        methods,
        widened=options.widen,
        device=options.device_options.placement,
        dtype=options.device_options.dtype,
        profile=profile or named,
        store=options.drafting.store,
    )
    drafting = drafting_with(
        subjects.profile,
        subjects.identity,
        named,
        default=subjects.has_default_profile,
        controller=controller,
        store=options.drafting.store,
    )
    if options.methods == BENCHED:
        methods = tuple(supported(methods, subjects.plain, drafting.profile))
    for method in methods:
        check_supported(method, subjects.plain, drafting.profile)
    tokens = options.max_new_tokens or TOKENS[wide]
    encoded = options.data.encode_prompts(
        subjects.plain, raw_prompts, limit=limit, max_new_tokens=tokens, last=raw_prompts is None
    )
    rounds = options.rounds or ROUNDS[wide]
    task = BenchTask(methods, encoded.prompts, tokens, rounds, drafting.profile, encoded.tasks, seed=options.seed)
    metadata = {"source": drafting.source, "prompt_source": encoded.source, "chat": encoded.chat}
    saved = _Saved(options.out)
    bench, interrupted = run_benchmark(subjects, task, temperatures, metadata, save=saved, oracle=_oracle())
    if options.json:
        print_json(bench)
    else:
        _report(bench, stdout())
    saved.check()
    return 130 if interrupted else 0


class _Saved:
    """Writes results to the file `out`, if there is one; where that fails, they can be printed all the same."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._error: SelfspecError | None = None

    def __call__(self, results: dict[str, Any]) -> None:
        """Write the results so far."""
        self._error = None
        try:
            if self._out is not None:
                write_text(self._out, json.dumps(results, indent=1) + "\n")
        except SelfspecError as error:
            self._error = error

    def check(self) -> None:
        """Raise `SelfspecError` if the last results could not be written."""
        if self._error is not None:
            raise self._error


def run_benchmark(
    subjects: ModelCopies,
    task: BenchTask,
    temperatures: list[float],
    metadata: Mapping[str, Any],
    *,
    save: Callable[[dict[str, Any]], None] = lambda results: None,
    oracle: Oracle | None = None,
) -> tuple[dict[str, Any], bool]:
    """Run the benchmark at each temperature; return its results and whether it was interrupted.

    `metadata`: fields added to the results. `save`: called with the results after each temperature. `oracle`: computes
    the upper bound on the speedup, as in `Benchmark`. An interrupt before the first results is raised.
    """
    from selfspec.measure.bench import Benchmark

    with _Progress(stderr(), len(temperatures)) as shown:
        bench = Benchmark(subjects, task, oracle, shown.watch())
        results: dict[str, Any] = {**bench.conditions(), **metadata, "temperatures": []}
        try:
            for temperature in temperatures:
                shown.temperature = temperature
                results["temperatures"].append(bench.run_temperature(temperature))
                save(results)
        except KeyboardInterrupt:
            if not results["temperatures"]:
                raise
            return results, True
    return results, False


def check_named(methods: Sequence[str]) -> None:
    """Raise `SelfspecError` if a draft model or profile named as a method does not exist."""
    for name in methods:
        if model := draft_model(name):
            check_at_hand(model)
        elif is_profile(name):
            checked_profile(name)


def read_temperatures(text: str) -> list[float]:
    """Parse temperatures separated by commas. Raises `SelfspecError`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SelfspecError(f"--temperature {text}: expected numbers separated by commas, such as 0,0.8") from None


def _oracle() -> Oracle:
    from selfspec.measure.bench import Oracle
    from selfspec.search.continuations import DecodingSettings
    from selfspec.search.forecast import oracle_seconds
    from selfspec.search.oracle import oracle

    def bound(llm: LLM, task: BenchTask, costs: CostModel, temperature: float) -> tuple[float, float]:
        found = oracle(llm, task.profile, costs, task.prompts, DecodingSettings(task.max_new_tokens, temperature))
        return found.speedup, found.tokens_per_round

    return Oracle(bound, oracle_seconds)


class _Progress:
    """Progress display: the current stage, the estimated time, and a progress bar of the runs."""

    def __init__(self, console: Console, temperatures: int) -> None:
        self._console, self._temperatures = console, temperatures
        self._bar = progress(console)
        self._task = self._bar.add_task("", total=None)
        self.temperature: float | None = None

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.remove_task(self._task)
        self._bar.stop()

    def watch(self) -> BenchCallbacks:
        """Return the callbacks through which the benchmark updates the display."""
        from selfspec.measure.bench import BenchCallbacks

        return BenchCallbacks(self._stage, self._estimate, lambda: self._bar.advance(self._task))

    def _stage(self, name: str) -> None:
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=None)

    def _estimate(self, seconds: float, runs: int, further: float) -> None:
        where = "" if self.temperature is None else f"temperature {self.temperature:g}: "
        after = f", and measuring costs {_duration(further)}" if further else ""
        times = f", for each of {self._temperatures} temperatures" if self._temperatures > 1 else ""
        self._console.print(f"{where}{runs} runs will take about {_duration(seconds)}{after}{times}")
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task("running", total=runs)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _report(bench: dict[str, Any], console: Console) -> None:
    wide = f" widened {bench['widened']} times" if bench["widened"] > 1 else ""
    threads = "1 thread" if bench["threads"] == 1 else f"{bench['threads']} threads"
    bits = bench["bits_per_weight"]
    bits_text = f"; {BitsRead(**bits).summary}" if bits is not None and bits["draft"] < bits["plain"] else ""
    lines = [
        f"{bench['model']}{wide}; {bench['machine']}; {threads}; {bench['dtype']}; {bench['prompts']} prompts x "
        f"{bench['max_new_tokens']} tokens x {bench['rounds']} rounds",
        f"prompts: {bench['prompt_source']}{', as chat messages' * bench['chat']}",
        f"drafts: {bench['source']}{bits_text}",
        f"weights: {size(bench['weight_bytes'])}, {bench['layouts']['plain']} for plain decoding, "
        f"{bench['layouts']['drafting']} for drafting ({size(bench['extra_bytes'])} more)"
        + (f"; held in {bench['held']}, exactly" if bench["held"] else ""),
    ]
    for name, passes in bench["passes"].items():
        layout = bench["layouts"].get(name, "as loaded")
        ratios = " ".join(f"{seconds / passes['1']:.2f}" for seconds in passes.values())
        lines.append(f"pass over {', '.join(passes)} rows, {layout}: {passes['1'] * 1e3:.3g} ms x {ratios}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    for result in bench["temperatures"]:
        console.print()
        for table in _tables(result):
            console.print(table)
        for line in _notes(bench, result):
            console.print(line, soft_wrap=True, markup=False)
        for table in by_task_tables(result):
            console.print()
            console.print(table)
        for line in by_task_notes(result):
            console.print(line, soft_wrap=True, markup=False)


def _tables(result: dict[str, Any]) -> list[Table]:
    """Return two tables of the methods at one temperature, within 80 columns: speeds, and latencies with memory."""
    bases = list(next(iter(result["methods"].values()))["ratio"])
    speeds = method_table(
        f"temperature {result['temperature']:g}", "tok/s", *(f"/ {base}" for base in bases), "tok/pass", "accept"
    )
    others = method_table(None, "first token", "next, p50", "next, p95", "memory")
    for name, m in result["methods"].items():
        speeds.add_row(
            Text(name),
            f"{m['tokens_per_second']:.2f}",
            *("1" if base == name else ratio(m["ratio"][base]) for base in bases),
            f"{m['tokens_per_round']:.2f}",
            "-" if m["acceptance_rate"] is None else f"{m['acceptance_rate']:.0%}",
        )
        first, following = m["first_token_seconds"], m["inter_token_seconds"]
        latencies = (_ms(first["p50"]), _ms(following["p50"]), _ms(following["p95"]))
        others.add_row(Text(name), *latencies, size(m["memory_bytes"]))
    return [speeds, others]


def method_table(title: str | None, *columns: str) -> Table:
    """Return an empty table with a column for the method and one for each of `columns`."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _notes(bench: dict[str, Any], result: dict[str, Any]) -> list[str]:
    lines = ["memory: weights, and the KV cache for the longest text; on a GPU also torch's further peak memory"]
    if result["process_peak_bytes"] is not None:
        lines[0] += f"; peak of this process, all methods together: {size(result['process_peak_bytes'])}"
    if result["plain_of_roofline"] is not None:
        lines.append(
            f"roofline of plain decoding: {size(bench['bytes_read'])} at {result['read_bandwidth'] / 1e9:.1f} GB/s are "
            f"{result['read_bandwidth'] / bench['bytes_read']:.4g} tok/s; a plain step takes "
            f"{result['plain_of_roofline']:.0%} of its time to read the weights"
        )
    if drafts := result.get("profile"):
        places = " ".join(f"{share:.0%}" for share in result["methods"]["profile"]["acceptance_by_position"])
        v = " ".join(f"v({w}) {value:.2f}" for w, value in drafts["v"].items())
        accepted = result["methods"]["profile"]["accepted_per_round"]
        lines.append(f"profile: {accepted:.2f} drafted tokens accepted a pass; by position: {places}")
        lines.append(
            f"in plain steps: draft step c {drafts['c']:.2f}; verification {v}; overhead of a round "
            f"{drafts['round']:.2f}"
        )
        by = " by rule token" if result["temperature"] else ""
        bound = f"; oracle bound{by} {drafts['oracle']['speedup']:.2f}" if "oracle" in drafts else ""
        lines.append(
            f"predicted speedup over plain: by theory (i.i.d.) {drafts['theory']:.2f}, by the costs of its rounds "
            f"{drafts['costs_of_its_rounds']:.2f}{bound}"
        )
    return [*lines, *texts_line(result)]


def ratio(r: Mapping[str, float]) -> str:
    """Format a median and the ends of its confidence interval."""
    return f"{r['median']:.2f} {r['low']:.2f}-{r['high']:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g} ms"
