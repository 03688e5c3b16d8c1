from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from selfspec.profile.reading import parse_profile, profile_text
from selfspec.profile.schema import Profile
from selfspec.types.acceptance import CONTEXT_STEP, AcceptanceCurve, PayoffModel
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import DRAFT_STEP, NO_WORK, DraftCall, steps_of
from selfspec.types.identity import Identity

COSTS = CostModel(
    context=100,
    base=1.0,
    attention=0.5,
    mlp=0.25,
    attention_per_key=0.001,
    widths=[1, 2, 4],
    verify=[10.0, 12.0, 20.0],
    round=2.0,
)


def test_a_draft_step_costs_what_runs():
    assert COSTS.draft(SkipSet(), 4) == 1 + 4 * 0.5 + 4 * 0.25
    assert COSTS.draft(SkipSet((0, 1), (2,)), 4) == 1 + 2 * 0.5 + 3 * 0.25
    assert COSTS.draft(SkipSet(), 4, keys=300) == pytest.approx(4 + 4 * 0.2)
    assert COSTS.draft_share(SkipSet(), 4) == 4 / 12


def test_quantised_drafts_read_int8_copies_of_keys_and_values():
    low = DraftPath.from_modes(["int8"] * 8)
    assert COSTS.draft(low, 4, keys=300) == pytest.approx(4 + 4 * 0.2)
    cheaper = COSTS.model_copy(update={"low_per_key": 0.00025})
    assert cheaper.draft(low, 4, keys=300) == pytest.approx(4 + 4 * 0.05)
    assert cheaper.draft(SkipSet(), 4, keys=300) == pytest.approx(4 + 4 * 0.2)


def test_payoffs_at_longer_contexts_are_those_of_the_costs_there():
    costs = COSTS.model_copy(update={"row_per_key": 0.002})
    payoff = PayoffModel.from_costs(costs, SkipSet((0, 1), ()), 4, AcceptanceCurve(), spared=0.25)
    keys = costs.context + 2 * CONTEXT_STEP
    longer, plain = payoff.at(keys), 12 + 2 * CONTEXT_STEP * 4 * 0.001
    assert longer.rounds[1] == pytest.approx(1)
    assert longer.rounds[4] == pytest.approx((22 + 2 * CONTEXT_STEP * 4 * (0.001 + 3 * 0.002)) / plain)
    assert longer.draft == pytest.approx(0.75 * costs.draft(SkipSet((0, 1), ()), 4, keys=keys) / plain)
    assert longer.wider[0] == pytest.approx(longer.draft / 0.75)
    assert longer.context == keys
    assert longer.at(keys + CONTEXT_STEP).rounds == pytest.approx(payoff.at(keys + CONTEXT_STEP).rounds)
    assert payoff.at(keys + 100) is longer
    assert payoff.at(costs.context + 100) is payoff
    assert payoff.at(1) is payoff
    assert PayoffModel().at(8000) == PayoffModel()


def test_passes_over_several_tokens_cost_what_those_of_the_path_s_mode_do():
    low = {
        "int8": ModeCosts(attention=0.1, mlp=0.1, head=0.1, wider=[1.1, 1.2]),
        "int4": ModeCosts(attention=0.05, mlp=0.05, head=0.05, wider=[1.2, 1.6]),
    }
    costs = COSTS.model_copy(update={"low": low, "wider": [1.5, 2.0]})
    assert costs.along(DraftPath.from_modes(["int4"] * 5 + ["int8"] * 3)).passes(1.0) == (1.0, 1.2, 1.6)
    assert costs.along(DraftPath.from_modes(["int8"] * 8)).passes(1.0) == (1.0, 1.1, 1.2)
    assert costs.along(SkipSet((0,), (1,))) is costs
    assert COSTS.along(DraftPath.from_modes(["int4"] * 8)) is COSTS
    payoff = PayoffModel.from_costs(costs, DraftPath.from_modes(["int4"] * 8), 4, AcceptanceCurve())
    assert payoff.wider == pytest.approx([payoff.draft, 1.2 * payoff.draft, 1.6 * payoff.draft])
    without = costs.model_copy(update={"low": {"int8": ModeCosts(attention=0.1, mlp=0.1, head=0.1)}})
    assert without.along(DraftPath.from_modes(["int8"] * 8)).wider == [1.5, 2.0]


def test_widths_between_and_beyond_the_measured_ones():
    assert [COSTS.verification(rows) for rows in (1, 2, 3, 4, 6)] == [10, 12, 16, 20, 28]
    assert COSTS.plain == 12
    one = COSTS.model_copy(update={"widths": [1], "verify": [10.0]})
    assert one.verification(9) == 10


def test_beyond_the_measured_widths_nothing_falls():
    """Where a width before the last was disturbed: 29 rows for nothing would make any tree of candidates seem free."""
    disturbed = COSTS.model_copy(update={"verify": [10.0, 32.0, 20.0]})
    assert [disturbed.verification(rows) for rows in (2, 3, 4, 5, 29)] == [32, 26, 20, 20, 20]


def test_seconds_of_rounds():
    """Two plain rounds, and three that drafted two tokens at 4 s each; with candidates, five rows in place of three."""
    prices = {DRAFT_STEP: 4.0}
    assert COSTS.seconds({(NO_WORK, 1): 2, (steps_of(2), 3): 3}, prices) == 2 * 12 + 3 * (2 + 8 + 16)
    assert COSTS.seconds({(steps_of(2), 5): 1}, prices) == 2 + 8 + 24


def test_every_part_has_its_price():
    """A lookup, and one draft step over three tokens of the sequence at once."""
    lookup, wide = DraftCall("lookup"), DraftCall("draft step", 3)
    rounds = {(((lookup, 1), (wide, 2)), 3): 1}
    assert COSTS.seconds(rounds, {lookup: 0.5, wide: 6.0}) == 2 + 0.5 + 12 + 16
    assert [str(lookup), str(wide)] == ["lookup", "draft step of 3 rows"]


@given(st.lists(st.floats(1e-6, 10), min_size=3, max_size=3), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_profiles_carry_it(verify, base, attention, error):
    costs = COSTS.model_copy(update={"verify": verify, "base": base, "attention": attention, "error": error})
    profile = Profile(model=Identity(layers=4), costs=costs)
    assert parse_profile(profile_text(profile), source="p") == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": [1, 2]}, "2 widths and 3 verify times; expected as many"),
        ({"widths": [2, 3, 4]}, "expected rising numbers of rows from 1 on"),
        ({"widths": [1, 4, 4]}, "expected rising numbers of rows from 1 on"),
        ({"verify": [0.0, 1.0, 2.0]}, "greater than 0"),
        ({"base": -1.0}, "greater than or equal to 0"),
        ({"base": float("nan")}, "finite"),
    ],
    ids=str,
)
def test_wrong_costs_are_refused(change, message):
    with pytest.raises((ValidationError, ValueError), match=message):
        CostModel(**{**COSTS.model_dump(), **change})


def test_no_torch_is_needed():
    code = "import selfspec.types.costs, selfspec.profile.schema, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
