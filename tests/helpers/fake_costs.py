"""Fixed costs and a fake clock in place of measured ones, which take most of a short search and differ by machine."""

from __future__ import annotations

import pytest

from selfspec.types.costs import CostModel, ModeCosts

MEASURED = "measured_costs"
STEP = 1.3e-3  # seconds of a plain step; a draft step that skips nothing takes as long


class Clock:
    """A clock that shows the seconds `now`, which a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fake_costs(layers: int) -> CostModel:
    """Costs as of a small model on a CPU, in seconds."""
    each = (STEP - 1e-4) / 2 / layers
    return CostModel(
        context=40,
        base=1e-4,
        attention=each,
        mlp=each,
        attention_per_key=1e-9,
        widths=[1, 2, 8],
        verify=[STEP, 1.04 * STEP, 1.15 * STEP],
        round=4e-5,
        head=5e-5,
        low={mode: ModeCosts(attention=each / 2, mlp=each / 2, head=3e-5) for mode in ("int8", "int4")},
    )


@pytest.fixture(autouse=True)
def costs_are_fixed(request, monkeypatch) -> None:
    """Searches take `fake_costs` as measured, except in tests marked `measured_costs`."""
    if request.node.get_closest_marker(MEASURED) is None:

        def measure_costs(runtime, *, context=128, on_decoding=lambda done, of: None, **_):
            on_decoding(1, 1)
            return fake_costs(runtime.layers).model_copy(update={"context": context})

        monkeypatch.setattr("selfspec.search.prepare.measure_costs", measure_costs)
