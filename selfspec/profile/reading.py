"""Reading, validation and writing of YAML profiles."""

from __future__ import annotations

import functools
import itertools
import operator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from selfspec.basics.checked_model import first_problem
from selfspec.basics.errors import SelfspecError, one_line, short
from selfspec.basics.files import kind, read_text, write_text
from selfspec.profile.draft_spec import DraftSpec, PlainSpec, draft_kinds
from selfspec.profile.drafter_specs import MergedSpec, ModelSpec
from selfspec.profile.module_files_spec import bring_parts, check_beside, check_parts
from selfspec.profile.schema import Profile

_LONGEST = 4 << 20  # most bytes of a profile
_MOST_NODES = 500_000  # most values and keys of a profile, with the aliases written out
_DEEPEST = 32  # most nested lists and mappings
_LONGEST_NUMBER = 100  # most characters of a number: YAML's base 60 takes quadratic time


class _Loader(yaml.SafeLoader):
    """YAML loader that raises an error for a repeated key, of which YAML would silently keep the last.

    Merge keys, and what is too deep or too large with its aliases written out, are errors too, found before any value
    is made: a few hundred bytes of nested aliases stand for more values than fit in any memory.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._measure(node, {})
        return node

    def _measure(self, node: yaml.Node, measured: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
        """Return the number of nodes below and with `node`, and their depth; an alias counts as a copy.

        `measured`: the results so far by the nodes' ids; None while a node is being measured.
        """
        if id(node) in measured:
            if (known := measured[id(node)]) is None:
                raise yaml.MarkedYAMLError(problem="it refers to itself; write the values out")
            return known
        measured[id(node)] = None
        count, depth = 1, 0
        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not supported; write the keys out", problem_mark=node.start_mark
                )
            number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if number and len(node.value) > _LONGEST_NUMBER:
                raise yaml.MarkedYAMLError(
                    problem=f"a number of {len(node.value):,} characters; expected at most {_LONGEST_NUMBER}",
                    problem_mark=node.start_mark,
                )
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else itertools.chain.from_iterable(node.value)
            for child in inside:
                nodes, below = self._measure(child, measured)
                count, depth = count + nodes, max(depth, 1 + below)
        if depth > _DEEPEST or count > _MOST_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_MOST_NODES:,} values or {_DEEPEST} levels, aliases written out; expected fewer"
            )
        measured[id(node)] = count, depth
        return count, depth

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_profile(path: Path) -> Profile:
    """Read a profile, and check the profile and its parts. Raises `SelfspecError`, which names file and problem."""
    profile = parse_profile(read_text(path, most=_LONGEST), source=str(path))
    try:
        return profile.with_folder(path.parent)
    except SelfspecError as error:
        raise SelfspecError(f"{path}: {error}") from None


def parse_profile(text: str, *, source: str) -> Profile:
    """Parse and check a profile's YAML; `source` names it in errors. Raises only `SelfspecError`."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SelfspecError(f"{source}{line}: not valid YAML ({error.problem or error.context})") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise SelfspecError(f"{source}: not valid YAML ({one_line(error)})") from None
    if not isinstance(data, dict):
        raise SelfspecError(f"{source}: expected a profile (a mapping with 'model' and 'draft'), got {_kind(data)}")
    try:
        _check_version(data)
        return _with_answers_beside(Profile.model_validate(data))
    except ValidationError as error:
        raise SelfspecError(f"{source}: {first_problem(error, 'profile')}") from None
    except SelfspecError as error:
        raise SelfspecError(f"{source}: {one_line(error)}") from None


def profile_text(profile: Profile) -> str:
    """Return the YAML of a profile; reading it back gives an equal profile."""
    data = profile.model_dump(mode="json", exclude_none=True)
    for entry in (data, *data["also"]):
        for empty in ("parts", "also"):
            if not entry[empty]:
                del entry[empty]
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def write_profile(profile: Profile, path: Path) -> Profile:
    """Write a profile atomically, as `placed` in its folder; return it as it was written.

    Raises `SelfspecError` if the file cannot be written, a part is missing, or earlier answers lie elsewhere.
    """
    profile = placed(_with_answers_beside(profile), path.parent)
    check_parts(profile.parts, path.parent)
    write_text(path, profile_text(profile))
    return profile.with_folder(path.parent)


def placed(profile: Profile, folder: Path) -> Profile:
    """Return the profile with its files where a profile in `folder` looks for them: parts are copied there.

    Draft models beside the file that the profile was read from stay there, by absolute paths; a file of earlier answers
    is begun anew. Raises `SelfspecError` if a part cannot be copied.
    """
    update: dict[str, Any] = {"also": [placed(other, folder) for other in profile.also]}
    if profile.folder is not None and profile.folder.resolve() != folder.resolve():
        update["parts"] = bring_parts(profile.parts, profile.folder, folder)
        update["draft"] = _with_absolute_models(profile.draft, profile.folder)
    return profile.model_copy(update=update)


def _with_absolute_models(draft: DraftSpec, folder: Path) -> DraftSpec:
    """Return the spec with the absolute paths of draft models that lie in `folder`."""
    if isinstance(draft, ModelSpec) and kind(folder / draft.model) == "folder":
        return draft.model_copy(update={"model": str((folder / draft.model).resolve())})
    if isinstance(draft, MergedSpec):
        drafters = [_with_absolute_models(drafter, folder) for drafter in draft.drafters]
        return draft.model_copy(update={"drafters": drafters})
    return draft


def profile_schema() -> dict[str, Any]:
    """Return the JSON schema of a profile, for editors. `parse_profile` checks more, such as that each layer exists."""
    kinds: Any = functools.reduce(operator.or_, draft_kinds().values())
    draft: Any = Annotated[kinds, Field(discriminator="kind", description="Drafting method, by its kind.")]
    made = create_model("Profile", __base__=Profile, __doc__=Profile.__doc__, draft=(draft, PlainSpec()))
    schema = made.model_json_schema(schema_generator=_Schema)
    required = ["version", *schema["required"]]
    return {"$schema": _Schema.schema_dialect, **schema, "title": "selfspec profile", "required": required}


class _Schema(GenerateJsonSchema):
    """JSON schema generator without field titles, which would repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _with_answers_beside(profile: Profile) -> Profile:
    """Return `profile`. Raises `SelfspecError` if it names a file of earlier answers that is not beside it."""
    for path in profile.answers_paths:
        check_beside(path, "answers")  # the file would be made, anywhere
    return profile


def _check_version(data: dict[Any, Any]) -> None:
    version = data.get("version")
    if type(version) is not int or version != 2:
        got = "none" if version is None else short(version)
        raise SelfspecError(f"version: expected 2, got {got}; `selfspec search` makes a profile of version 2")


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
