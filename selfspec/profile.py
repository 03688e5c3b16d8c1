"""Profiles: which sub-layers of which model to bypass, how it was found, what was measured. Knows nothing of torch.

A profile is a YAML file. It is read in one place, `read_profile`; unknown keys, wrong types and out-of-range
values are refused with the key's path. A published skip set without measurements is a valid profile.
"""

from __future__ import annotations

import reprlib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from selfspec.acceptance import WIDEST_DRAFT, AcceptanceCurve, Outlook, guess
from selfspec.costs import CostModel
from selfspec.errors import SelfspecError
from selfspec.files import kind, read_text, write_text
from selfspec.schema import Count, Data, Positive, Rate, Seconds
from selfspec.skip import SkipSet

Layers = Annotated[int, Field(gt=0, le=10_000)]
Option = Annotated[int, Field(ge=-(10**9), le=10**9)] | Annotated[float, Field(allow_inf_nan=False)]

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxstring, _BOUNDED.maxother = 3, 60, 60


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class Identity(Data):
    """Which model a profile is for. What is present must agree with the model; `layers` is required."""

    layers: Layers
    name: str | None = None
    model_type: str | None = None
    hidden: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    intermediate: Positive | None = None
    vocabulary: Positive | None = None
    fingerprint: str | None = None

    def mismatch(self, other: Identity) -> str | None:
        """What of the architecture differs from `other`, as text; None when all that is present agrees."""
        for field in ("model_type", "layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine is not None and theirs is not None and mine != theirs:
                return f"{field} {mine} in the profile, {theirs} in the model"
        return None

    def other_weights(self, other: Identity) -> bool:
        """Whether both carry a fingerprint of their weights, and the two differ."""
        return None not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint


class Skip(Data):
    """The skip set as it stands in the file."""

    attention: list[Count] = []
    mlp: list[Count] = []

    @classmethod
    def of(cls, skip: SkipSet) -> Self:
        """A skip set as it stands in a file."""
        return cls(attention=list(skip.attention), mlp=list(skip.mlp))

    def skip_set(self) -> SkipSet:
        """As a `SkipSet`. Raises `SelfspecError` for a repeated index."""
        return SkipSet(tuple(self.attention), tuple(self.mlp))


class ControllerSpec(Data):
    """A controller by its registered name, with its options; the registry in `controllers` checks them."""

    name: str
    options: dict[str, Option] = {}


class Calibration(Data):
    """The text the search ran on: where from, how much, and a hash of the token ids.

    `column` and `template`: what of each row was a prompt, where that was said. `chat`: each was a user's message, by
    the model's chat template. `drawn_from`: how many different prompts there were to draw from.
    """

    source: str
    column: str | None = None
    template: str | None = None
    chat: bool = False
    drawn_from: Positive | None = None
    prompts: Positive
    tokens: Positive
    sha256: str


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
    """

    version: Annotated[int, Field(ge=1, le=1)] = 1
    model: Identity
    skip: Skip = Skip()
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    siblings: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = 1
    draft_vocabulary: Annotated[list[Count], Field(min_length=1)] | None = None
    calibration: Calibration | None = None
    search: SearchRecord | None = None
    costs: CostModel | None = None
    acceptance: AcceptanceCurve | None = None
    predicted: Prediction | None = None
    measured: list[Measurement] = []
    versions: dict[str, str] = {}
    note: str | None = None

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


def read_profile(path: Path) -> Profile:
    """Read and check a profile. Raises `SelfspecError` naming the file and the key that is wrong."""
    return parse_profile(read_text(path), source=str(path))


def parse_profile(text: str, *, source: str) -> Profile:
    """Check a profile's YAML; `source` names it in errors. Raises `SelfspecError`, and nothing else."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SelfspecError(f"{source}{line}: not valid YAML ({error.problem or error.context})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SelfspecError(f"{source}: not valid YAML ({_one_line(error)})") from None
    if not isinstance(data, dict):
        raise SelfspecError(f"{source}: want a profile (a mapping with 'model' and 'skip'), got {_kind(data)}")
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise SelfspecError(f"{source}: {_explain(error)}") from None
    except RecursionError:
        raise SelfspecError(f"{source}: the YAML refers to itself; write the values out") from None


def profile_text(profile: Profile) -> str:
    """The YAML of a profile; reading it back gives an equal profile."""
    data = profile.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile atomically. Raises `SelfspecError` when the place cannot be written."""
    write_text(path, profile_text(profile))


def shipped_profiles() -> dict[str, Profile]:
    """The profiles that come with the package, by name (the file's name without `.yaml`)."""
    folder = resources.files("selfspec.profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name[: -len(".yaml")]: parse_profile(f.read_text("utf-8"), source=f.name) for f in files}


def find_profile_file(name: str | Path) -> Profile:
    """A profile by file, or by the name of a shipped one. Raises `SelfspecError` with the names there are."""
    path = Path(name)
    if not str(name):
        raise SelfspecError("the profile's name is empty; want a file or the name of a shipped profile")
    if kind(path) != "missing":
        return read_profile(path)
    shipped = shipped_profiles()
    if str(name) in shipped:
        return shipped[str(name)]
    raise SelfspecError(f"profile {name}: no such file, and no shipped profile of that name ({', '.join(shipped)})")


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "profile"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SelfspecError):
        return _one_line(cause)
    if first["type"] == "extra_forbidden":
        return f"unknown key '{_one_line(where)}'"
    return f"{_one_line(where)}: {_one_line(first['msg'])}, got {_short(first['input'])}"


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"


def _short(value: Any) -> str:
    try:
        text = _one_line(_BOUNDED.repr(value))  # aliases can make a small file's value endless
    except ValueError:
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
