"""Is the text `transformers`' own? Plain and drafted decoding against its `generate`, each first difference classified.

    python tests/scripts/against_transformers.py --model smollm2-135m --prompts chats.jsonl --limit 40 --out found.json

Greedy; the prompts are a user's messages (JSON lines with `prompt`, or Spec-Bench's `turns`), the held-out chat prompts
that come with selfspec when left out. Drafted: as --profile says (auto). A near-tie is a difference where the two
tokens' logits are no further apart than rounding explains (`selfspec.measure.audit`); anything else is a bug, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import selfspec
from selfspec import builtin
from selfspec.drafters import PlainDrafter
from selfspec.llm.prompt_encoding import encode
from selfspec.measure.audit import first_difference
from selfspec.measure.timing import conditions


def texts(path: Path | None, limit: int) -> list[str]:
    """The users' messages."""
    if path is None:
        return [prompt for prompt, _ in builtin.chat_prompts("heldout")][:limit]
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows][:limit]


def main() -> None:
    """Count what is equal, and what differs how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    llm = selfspec.load(given.model, profile=given.profile, dtype=given.dtype, layout=given.layout, drafting=True)
    theirs = selfspec.load(given.model, profile="none", dtype=given.dtype, layout="rows").model
    drafters = {"plain": PlainDrafter(), "drafted": llm.drafter_for(llm.profile)}
    found = {name: {"texts": 0, "tokens": 0, "equal": 0, "near_ties": [], "bugs": []} for name in drafters}
    for number, text in enumerate(texts(given.prompts, given.limit)):
        ids = encode(llm, text, chat=True)
        rows = torch.tensor([ids])
        out = theirs.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=given.max_new_tokens
        )
        expected = out[0, len(ids) :].tolist()
        for name, drafter in drafters.items():
            tokens = llm.generate(ids, max_new_tokens=given.max_new_tokens, drafter=drafter).tokens
            count = found[name]
            count["texts"] += 1
            count["tokens"] += len(tokens)
            count["equal"] += tokens == expected
            if tokens != expected:
                at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
                reference = None
                if at is not None:
                    with torch.no_grad():
                        reference = theirs(torch.tensor([[*ids, *expected[:at]]])).logits[0, -1].float()
                different = first_difference(llm.runtime, ids, tokens, expected, reference=reference)
                count["near_ties" if different.near_tie else "bugs"].append([number, str(different)])
        print(f"{number + 1}: { ({name: c['equal'] for name, c in found.items()}) } equal", file=sys.stderr)
    summary = {
        **conditions(llm.runtime),
        "model": given.model,
        "layout": llm.layout,
        "drafted": llm.profile.draft.summary,
        "found": found,
    }
    print(json.dumps(summary, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(any(count["bugs"] for count in found.values()))


if __name__ == "__main__":
    main()
