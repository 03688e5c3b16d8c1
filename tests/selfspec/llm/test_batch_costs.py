"""Costs of a batch's rounds: the drafter's passes are timed, wherever its own rounds run."""

from __future__ import annotations

import pytest
from device_rounds import model as model
from device_rounds import switched_on as switched_on
from tape import Tape

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.llm.batch_costs import measure_round_costs
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import SkipSet


@pytest.mark.parametrize("recorder", [None, Tape()], ids=["on the host", "on the device"])
def test_draft_passes_are_timed(model, monkeypatch, recorder):
    runtime = LeanRuntime(model, kernel=fake, recorder=recorder, rows=2)
    drafter, drafted = LayerSkipDrafter(runtime, SkipSet((), (1,)), FixedK(4)), []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *args: drafted.append(propose(*args)) or drafted[-1])
    measure_round_costs(runtime, drafter)
    assert {len(draft) for drafts in drafted for draft in drafts} == {1, 3}
