"""The benchmark of `selfspec bench`: runs every method on the same prompts, interleaved with plain decoding.

Plain decoding is decoding without drafts. Speeds are compared with measured costs, theory and the memory roofline.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from selfspec.basics.checked_model import Json
from selfspec.basics.machine import peak_growth, process_peak, read_bandwidth, release_memory
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.bench_methods import any_drafts, find_method
from selfspec.measure.cost_fitting import forward_seconds, measure_path_costs, path_costs_seconds
from selfspec.measure.model_copies import ModelCopies, extra_drafter_bytes
from selfspec.measure.pace import Pace
from selfspec.measure.summary import Verdict, by_task, count_verdicts, expected, summary, theory, verdict
from selfspec.measure.timing import Method, Runs, conditions, interleave, same_length
from selfspec.models.layout import weight_bytes
from selfspec.models.stored_linear import PackedLinear, StoredEmbedding
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.text.prompt_template import Prompt
from selfspec.types.costs import CostModel
from selfspec.types.identity import bits_read
from selfspec.types.stats import Stats

WIDTHS = (1, 2, 3, 4, 6, 8)  # tokens per pass of the timed forward passes


@dataclass(frozen=True)
class BenchTask:
    """The task of a benchmark: run each of `methods` on each of `prompts`, `rounds` times.

    `profile`: the profile that the methods `profile`, `path` and `guarded` draft with. `tasks`: the task name of each
    prompt; empty for no figures by task. `patience`: the number of prompts after which a method that is slower than
    plain decoding is dropped (None: never). `seed`: seed of sampling, with which each run of a method on a prompt gives
    the same text (None: random texts).
    """

    methods: tuple[str, ...]
    prompts: Sequence[Prompt]
    max_new_tokens: int
    rounds: int
    profile: Profile
    tasks: Sequence[str] = ()
    patience: int | None = None
    seed: int | None = None


@dataclass
class BenchCallbacks:
    """Callbacks that report the progress of a benchmark.

    `stage(name)`: a stage has started. `estimate(seconds, runs, further)`: the estimated seconds of all runs, their
    number, and the estimated seconds of what follows them at the same temperature. `run()`: a run has finished.
    """

    stage: Callable[[str], None] = lambda name: None
    estimate: Callable[[float, int, float], None] = lambda seconds, runs, further: None
    run: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Ran:
    """The runs at one temperature, by method name.

    `texts[name][prompt]`: the distinct texts (token ids) of the method's runs on a prompt. `growth[name]`: the bytes by
    which GPU memory grew in the method's first runs; empty on a CPU. `drafters[name]`: the method's drafter; None for
    plain decoding and for methods of `transformers`.
    """

    runs: Runs
    texts: Mapping[str, Sequence[Collection[tuple[int, ...]]]]
    growth: Mapping[str, Sequence[int]]
    drafters: Mapping[str, Drafter | None]


@dataclass(frozen=True)
class Oracle:
    """The upper bound on the speedup of `profile`: a drafter that always stops drafting at the best point.

    `bound(llm, task, costs, temperature)`: returns the speedup and the tokens per round of that drafter.
    `seconds(lengths, max_new_tokens, pace)`: returns the seconds that this is expected to take on prompts of these
    lengths in tokens.
    """

    bound: Callable[[LLM, BenchTask, CostModel, float], tuple[float, float]]
    seconds: Callable[[Sequence[int], int, Pace], float]


@dataclass
class Benchmark:
    """A benchmark, which runs one temperature at a time.

    `subjects`: the copies of the model that the methods run on. `oracle`: the upper bound of `profile`; None: it is not
    computed. `watch`: the progress callbacks.
    """

    subjects: ModelCopies
    task: BenchTask
    oracle: Oracle | None = None
    watch: BenchCallbacks = field(default_factory=BenchCallbacks)

    def conditions(self) -> Json:
        """Return the description of machine, model and task, with the memory and pass timings that need no decoding."""
        s, t = self.subjects, self.task
        runtime = s.plain.runtime
        self.watch.stage("reading memory")
        own, read = weight_bytes(s.plain.model), _bytes_read(s.plain)
        bandwidth = read_bandwidth(read, runtime.device)
        self.watch.stage("timing passes")
        context = self._context()
        where = conditions(runtime)
        copies = s.drafting.runtime.extra_bytes(t.profile.path) if any_drafts(t.methods) else 0
        bits = bits_read(t.profile.path, runtime.skeleton.identity, dtype=s.plain.held or where["dtype"])
        return {
            "model": s.plain.name,
            "widened": s.widened,
            **where,
            "torch": torch.__version__,
            "prompts": len(t.prompts),
            "max_new_tokens": t.max_new_tokens,
            "rounds": t.rounds,
            "seed": t.seed,
            "skipped": len(t.profile.skip_set),
            "path": t.profile.path.summary,
            "bits_per_weight": None if bits is None else {"draft": bits.draft, "plain": bits.plain},
            "draft": t.profile.draft.model_dump(mode="json", exclude_none=True),
            "sub_layers": 2 * runtime.layers,
            "layouts": dict(s.layouts),
            "held": s.plain.held,
            "weight_bytes": own,
            "extra_bytes": weight_bytes(s.drafting.model) - own + copies,
            "bytes_read": read,
            "read_bandwidth": bandwidth,
            "roofline": bandwidth / read,
            "passes": {
                name: {str(w): seconds for w, seconds in _passes(llm.runtime, context).items()}
                for name, llm in s.models.items()
            },
        }

    def run_temperature(self, temperature: float) -> Json:
        """Run every method at a temperature and return its figures.

        If `profile` is among the methods and its path is cheaper than the full model, the result also holds its
        speedups by measured costs, by theory and by the oracle.
        """
        t = self.task
        options = same_length(
            Options(
                max_new_tokens=t.max_new_tokens,
                temperature=temperature,
                seed=t.seed,
                rule=None if t.seed is None or not temperature else "block",  # as without a seed
            )
        )
        ran = self._run(options)
        result: Json = {"temperature": temperature, "methods": {}}
        bases = [base for base in ("plain", "hf") if base in t.methods]
        ended = {name: sum(map(bool, prompts)) for name, prompts in ran.runs.stats.items()}
        complete = {name for name, prompts in ran.runs.stats.items() if len(prompts[-1]) == t.rounds}
        for name in t.methods:
            verdicts = None if temperature else self._verdicts(name, ran.texts)
            result["methods"][name] = {
                **summary(ran.runs, name, bases=bases),
                "memory_bytes": self._memory_bytes(name, ran.drafters[name]) + sum(ran.growth[name]),
                "same_text": None if verdicts is None else count_verdicts(verdicts),
                "prompts": ended[name],
                "dropped_after": None if name in complete else ended[name],
            }
            if t.tasks and name in complete:
                measured = [base for base in bases if base in complete]
                tasks = by_task(ran.runs, name, t.tasks, bases=measured, verdicts=verdicts)
                result["methods"][name]["by_task"] = tasks
        if self._measures_profile:
            runs = [run for prompt in ran.runs.stats["profile"] for run in prompt]
            result["profile"] = self._about_profile(options, runs)
        release_memory()
        read = _bytes_read(self.subjects.plain)
        result["process_peak_bytes"] = process_peak()
        result["read_bandwidth"] = read_bandwidth(read, self.subjects.plain.runtime.device)
        step = result["methods"]["plain"]["inter_token_seconds"]["p50"]
        result["plain_of_roofline"] = None if step is None else read / result["read_bandwidth"] / step
        return result

    def _run(self, options: Options) -> _Ran:
        """Run every method on every prompt, interleaved, and return the runs with their texts and memory growth."""
        t, watch = self.task, self.watch
        last: dict[str, tuple[int, ...]] = {}
        drafters = self._drafters()
        methods = self._methods(options, last, drafters)
        watch.stage("warming up")
        lengths, pace = self._lengths, self._pace
        warm_prompt, shortest = typical(lengths, pace), t.prompts[lengths.index(min(lengths))]
        warm: dict[str, Stats] = {}
        growth: dict[str, list[int]] = {}
        texts: dict[str, list[set[tuple[int, ...]]]] = {name: [set() for _ in t.prompts] for name in methods}

        def warmed(name: str, run: Method) -> Method:
            def first(prompt: Prompt) -> Stats:
                if name in growth:
                    return run(prompt)
                with peak_growth(self.subjects.plain.runtime.device) as growth[name]:
                    run(shortest)  # as a method's first run is slower than its later ones, which the next one foretells
                    return run(prompt)

            return first

        def on_warm(name: str, stats: Stats) -> None:
            warm[name] = stats
            if len(warm) == len(methods):
                seconds, runs = expected_runs(warm, lengths[warm_prompt], lengths, t, pace)
                watch.estimate(seconds, runs, self._seconds_about_profile())

        def on_run(name: str, prompt: int) -> None:
            texts[name][prompt].add(last[name])
            watch.run()

        runs = interleave(
            {name: warmed(name, run) for name, run in methods.items()},
            t.prompts,
            rounds=t.rounds,
            warm_prompt=warm_prompt,
            on_warm=on_warm,
            on_run=on_run,
            drop=self._hopeless,
        )
        return _Ran(runs, texts, growth, drafters)

    def _drafters(self) -> dict[str, Drafter | None]:
        """Return the drafter of each method by name; None for plain decoding and for methods of `transformers`."""
        known = {name: find_method(name) for name in self.task.methods}
        return {
            name: method.drafter(self.subjects.on(method.weights), self.task.profile) for name, method in known.items()
        }

    def _methods(
        self, options: Options, last: dict[str, tuple[int, ...]], drafters: Mapping[str, Drafter | None]
    ) -> dict[str, Method]:
        """Return the methods to time by name; each run of a method stores the token ids of its text in `last[name]`."""

        def made(name: str) -> Method:
            known = find_method(name)
            llm = self.subjects.on(known.weights)
            return known.make(llm, options, lambda tokens: last.update({name: tuple(tokens)}), drafters[name])

        return {name: made(name) for name in self.task.methods}

    def _hopeless(self, runs: Runs) -> set[str]:
        """Return the methods to drop: those whose interval of speedups is below 1 after `patience` prompts."""
        patience, num_prompts = self.task.patience, len(runs.stats["plain"])
        if patience is None or num_prompts < patience:
            return set()
        running = [name for name, done in runs.stats.items() if name != "plain" and len(done) == num_prompts]
        return {name for name in running if runs.speedup(name, "plain")[1][1] < 1}

    def _verdicts(self, name: str, texts: Mapping[str, Sequence[Collection[tuple[int, ...]]]]) -> list[Verdict]:
        """Return the verdict on the method's greedy texts against plain decoding's, for each prompt that it ran."""
        self.watch.stage("comparing texts")
        plain, other = self.subjects.plain, self.subjects.on(find_method(name).weights)
        prompts = zip(self.task.prompts, texts["plain"], texts[name], strict=True)
        return [verdict(plain, other, prompt, mine, others) for prompt, mine, others in prompts if others]

    def _memory_bytes(self, name: str, drafter: Drafter | None) -> int:
        """Return the bytes of a method's weights, its drafter's weights, and its KV cache.

        For methods of `transformers` the KV cache is computed for the longest prompt and `max_new_tokens`.
        """
        weights = find_method(name).weights
        llm = self.subjects.on(weights)
        if weights != "hf":
            drafter_bytes = 0 if drafter is None else extra_drafter_bytes(drafter, llm.runtime)
            return weight_bytes(llm.model) + llm.runtime.cache.bytes + drafter_bytes
        s = llm.runtime.skeleton.sizes
        longest = max(len(llm.encode(prompt)) for prompt in self.task.prompts) + self.task.max_new_tokens
        keys = 2 * llm.runtime.layers * s.kv_heads * s.head_dim * longest
        return weight_bytes(llm.model) + keys * s.dtype.itemsize

    @cached_property
    def _lengths(self) -> list[int]:
        """The prompts' lengths in tokens."""
        return [len(self.subjects.plain.encode(prompt)) for prompt in self.task.prompts]

    @cached_property
    def _pace(self) -> Pace:
        """The speed of plain decoding's passes."""
        keys = max(self._lengths) + self.task.max_new_tokens
        bounded = self._measures_profile and self._profile_oracle is not None  # replays have attention masks
        return Pace.from_runtime(self.subjects.plain.runtime, keys, masks=bounded)

    @property
    def _measures_profile(self) -> bool:
        return "profile" in self.task.methods and self.task.profile.path.cheaper

    @property
    def _profile_oracle(self) -> Oracle | None:
        """The oracle, if the runtime of `profile` can replay drafts, many of them in one pass."""
        return self.oracle if self.subjects.drafting.runtime.trees else None

    def _seconds_about_profile(self) -> float:
        """Return the seconds that `_about_profile` is expected to take."""
        if not self._measures_profile:
            return 0.0
        pace, context = self._pace, self._context()
        seconds = path_costs_seconds(pace.at(context).step, pace.prefill(context))
        if (oracle := self._profile_oracle) is not None:
            seconds += oracle.seconds(self._lengths, self.task.max_new_tokens, pace)
        return seconds

    def _context(self) -> int:
        keys = round(statistics.mean(self._lengths)) + self.task.max_new_tokens // 2
        return max(0, min(keys, self.subjects.plain.runtime.skeleton.context - max(WIDTHS)))

    def _about_profile(self, options: Options, runs: Sequence[Stats]) -> Json:
        s, t = self.subjects, self.task
        self.watch.stage("measuring costs")
        planned = s.drafting.plan(t.prompts[0], options)
        context = self._context()
        costs = measure_path_costs(
            s.drafting.runtime,
            t.profile.path,
            context=context,
            sampler=planned.sampler,
        )
        # All figures are relative to the time of a plain decode step on the copy whose layout suits plain decoding.
        plain = costs.plain
        if s.plain is not s.drafting:
            plain = costs.round + forward_seconds(s.plain.runtime, context, repeats=24)
        below = t.profile.layer_skip.below
        rounds = [done for run in runs for done in run.log[1:]]  # the first round is the prefill, without a draft
        result: Json = {
            "c": costs.base / plain,
            "v": {str(w): costs.verification(w) / plain for w in WIDTHS},
            "round": costs.round / plain,
            "theory": theory(rounds, costs) * plain / costs.plain,
            "costs_of_its_rounds": expected(rounds, costs, head=below.step if below else 0.0) * plain / costs.plain,
        }
        if (oracle := self._profile_oracle) is not None:
            self.watch.stage("bounding")
            speedup, tokens = oracle.bound(s.drafting, t, costs, options.temperature or 0.0)
            result["oracle"] = {"speedup": speedup * plain / costs.plain, "tokens_per_round": tokens}
        return result


