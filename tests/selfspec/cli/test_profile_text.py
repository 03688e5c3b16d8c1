"""What a profile says as lines of text."""

from __future__ import annotations

import pytest

from selfspec.cli.profile_text import facts
from selfspec.profile.shipped import find_profile_file
from selfspec.types.costs import CostModel


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        ([1.0, 1.0, 2.0], "drafting pays for up to 7 sequences decoded together"),
        ([1.0, 1.0, 1.0], "drafting pays for up to 65 or more sequences decoded together"),
        ([1.0, 8.0, 9.0], "drafting never pays"),
    ],
)
def test_a_profile_says_for_how_many_sequences_drafting_pays(verify, expected):
    """Passes over up to eight tokens take as long as over one; or any do; or each token takes as long as one alone."""
    costs = CostModel(base=0.01, attention=0, mlp=0, context=10, widths=[1, 8, 9], verify=verify, round=0)
    profile = find_profile_file("smollm2-135m")
    predicted = profile.predicted.model_copy(update={"draft_cost": 0.01, "acceptance_rate": 0.9})
    profile = profile.model_copy(update={"costs": costs, "predicted": predicted})
    assert facts(profile)["predicted"][1:] == [expected]
    assert len(facts(profile.model_copy(update={"costs": None}))["predicted"]) == 1
