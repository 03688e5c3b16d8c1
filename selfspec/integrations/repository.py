"""The folder `custom_generate/` of a model's repository, from which `transformers` loads a decoding method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import write_text
from selfspec.profile.reading import profile_text
from selfspec.profile.schema import Profile

_SOURCE = '''"""The output of generate, sooner: lossless speculative decoding by the package selfspec."""

import selfspec
{reads}{profile}
_DRAFTED = selfspec.hf({arguments})


def generate(*args, model, **kwargs):
    """What `model.generate` gives, drafted and verified; it takes the same arguments."""
    return _DRAFTED.generate(model, *args, **kwargs)
'''


def write_repository(folder: Path, profile: str | Profile, arguments: Mapping[str, str | None]) -> None:
    """Write `custom_generate/generate.py` and its `requirements.txt` to `folder`.

    `arguments`: further arguments of `hf`. Raises `SelfspecError` for a profile with files of its own, which
    `transformers` would not download, and if the folder cannot be written.
    """
    further = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
    reads = text = ""
    named = repr(profile)
    if isinstance(profile, Profile):
        if profile.parts or any(alternative.draft.may_name_files for alternative in profile.alternatives):
            raise SelfspecError(
                "the profile has files beside it, which cannot travel in generate.py; expected one without"
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
    """Return a Python literal of a text, with a line of code for each of its lines."""
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"(\n{lines})"
