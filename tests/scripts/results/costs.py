"""Time passes by the number of tokens in the KV cache, on a copy of the model that drafts.

    python costs.py SETTINGS

`SETTINGS`: JSON with `model`, `dtype`, `threads` and `contexts`. Prints, for each context, the seconds of a plain step
(`plain`), and in plain steps a verification pass over eight tokens (`v8`) and draft steps with every sub-layer and the
head quantised: in int8, and in int4 with the head in int8.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

SWEEPS, REPEATS, ROWS = 3, 16, 8


def costs(
    seconds: Callable[..., float], contexts: Sequence[int], paths: dict[str, Any], *, sweeps: int = SWEEPS
) -> dict[str, dict[str, float]]:
    """Return the costs by context. Passes are timed by turns, `sweeps` times each; the shortest time counts.

    `seconds(context, **options)`: times a pass, as `forward_seconds` does. `paths`: the draft paths by name.
    """
    passes: dict[str, dict[str, Any]] = {"plain": {}, "v8": {"rows": ROWS}}
    passes |= {name: {"path": path} for name, path in paths.items()}
    found: dict[str, dict[str, float]] = {}
    for context in contexts:
        times: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(sweeps):
            for name, options in passes.items():
                times[name].append(seconds(context, **options))
        plain = min(times["plain"])
        found[str(context)] = {name: min(each) / (1.0 if name == "plain" else plain) for name, each in times.items()}
    return found


def main() -> None:
    """Load the model, time its passes and print the costs."""
    given = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(given["threads"])
    import selfspec
    from selfspec.measure.cost_fitting import forward_seconds
    from selfspec.types.draft_path import DraftPath

    llm = selfspec.load(given["model"], dtype=given["dtype"], profile="none", drafting=True, quantized_drafts=True)
    runtime = llm.runtime
    paths = {mode: DraftPath.from_modes([mode] * (2 * runtime.layers), head="int8") for mode in ("int8", "int4")}

    def seconds(context: int, **options: Any) -> float:
        return forward_seconds(runtime, min(context, runtime.skeleton.context - ROWS), repeats=REPEATS, **options)

    print(json.dumps(costs(seconds, given["contexts"], paths)))


if __name__ == "__main__":
    main()
