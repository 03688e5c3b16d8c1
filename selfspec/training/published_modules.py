"""Conversion of published heads to part files, with the same profiles as a training writes."""

from __future__ import annotations

from pathlib import Path

from selfspec.draft_modules.module_files import write_part
from selfspec.draft_modules.published_heads import read_published
from selfspec.draft_modules.registry import make_head
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.training.profiles import write_profiles


def convert(llm: LLM, folder: Path, out: Path, profile: Profile | None) -> tuple[Path, tuple[Path, ...], str, float]:
    """Convert a published head in `folder`, and write its part file and profiles to the folder `out`.

    `profile` is as `own` in `write_profiles`. Returns the part file, the profiles, the kind of the head, and the
    megabytes of its weights in memory. Raises `SelfspecError` for an unknown kind of head, or a head for another model.
    """
    part = read_published(folder, llm.runtime)
    head = make_head(llm.runtime, part)
    path = out / f"{part.kind}.safetensors"
    write_part(path, part)
    return path, write_profiles(llm, path, head, profile, []), part.kind, round(head.bytes / 1e6, 2)
