"""Profiles: which sub-layers of which model to bypass, how it was found, what was measured. Knows nothing of torch.

A profile is a YAML file. It is read in one place, `read_profile`; unknown keys, wrong types and out-of-range
values are refused with the key's path. A published skip set without measurements is a valid profile. What is a
profile is also told as a JSON schema, `profile_schema`, for editors.
"""

from __future__ import annotations

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema

from selfspec.acceptance import WIDEST_DRAFT, AcceptanceCurve, Outlook, guess
from selfspec.costs import CostModel
from selfspec.errors import SelfspecError, one_line, short
from selfspec.files import kind, read_text, write_text
from selfspec.schema import MOST_LAYERS, Count, Data, Positive, Rate, Seconds
from selfspec.skip import SkipSet

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Option = Annotated[int, Field(ge=-(10**9), le=10**9)] | Annotated[float, Field(allow_inf_nan=False)]


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

    layers: Layers = Field(description="How many decoder layers the model has.")
    name: str | None = Field(None, description="'builtin', a folder, or a hub id; what is loaded without --model.")
    model_type: str | None = Field(None, description="The family, as the model's config.json names it.")
    hidden: Positive | None = Field(None, description="Width of the residual stream.")
    heads: Positive | None = Field(None, description="Attention heads.")
    kv_heads: Positive | None = Field(None, description="Heads of keys and values.")
    intermediate: Positive | None = Field(None, description="Width of the MLP.")
    vocabulary: Positive | None = Field(None, description="Tokens that the model knows.")
    fingerprint: str | None = Field(None, description="Of the weights; written by the search.")

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


class ControllerSpec(Data):
    """When drafting stops: a controller by its registered name; the registry in `controllers` checks the options."""

    name: str = Field(description="fixed, static, adaptive or rate.")
    options: dict[str, Option] = Field(
        {}, description="Its options, such as threshold or k_max; defaults for the rest."
    )


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
        raise SelfspecError(f"{source}: not valid YAML ({one_line(error)})") from None
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
    return {name: _shipped(file) for name, file in _shipped_files().items()}


def find_profile_file(name: str | Path) -> Profile:
    """A profile by file, or by the name of a shipped one. Raises `SelfspecError`."""
    path = Path(name)
    if not str(name):
        raise SelfspecError("the profile's name is empty; want a file or the name of a shipped profile")
    if kind(path) != "missing":
        return read_profile(path)
    shipped = _shipped_files()
    if str(name) in shipped:
        return _shipped(shipped[str(name)])
    near = difflib.get_close_matches(str(name), shipped, 1)
    hint = f"did you mean {near[0]}? All" if near else "they"
    lacking = f"profile {name}: no such file, and no shipped profile of that name"
    raise SelfspecError(f"{lacking}; {hint} are listed by: selfspec profile list")


def profile_schema() -> dict[str, Any]:
    """The JSON schema of a profile, for editors; `parse_profile` checks more, such as that each layer exists."""
    schema = Profile.model_json_schema(schema_generator=_Schema)
    return {"$schema": _Schema.schema_dialect, **schema, "title": "selfspec profile"}


class _Schema(GenerateJsonSchema):
    """Without titles for fields, which would repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _shipped_files() -> dict[str, Traversable]:
    folder = resources.files("selfspec.profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name[: -len(".yaml")]: f for f in files}


def _shipped(file: Traversable) -> Profile:
    return parse_profile(file.read_text("utf-8"), source=file.name)


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "profile"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SelfspecError):
        return one_line(cause)
    if first["type"] == "extra_forbidden":
        return f"unknown key '{one_line(where)}'"
    return f"{one_line(where)}: {one_line(first['msg'])}, got {short(first['input'])}"


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
