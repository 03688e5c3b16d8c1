"""Conversion of profiles of earlier format versions to the current version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from selfspec.basics.checked_model import Count, Data
from selfspec.basics.errors import SelfspecError, short
from selfspec.profile.draft_spec import LayerSkipSpec, Skip
from selfspec.types.controller import ControllerSpec
from selfspec.types.limits import WIDEST_DRAFT

NEW_KEYS = ("draft", "parts")
NOW = {  # top-level keys of version 1, and their keys in version 2
    "skip": "draft.skip",
    "controller": "draft.controller",
    "siblings": "draft.candidates",
    "draft_vocabulary": "draft.vocabulary",
}


class Version1(Data):
    """Drafting keys of format version 1, which always means layer skip. Version 1 is read but not written."""

    skip: Skip = Skip()
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    siblings: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(1, description="Candidates for each position.")
    draft_vocabulary: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="The only tokens that are drafted."
    )

    def draft(self) -> LayerSkipSpec:
        """Return the same draft as a spec of version 2."""
        return LayerSkipSpec(
            skip=self.skip, controller=self.controller, candidates=self.siblings, vocabulary=self.draft_vocabulary
        )


def latest(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the data of a profile of any version to version 2. A file without a version is of version 1.

    Raises `SelfspecError` for another version, or for keys of one version in a file of the other; pydantic's error
    for values that version 1 does not allow.
    """
    version = data.get("version", 1)
    if type(version) is not int or version not in (1, 2):
        raise SelfspecError(f"version: expected 1 or 2, got {short(version)}")
    if version == 2:
        for key in (old for old in NOW if old in data):
            raise SelfspecError(f"'{key}' is version 1's; in version 2 it is {NOW[key]}")
        return data
    for key in (new for new in NEW_KEYS if new in data):
        raise SelfspecError(f"'{key}' is version 2's; say 'version: 2', where what drafts is said under 'draft'")
    said = Version1.model_validate({key: value for key, value in data.items() if key in NOW})
    rest = {key: value for key, value in data.items() if key not in NOW}
    return {**rest, "version": 2, "draft": said.draft()}
