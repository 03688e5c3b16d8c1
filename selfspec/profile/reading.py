"""Reading and writing profiles: YAML, checked key by key. The one place where a profile is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from selfspec.basics.errors import SelfspecError, one_line, short
from selfspec.basics.files import read_text, write_text
from selfspec.profile.schema import Profile


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


def profile_schema() -> dict[str, Any]:
    """The JSON schema of a profile, for editors; `parse_profile` checks more, such as that each layer exists."""
    schema = Profile.model_json_schema(schema_generator=_Schema)
    return {"$schema": _Schema.schema_dialect, **schema, "title": "selfspec profile"}


class _Schema(GenerateJsonSchema):
    """Without titles for fields, which would repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


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