def typical(lengths: Sequence[int], pace: Pace) -> int:
    """Return the index of the prompt whose prefill takes the time nearest to the mean of all prefills."""
    seconds = [pace.prefill(length) for length in lengths]
    mean = statistics.mean(seconds)
    return min(range(len(seconds)), key=lambda index: abs(seconds[index] - mean))


def expected_runs(
    warm: Mapping[str, Stats], warm_length: int, lengths: Sequence[int], task: BenchTask, pace: Pace
) -> tuple[float, int]:
    """Return the seconds that all runs of a task are expected to take, and their number.

    `warm`: a run of each method after a prompt of `warm_length` tokens. `lengths`: the prompts' lengths in tokens.
    Every text is taken to have `max_new_tokens` tokens, and a method that was slower than plain decoding to be dropped
    as soon as the task's patience allows.
    """
    seconds, runs = 0.0, 0
    for run in warm.values():
        each = [pace.like(run, warm_length, length, task.max_new_tokens) for length in lengths]
        dropped = task.patience is not None and run.tokens_per_second < warm["plain"].tokens_per_second
        each = each[: task.patience] if dropped else task.rounds * each
        seconds, runs = seconds + sum(each), runs + len(each)
    return seconds, runs


def _bytes_read(llm: LLM) -> int:
    """Return the bytes of weights that a plain decode step reads: all but an embedding table separate from the head."""
    embedding = llm.model.get_input_embeddings()
    table = embedding.blocks.bytes if isinstance(embedding, StoredEmbedding) else embedding.weight.nbytes
    head = llm.model.get_output_embeddings()
    tied = llm.model.config.tie_word_embeddings
    nbytes = weight_bytes(llm.model)
    own_head = not tied or isinstance(head, PackedLinear)  # a separate embedding is read one row at a time
    return nbytes - (table if own_head else 0)


def _passes(runtime: Runtime, context: int) -> dict[int, float]:
    """Return the seconds of a forward pass over each number of tokens in `WIDTHS`, with `context` keys in the cache."""
    return {width: forward_seconds(runtime, context, rows=width, repeats=24) for width in WIDTHS}
