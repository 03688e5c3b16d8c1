"""Profiles: which sub-layers of which model to bypass, how it was found, what was measured. Knows nothing of torch.

A profile is a YAML file. It is read in one place, `read_profile`; unknown keys, wrong types and out-of-range
values are refused with the key's path. A published skip set without measurements is a valid profile. What is a
profile is also told as a JSON schema, `profile_schema`, for editors.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from selfspec.basics.errors import SelfspecError
from selfspec.basics.schema import Count, Data, Positive, Rate, Seconds
from selfspec.facts.acceptance import AcceptanceCurve, Outlook, guess
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.costs import CostModel
from selfspec.facts.identity import Identity
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.facts.skip import SkipSet


class Skip(Data):
    """The sub-layers that drafting bypasses."""

    attention: list[Count] = Field([], description="Layers whose attention is bypassed, counted from 0.")
    mlp: list[Count] = Field([], description="Layers whose MLP is bypassed, counted from 0.")

    @classmethod
    def of(cls, skip: SkipSet) -> Self:
        """A skip set as it stands in a file."""
        return cls(attention=list(skip.attention), mlp=list(skip.mlp))

    def skip_set(self) -> SkipSet:
        """As a `SkipSet`. Raises `SelfspecError` for a repeated index."""
        return SkipSet(tuple(self.attention), tuple(self.mlp))


class Published(Data):
    """Where a skip set was published. What was measured there is not measured here."""

    paper: str | None = Field(None, description="Such as arXiv:2309.08168.")
    repository: str | None = Field(None, description="Owner and name on GitHub.")
    commit: str | None = Field(None, description="The commit that the file was read at.")
    file: str | None = Field(None, description="The file that held the set.")
    key: str | None = Field(None, description="The set's key in that file.")
    calibration: str | None = Field(None, description="The text that it was searched on, by name.")


class Calibration(Data):
    """The text the search ran on: where from, how much, and a hash of the token ids.

    `column` and `template`: what of each row was a prompt, where that was said. `chat`: each was a user's message, by
    the model's chat template. `drawn_from`: how many different prompts there were to draw from.
    """

    source: str = Field(description="'builtin', a file's, folder's or preset's name.")
    column: str | None = Field(None, description="The column that held the prompts.")
    template: str | None = Field(None, description="What was made of each row.")
    chat: bool = Field(False, description="Whether each was a user's message, by the model's chat template.")
    drawn_from: Positive | None = Field(None, description="How many different prompts there were.")
    prompts: Positive
    tokens: Positive
    sha256: str = Field(description="Of the token ids.")


class SearchRecord(Data):
    """How the skip set was found. `kv`: whether drafts read the target's keys (shared), or had a cache of their own."""

    strategy: str
    objective: str
    trials: Count
    seed: int
    seconds: Seconds
    max_new_tokens: Positive
    temperature: Rate = 0.0
    kv: Annotated[str, Field(pattern="^(shared|own)$")] = "shared"
    interrupted: bool = False


class Prediction(Data):
    """What the search predicted on its own prompts, prefill included. `draft_cost`: a draft step / a plain step."""

    speedup: Rate
    tokens_per_second: Rate
    acceptance_rate: Annotated[float, Field(ge=0, le=1)]
    tokens_per_round: Rate
    draft_cost: Rate


class Measurement(Data):
    """Measured speed: interleaved runs against plain decoding; `interval` is 95% bootstrap of the median ratio."""

    machine: str
    device: str
    dtype: str
    threads: Positive
    prompts: Positive
    held_out: bool
    max_new_tokens: Positive
    rounds: Positive
    temperature: Rate
    top_k: Positive | None = None
    top_p: Rate | None = None
    plain_tokens_per_second: Rate
    tokens_per_second: Rate
    speedup: Rate
    interval: Annotated[list[Rate], Field(min_length=2, max_length=2)]
    acceptance_rate: Annotated[float, Field(ge=0, le=1)]
    tokens_per_round: Rate


class Profile(Data):
    """A skip set for one model, with what is known about it.

    `siblings`: candidates for each drafted position at most, the one that the draft goes on from counted.
    `draft_vocabulary`: the only tokens that are drafted. `acceptance`: how often drafted tokens were right.
    `published`: where it is from, if others published it.
    """

    version: Annotated[int, Field(ge=1, le=1, description="Of the format.")] = 1
    model: Identity
    skip: Skip = Skip()
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    siblings: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(1, description="Candidates for each position.")
    draft_vocabulary: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="Tokens to draft from."
    )
    published: Published | None = None
    calibration: Calibration | None = None
    search: SearchRecord | None = None
    costs: CostModel | None = None
    acceptance: AcceptanceCurve | None = None
    predicted: Prediction | None = None
    measured: list[Measurement] = Field([], description="Speeds measured against plain decoding; empty: none was.")
    versions: dict[str, str] = Field({}, description="The packages that it was made with.")
    note: str | None = Field(None, description="Anything else that a reader should know.")

    @model_validator(mode="after")
    def _indices_exist(self) -> Self:
        self.skip.skip_set().check(self.model.layers)
        tokens, vocabulary = self.draft_vocabulary or [], self.model.vocabulary
        if len(set(tokens)) < len(tokens):
            raise SelfspecError("draft_vocabulary: a token is named twice")
        if vocabulary is not None and max(tokens, default=0) >= vocabulary:
            raise SelfspecError(f"draft_vocabulary: token {max(tokens)} is not in the vocabulary of {vocabulary}")
        return self

    @property
    def skip_set(self) -> SkipSet:
        """The sub-layers to bypass."""
        return self.skip.skip_set()

    @property
    def draft_share(self) -> float:
        """The share of the vocabulary that drafts are from."""
        size = self.model.vocabulary
        return 1.0 if self.draft_vocabulary is None or not size else len(self.draft_vocabulary) / size

    @property
    def outlook(self) -> Outlook:
        """What a rate-optimal controller is told of drafting with this profile; where it says nothing, a guess."""
        layers = self.model.layers
        if self.costs is None:
            return guess(len(self.skip_set) / (2 * layers), self.acceptance)
        curve = self.acceptance or AcceptanceCurve()
        return Outlook.of(self.costs, self.skip_set, layers, curve, vocabulary=self.draft_share)

    @property
    def slower(self) -> bool:
        """Whether a measurement that it holds says that plain decoding was faster somewhere."""
        return any(m.speedup <= 1 for m in self.measured)
