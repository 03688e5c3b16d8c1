"""A profile for the built-in model as if it were large: widened, it gives the same text at a large model's cost.

    python tests/scripts/widened.py --threads 2 --out tests/scripts/widened-8-few-bits.yaml

For `selfspec bench --widen 8 --profile tests/scripts/widened-8-few-bits.yaml`. With `--modes full,skip` it is Draft &
Verify's; tests/scripts/widened-8.yaml is of such a search, by torch's products.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from selfspec.search import find_profile

import selfspec
from selfspec.measure.model_copies import widen
from selfspec.models.layout import apply_layout_
from selfspec.models.loading import load_model
from selfspec.profile.reading import write_profile


def main() -> None:
    """Search on the wide model, and save what was found as the narrow one's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--widen", type=int, default=8)
    parser.add_argument("--modes", default="full,int8,int4,skip")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load_model("builtin", device="cpu", dtype="auto")
    narrow = selfspec.wrap(model, tokenizer, profile="none", name="builtin").identity
    model = widen(model, given.widen)
    layout = apply_layout_(model, drafting=True, quantized_drafts=given.modes != "full,skip")
    llm = selfspec.wrap(model, tokenizer, profile="none", name="builtin")
    how = {"modes": given.modes, "minutes": given.minutes, "temperature": given.temperature}
    profile = find_profile(llm, keep_best=True, **how)
    print(f"{given.threads} threads, weights by {layout}: {profile.draft.summary}")
    for name, found in (("predicted", profile.predicted), *(("measured", one) for one in profile.measured)):
        print(name, found)
    note = f"for the built-in model widened {given.widen} times, whose costs these are"
    write_profile(profile.model_copy(update={"model": narrow, "note": note}), given.out)


if __name__ == "__main__":
    main()
