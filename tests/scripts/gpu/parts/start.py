"""The first imports and the first use of the device, so that no other part's time holds them."""

from __future__ import annotations

import time

begun = time.perf_counter()

import torch  # noqa: E402
from measuring import Part  # noqa: E402

part = Part("start")
imported = time.perf_counter()
torch.zeros(1, device=part.device)
used = time.perf_counter()
part.line("start", of="importing torch", seconds=imported - begun)
part.line("start", of="using the device", seconds=used - imported)
with part.attempt("start", of="importing the rest"):
    import selfspec.llm.llm  # with transformers

    part.line("start", of="importing the rest", file=selfspec.__file__, seconds=time.perf_counter() - used)
