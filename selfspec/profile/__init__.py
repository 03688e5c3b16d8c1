"""YAML profiles: their schema, reading, writing and choosing. Does not import torch."""

from selfspec.profile.draft_spec import DraftSpec, LayerSkipSpec, PlainSpec
from selfspec.profile.reading import parse_profile, profile_schema, profile_text, read_profile, write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file, shipped_profiles

__all__ = [
    "DraftSpec",
    "LayerSkipSpec",
    "PlainSpec",
    "Profile",
    "find_profile_file",
    "parse_profile",
    "profile_schema",
    "profile_text",
    "read_profile",
    "shipped_profiles",
    "write_profile",
]
