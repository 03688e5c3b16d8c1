"""Reading, validation and writing of YAML profiles."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from selfspec.basics.errors import SelfspecError, one_line, short
from selfspec.basics.files import read_text, write_text
from selfspec.profile.draft_spec import PlainSpec, draft_kinds
from selfspec.profile.module_files_spec import bring_parts, check_parts
from selfspec.profile.schema import Profile


class _Loader(yaml.SafeLoader):
    """YAML loader that raises an error for a repeated key, of which YAML would silently keep the last."""

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
    profile = parse_profile(read_text(path), source=str(path))
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
        return Profile.model_validate(data)
    except ValidationError as error:
        raise SelfspecError(f"{source}: {_explain(error)}") from None
    except SelfspecError as error:
        raise SelfspecError(f"{source}: {one_line(error)}") from None
    except RecursionError:
        raise SelfspecError(f"{source}: the YAML refers to itself; write the values out") from None


def profile_text(profile: Profile) -> str:
    """Return the YAML of a profile; reading it back gives an equal profile."""
    data = profile.model_dump(mode="json", exclude_none=True)
    for entry in (data, *data["also"]):
        for empty in ("parts", "also"):
            if not entry[empty]:
                del entry[empty]
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile atomically, and copy its parts from the folder that it was read from.

    Raises `SelfspecError` if the file cannot be written, or a part is missing.
    """
    if profile.folder is not None:
        bring_parts(profile.parts, profile.folder, path.parent)
    check_parts(profile.parts, path.parent)
    write_text(path, profile_text(profile))


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


def _check_version(data: dict[Any, Any]) -> None:
    version = data.get("version")
    if type(version) is not int or version != 2:
        got = "none" if version is None else short(version)
        raise SelfspecError(f"version: expected 2, got {got}; `selfspec search` makes a profile of version 2")


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "profile"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SelfspecError):
        return one_line(cause)
    if first["type"] == "extra_forbidden":
        return f"unknown key '{one_line(where)}'"
    if first["type"] == "missing":
        return f"{one_line(where)}: {one_line(first['msg'])}"
    return f"{one_line(where)}: {one_line(first['msg'])}, got {short(first['input'])}"


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
