"""Conversion of published heads into parts, with the same profiles as a training writes."""

from __future__ import annotations

from pathlib import Path

from selfspec.draft_modules.module_files import write_part
from selfspec.draft_modules.published_heads import read_published
from selfspec.draft_modules.registry import make_head
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.training.profiles import write_profiles


def convert(llm: LLM, folder: Path, out: Path, profile: Profile | None) -> tuple[Path, tuple[Path, ...], str, float]:
    """Write a published head's part and profiles to a folder; return its file, profiles, kind, and megabytes in use.

    Raises `SelfspecError` for an unknown head, or one of another model.
    """
    part = read_published(folder, llm.runtime)
    head = make_head(llm.runtime, part)
    path = out / f"{part.kind}.safetensors"
    write_part(path, part)
    return path, write_profiles(llm, path, head, profile, []), part.kind, round(head.bytes / 1e6, 2)
