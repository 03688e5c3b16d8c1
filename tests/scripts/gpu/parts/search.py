"""A search over full, int8, int4 and skip as the command does it, on the built-in model widened to 1 billion."""

from __future__ import annotations

import json
import time

from measuring import Part
from selfspec.search import find_profile
from subjects import as_on_cuda, load_widened

part = Part("search")
as_on_cuda(part)
llm = load_widened(part, 18)
begun = time.perf_counter()
minutes = 0.3 if part.toy else max(part.left() - 40, 15) / 60
profile = find_profile(llm, minutes=minutes, modes="full,int8,int4,skip", keep_best=True)
found = profile.model_dump(mode="json", exclude_none=True)
part.line("search", seconds=time.perf_counter() - begun, **(found.get("predicted") or {}))
costs = found.get("costs") or {}  # none where the time did not suffice to measure them
part.line("costs", **{name: value for name, value in costs.items() if isinstance(value, (int, float))})
for measured in found.get("measured", []):
    part.line("measured", **{name: value for name, value in measured.items() if not isinstance(value, (dict, list))})
(part.lines.parent / "profile.json").write_text(json.dumps(found, indent=1) + "\n")
