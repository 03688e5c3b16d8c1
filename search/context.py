"""The context of a search: its settings and the state that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from selfspec.controllers import Controller, make_controller
from selfspec.llm.llm import LLM
from selfspec.measure.pace import Pace
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.module_files_spec import ModuleFile
from selfspec.profile.schema import Calibration
from selfspec.types.controller import ControllerSpec

from .budget import Budget
from .callbacks import SearchCallbacks, SilentSearch
from .continuations import DecodingSettings
from .forecast import SearchTask
from .ledger import Ledger, ScoredTexts
from .space import Space


@dataclass(frozen=True)
class SearchContext:
    """The settings and the state that the parts of one search share.

    `prompts`: token ids of all prompts that the search may use. `decoding`: the settings as requested. `pace`: the
    measured speed of the model. `planned`: the work of the search, with as many prompts and new tokens as fit the time
    (None: all prompts and tokens). `described(n)` returns the profile's record of the first n prompts. `own_keys`:
    whether drafts have a separate KV cache. `plain_llm`: the same model in the weight layout for plain decoding (None:
    `llm` itself is fastest). `controller`: the controller of all drafts (None: tuned for each path). `int4_method`: the
    quantiser of int4 weights, as in `SearchOptions`. `int4`: the file of int4 weights that draft paths use, once it is
    made.
    """

    llm: LLM
    space: Space
    decoding: DecodingSettings
    prompts: tuple[list[int], ...]
    seed: int
    ledger: Ledger
    watch: SearchCallbacks = field(default_factory=SilentSearch)
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=lambda: Pace(0.0, 0.0))
    planned: SearchTask | None = None
    described: Callable[[int], Calibration] | None = None
    own_keys: bool = False
    proposers: tuple[ProposerSpec, ...] = ()
    plain_llm: LLM | None = None
    controller: ControllerSpec | None = None
    int4_method: str = "auto"
    int4: ModuleFile | None = None

    def plan(self, max_new_tokens: int | None = None) -> ScoredTexts:
        """Return the amount of text that fits the time; `max_new_tokens`: the length of the decoded texts, if known."""
        count = len(self.prompts if self.planned is None else self.planned.prompts)
        new = self.decoding.max_new_tokens if self.planned is None else self.planned.max_new_tokens
        described = None if self.described is None else self.described(count)
        return ScoredTexts(prompts=count, max_new_tokens=max_new_tokens or new, calibration=described)

    def chosen(self, texts: ScoredTexts) -> tuple[tuple[list[int], ...], DecodingSettings]:
        """Return the prompts that `texts` covers, and the settings for decoding their continuations."""
        return self.prompts[: texts.prompts], replace(self.decoding, max_new_tokens=texts.max_new_tokens)

    @property
    def controllers(self) -> list[Controller] | None:
        """The controllers to choose from for each path; None: the default ones."""
        return None if self.controller is None else [make_controller(self.controller)]
