"""Writer of `custom_generate/`, the folder of a model's repository that `transformers` loads a decoding method from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import write_text
from selfspec.profile.reading import profile_text
from selfspec.profile.schema import Profile

_SOURCE = '''"""Lossless speculative decoding for generate, by the package selfspec."""

import selfspec
{reads}{profile}
_DRAFTED = selfspec.hf({arguments})


def generate(*args, model, **kwargs):
    """Return the output of `model.generate`, decoded speculatively; takes the same arguments."""
    return _DRAFTED.generate(model, *args, **kwargs)
'''


def write_repository(folder: Path, profile: str | Profile, arguments: Mapping[str, str | None]) -> None:
    """Write `custom_generate/generate.py` and `custom_generate/requirements.txt` to `folder`.

    `profile`: the profile to decode with, or a name that `hf` accepts. `arguments`: further keyword arguments of `hf`;
    None values are left out. Raises `SelfspecError` for a profile that needs other files, which `transformers` would
    not download, and if the folder cannot be written.
    """
    further = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
    reads = text = ""
    named = repr(profile)
    if isinstance(profile, Profile):
        if profile.parts or any(alternative.draft.may_name_files for alternative in profile.alternatives):
            raise SelfspecError(
                "the profile needs files beside it, which generate.py cannot hold; expected one without"
            )
        reads = "from selfspec.profile.reading import parse_profile\n"
        text = f"\n_PROFILE = {_literal(profile_text(profile))}\n"
        named = 'parse_profile(_PROFILE, source="custom_generate/generate.py")'
    source = _SOURCE.format(reads=reads, profile=text, arguments=named + further)
    place = folder / "custom_generate"
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "generate.py", source)
    write_text(place / "requirements.txt", "selfspec\n")


def _literal(text: str) -> str:
    """Return the Python source of a string literal for `text`, with one source line for each line of the text."""
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"(\n{lines})"
