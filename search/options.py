"""The options of a search and of `quantize`, written once: commands, functions and the ledger's settings take them.

The command line reads this module to show its help, so the module does not import torch. The command line needs
annotations as values, so only types that need torch are annotated as text.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.basics.option import Option
from selfspec.llm.options import TopK, TopP, set_greedy
from selfspec.types.draft_path import MODES, Mode
from selfspec.types.methods import AUTO_METHOD, INT4_CHOICES, INT4_GROUP_SIZES

from .space import BYPASSING, GRANULARITIES, parse_keep, parse_modes
from .strategies import check_strategy

if TYPE_CHECKING:
    from transformers import LogitsProcessor

    from selfspec.llm.llm import LLM
    from selfspec.profile.draft_spec import ProposerSpec
    from selfspec.text.prompt_files import Prompts
    from selfspec.text.prompt_template import Prompt
    from selfspec.types.controller import ControllerSpec

    from .budget import Budget
    from .callbacks import SearchCallbacks
    from .continuations import DecodingSettings

OBJECTIVES = ("replay", "wallclock")
KV = ("shared", "own")
STUDY = "selfspec"  # the default name of a study
# Options in a group of the help.
_drafts = partial(Option, panel="Drafting and verification")
_sets = partial(Option, panel="Search space")
_method = partial(Option, panel="Search method")
_storage = partial(Option, panel="Storage of trials")
_DECODING = ("max_new_tokens", "temperature", "top_k", "top_p", "logits_processor", "rule")
_NOT_COMPARED = {  # options that do not change the score of a trial
    "prompts",  # the ledger stores a hash of the prompts
    "source",
    "chat",
    "count",
    "trials",
    "minutes",
    "keep_best",
    "storage",
    "study",
    "watch",
    "plain_llm",
    "budget",
    "int4",  # stored if it is not the default, which older studies lack
    "store",  # its path is part of the setting "drafters"
}
_NAMED = {"warm": "warm starts", "logits_processor": "logits processors"}  # names in the ledger other than the field's


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search; this text adds to the help text of each option.

    `prompts`: calibration texts (also token ids or messages), the result of `read_prompts`, or None for the built-in
    prompts: a user's messages to an assistant if the tokenizer has a chat template, else Python code. `source` is the
    name of a list of prompts in the profile; with `chat` each text becomes a user's message by the tokenizer's chat
    template. The search uses `count` prompts, drawn with `seed`, and measures on as many other prompts.

    `temperature`, `top_k`, `top_p` and `logits_processor` decide how tokens are chosen, and `rule` how drafts are
    verified (None: greedy at temperature 0, else block). With the replay objective, the search tunes three more things
    for each path: the controller, which decides when drafting stops, unless `controller` sets one (a `ControllerSpec`,
    or text such as `fixed:k=4`); the number of candidates for each drafted position; and, if the head takes a tenth of
    a draft step or more, a draft vocabulary of the most frequent quarter or sixteenth of all tokens. `keep`: numbers of
    layers, or text such as `0,15`. `modes`: how sub-layers may run while drafting. Modes that are no faster than full
    precision on this machine, or that the model does not support, are left out. So are paths whose quantised weights
    take more than `extra_memory` times the bytes of the model.

    `int4`: how the weights of int4 sub-layers are quantised (replay only), from the texts that paths are scored on;
    "auto": by GPTQ if there is time, else by the weighted grid. The weights are a part of the profile, in a file.

    `kv`: the KV cache that drafts read for committed tokens. "shared": the target's cache, as selfspec's drafts do.
    "own": a separate cache, prompt included, as in an engine that runs the remaining layers as a draft model; each
    trial costs one more pass of the draft model over the texts (replay only). A profile with "own" is for export. Its
    drafts have one candidate for each position and the whole vocabulary. Its speed is predicted from the costs of
    selfspec's draft steps, and is not measured, because selfspec does not decode this way.

    `storage` keeps every trial of a `study` as soon as the trial is complete: a file (Optuna's journal), the URL of a
    PostgreSQL or MySQL database, or `memory` (also None). A search with the same options resumes from these trials,
    also after a kill. Several workers with the same options share a study: no two workers score the same path, the
    trials of all workers count, and the first worker to end measures the finalists; other workers raise
    `AnotherFinishes`.

    `watch` receives the progress of the search. `budget` replaces `minutes` by a time budget whose clock already runs.
    `plain_llm` loads the same model in the weight layout for plain decoding (without drafts), if the layout of the
    searched model is the one for drafting. It is called once; speedups are over the faster of the two models.

    Raises `SelfspecError` for values that are wrong for every model.
    """

    prompts: "Sequence[Prompt] | Prompts | None" = None
    _: KW_ONLY
    source: str = "prompts"
    chat: bool = False
    trials: Annotated[int, Option(min=1, metavar="N", help="Number of trials.")] = 40
    minutes: Annotated[
        float | None, Option(min=0, metavar="X", help="Time limit in minutes, from loading the model to saving.")
    ] = None
    count: Annotated[
        int,
        Option(
            flags=("--num-prompts",), min=1, metavar="N", help="Number of calibration prompts, sampled with the seed."
        ),
    ] = 8
    max_new_tokens: Annotated[
        int, Option(flags=("--max-new-tokens", "-n"), min=1, metavar="N", help="New tokens for each prompt.")
    ] = 64
    temperature: Annotated[
        float, Option(min=0, metavar="X", help="Sampling temperature that the model will be used with; 0 is greedy.")
    ] = 0.0
    top_k: TopK = None
    top_p: TopP = None
    logits_processor: "Sequence[LogitsProcessor]" = ()
    rule: Annotated[
        str | None,
        _drafts(help="Verification of sampled drafts: block (default), match (with seeds) or token.", hidden=True),
    ] = None
    controller: Annotated[
        "ControllerSpec | str | None",
        _drafts(help="When to stop drafting, such as fixed:k=4; tuned by the search by default.", hidden=True),
    ] = None
    kv: Annotated[
        str,
        _drafts(
            help="KV cache of drafts: the target's (shared), or a separate one, as of an exported draft model (own).",
            hidden=True,
        ),
    ] = "shared"
    keep: Annotated[
        str | Sequence[int],
        _sets(flags=("--keep-layers",), metavar="LAYERS", help="Layers that are never skipped, such as 0,15."),
    ] = ()
    modes: Annotated[
        str | Sequence[str] | None,
        _sets(
            metavar="MODES",
            help="Modes that sub-layers may draft in: full, int8, int4, skip (all); as in Draft & Verify: full,skip.",
        ),
    ] = None
    extra_memory: Annotated[
        float | None,
        _sets(
            min=0,
            metavar="X",
            help="Memory for quantised draft weights, as a share of the model's bytes; .3 in float32, else .55.",
        ),
    ] = None
    int4: Annotated[
        str,
        _sets(
            metavar="METHOD",
            help="Quantiser of int4 weights: nearest, weighted, gptq, auto (gptq if there is time), or a file that "
            "selfspec quantize made.",
        ),
    ] = "auto"
    drafters: Annotated[
        str,
        _drafts(
            flags=("--proposers",),
            metavar="NAMES",
            help="Sources of lookup tokens that a draft step checks: lookup, or none.",
            hidden=True,
        ),
    ] = "lookup"
    store: Annotated[
        Path | None, _drafts(metavar="FILE", help="Retrieval store, made by index, as a source of lookup tokens.")
    ] = None
    granularity: Annotated[
        str, _sets(help="Unit that gets a mode: sublayer (attention and MLP separately) or layer.", hidden=True)
    ] = "sublayer"
    max_draft_cost: Annotated[
        float | None,
        _sets(metavar="X", help="Maximum time of a draft step, as a share of a plain decoding step.", hidden=True),
    ] = None
    keep_best: Annotated[
        bool, _sets(flags=("--keep-best",), help="Save the best profile found even if plain decoding is faster.")
    ] = False
    strategy: Annotated[
        str,
        _method(help="Optimiser: climb, tpe, dp, greedy, cmaes, gp, skopt (as in the paper), or random.", hidden=True),
    ] = "climb"
    context: Annotated[
        int | None,
        _method(
            min=1,
            metavar="N",
            help="Context length at which costs are measured; by default the texts' mean one.",
            hidden=True,
        ),
    ] = None
    seed: Annotated[int, _method(min=0, max=2**32 - 1, metavar="N", help="Random seed of prompts and optimiser.")] = 0
    objective: Annotated[
        str,
        _method(
            help="replay: predict the speed without decoding; wallclock: decode in every trial, as in the paper.",
            hidden=True,
        ),
    ] = "replay"
    warm: Annotated[
        bool,
        _method(
            flags=("--warm-starts/--no-warm-starts",),
            help="Try a few promising draft paths first; the paper does not.",
            hidden=True,
        ),
    ] = True
    storage: Annotated[
        str | Path | None,
        _storage(
            help="Where trials are stored: memory, a file, or a database URL, which workers can share; by default "
            "OUT.trials.jsonl, until the profile is saved."
        ),
    ] = None
    study: Annotated[str, _storage(help="Name of the study in the storage.")] = STUDY
    watch: "SearchCallbacks | None" = None
    budget: "Budget | None" = None
    plain_llm: "Callable[[], LLM] | None" = None

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str):
            raise SelfspecError("prompts is one text; expected a list of them")
        for name in ("trials", "count", "seed", "max_new_tokens"):  # NumPy integers, too
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        set_greedy(self)
        check_strategy(self.strategy)
        for name, known in (("objective", OBJECTIVES), ("granularity", GRANULARITIES), ("kv", KV)):
            if getattr(self, name) not in known:
                raise SelfspecError(f"{name} '{getattr(self, name)}' is not known; known: {', '.join(known)}")
        if self.trials < 1 or self.count < 1:
            raise SelfspecError(f"expected at least 1 trial and 1 prompt, got {self.trials} and {self.count}")
        if not 0 <= self.seed < 2**32:
            raise SelfspecError(f"seed {self.seed}: expected 0 to {2**32 - 1}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise SelfspecError(f"minutes {self.minutes}: expected more than 0, and finite")
        if self.context is not None and self.context < 1:
            raise SelfspecError(f"context {self.context}: expected at least 1 key")
        cost = self.max_draft_cost
        if cost is not None and not 0 < cost < math.inf:
            raise SelfspecError(f"max_draft_cost {cost}: expected more than 0 and finite, as a share of a plain step")
        self._check_together()
        if self.extra_memory is not None and not 0 <= self.extra_memory < math.inf:
            raise SelfspecError(
                f"extra_memory {self.extra_memory}: expected 0 or more and finite, as a share of the model's bytes"
            )
        _ = self.kept_layers, self.fixed, self.allowed_modes, self.proposers
        if self.store is not None:
            from selfspec.proposers.store import Store

            Store(self.store)

    def _check_together(self) -> None:
        if self.int4 not in INT4_CHOICES and kind(Path(self.int4)) != "file":
            raise SelfspecError(
                f"int4 '{self.int4}': expected {', '.join(INT4_CHOICES)}, or a file that selfspec quantize made"
            )
        if self.kv == "own" and self.allowed_modes != BYPASSING:
            raise SelfspecError(
                "kv 'own': expected modes full,skip, because draft models of other engines support no other modes"
            )
        if self.kv == "own" and self.store is not None:
            raise SelfspecError("kv 'own': expected no store, because draft models of other engines look nothing up")
        if self.int4 != AUTO_METHOD and "int4" not in self.allowed_modes:
            raise SelfspecError(
                f"int4 '{self.int4}': expected int4 among the modes, which are {','.join(self.allowed_modes)}"
            )
        if self.objective == "wallclock":
            if self.kv == "own":
                raise SelfspecError(
                    "kv 'own' needs the replay objective: selfspec's drafts share the target's KV cache"
                )
            if self.context is not None or self.max_draft_cost is not None:
                raise SelfspecError("context and max_draft_cost need the cost model of the replay objective")
            if self.store is not None or self.int4 != AUTO_METHOD:
                raise SelfspecError(
                    "store and int4 need the replay objective; wall-clock trials round to nearest and look nothing up"
                )

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers that are never skipped, sorted. Raises `SelfspecError` for text other than layer numbers."""
        if isinstance(self.keep, str):
            return parse_keep(self.keep)
        return tuple(sorted({operator.index(layer) for layer in self.keep}))

    @property
    def allowed_modes(self) -> tuple[Mode, ...]:
        """The modes that sub-layers may draft in, sorted as in `MODES`: those in `modes`, and always full.

        If `modes` is None: with objective "wallclock" or `kv` "own", full and skip, as in Draft & Verify; otherwise all
        modes. Raises `SelfspecError` if `modes` has an unknown mode, or none besides full.
        """
        if self.modes is None:
            return MODES if (self.objective, self.kv) == ("replay", "shared") else BYPASSING
        return parse_modes(self.modes if isinstance(self.modes, str) else ",".join(self.modes))

    @property
    def proposers(self) -> "tuple[ProposerSpec, ...]":
        """The sources of lookup tokens that draft steps check; with objective "wallclock" or `kv` "own", no source.

        Raises `SelfspecError` for an unknown source.
        """
        from selfspec.profile.draft_spec import parse_proposers

        specs = parse_proposers(self.drafters, None if self.store is None else str(Path(self.store).resolve()))
        return specs if (self.objective, self.kv) == ("replay", "shared") else ()

    @property
    def fixed(self) -> "ControllerSpec | None":
        """The controller that `controller` sets (None: not set). Raises `SelfspecError` for an invalid controller."""
        if self.controller is None:
            return None
        from selfspec.controllers import make_controller, parse_controller

        if isinstance(self.controller, str):
            return parse_controller(self.controller)
        make_controller(self.controller)
        return self.controller

    @property
    def decoding(self) -> "DecodingSettings":
        """The settings by which tokens are chosen and sampled drafts verified; their values are not checked."""
        from .continuations import DecodingSettings

        return DecodingSettings(
            **{name: getattr(self, name) for name in _DECODING} | {"logits_processor": (*self.logits_processor,)}
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings, as JSON, that must be equal in all searches that share or resume a study."""
        settings = {
            _NAMED.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if field.name not in _NOT_COMPARED
        }
        return settings | {
            **({} if self.int4 == AUTO_METHOD else {"int4": self.int4}),
            "logits processors": len(self.logits_processor),
            "rule": self.decoding.verified_by,
            "keep": list(self.kept_layers),
            "modes": list(self.allowed_modes),
            "drafters": [
                proposer.kind if proposer.path is None else f"{proposer.kind} {proposer.path}"
                for proposer in self.proposers
            ],
            "controller": None if self.fixed is None else self.fixed.model_dump(mode="json"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How weights are quantised to int4. Raises `SelfspecError` for a value out of range.

    `method`: one of `METHODS`, or "auto": GPTQ. `group`: inputs that share a scale and a zero point. `texts`: the
    number of prompts that the model continues, by at most `max_new_tokens` tokens each, sampled at `temperature`.
    `minutes`: the time limit of continuing (None: unlimited).
    """

    method: Annotated[
        str, Option(flags=("--int4",), metavar="METHOD", help="Quantiser: nearest, weighted, or gptq (auto).")
    ] = "auto"
    group: Annotated[int, Option(metavar="N", help="Inputs that share a scale and a zero point: 64 or 32.")] = 64
    texts: Annotated[
        int, Option(flags=("--num-prompts",), min=1, metavar="N", help="Number of prompts that the model continues.")
    ] = 64
    max_new_tokens: Annotated[
        int, Option(flags=("--max-new-tokens", "-n"), min=1, metavar="N", help="New tokens of each text.")
    ] = 192
    temperature: Annotated[float, Option(min=0, metavar="X", help="Sampling temperature of the texts.")] = 0.8
    minutes: Annotated[float | None, Option(min=0, metavar="X", help="Time limit of continuing the prompts.")] = None
    seed: Annotated[int, Option(min=0, max=2**32 - 1, metavar="N", help="Random seed of prompts and texts.")] = 0

    def __post_init__(self) -> None:
        if self.method not in INT4_CHOICES:
            raise SelfspecError(f"method '{self.method}' is not known; known: {', '.join(INT4_CHOICES)}")
        if self.group not in INT4_GROUP_SIZES:
            raise SelfspecError(f"group {self.group}: expected {' or '.join(map(str, INT4_GROUP_SIZES))}")
        if self.texts < 1 or self.max_new_tokens < 1:
            raise SelfspecError(
                f"expected at least 1 text of at least 1 token, got {self.texts} of {self.max_new_tokens}"
            )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise SelfspecError(f"minutes {self.minutes}: expected more than 0, and finite")
        if not 0 <= self.temperature < math.inf:
            raise SelfspecError(f"temperature {self.temperature}: expected 0 or more, and finite")
