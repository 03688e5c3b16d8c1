"""The table of all causal model types of the installed `transformers`: equal to its `generate`, or refused, and why.

    python tests/scripts/every_model_type.py > docs/model-types.md    # all types
    python tests/scripts/every_model_type.py jamba opt                # these types, with tracebacks

Tiny random models in float64, greedy; the long tests run the same (`tests/selfspec/runtime/test_every_type.py`). A type
is `not tried` if `transformers` itself cannot make or run a tiny model of it. The exit code is 1 if any text differs or
anything fails.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
import transformers
from model_types import model_types
from type_table import HEAD, tried

PAGE = f"""# All causal model types

What `transformers` {transformers.__version__} calls causal language models, each as a tiny random model in float64 (in
float32 where its own code needs it), tried by `tests/scripts/every_model_type.py`; the long tests run the same.
*Equal*: the greedy text is that of `generate`, decoded plainly, with skipped sub-layers and an adaptive threshold, with
lookup tokens, with random trees or chains, in a conversation that goes on after other texts, and in a batch.
*Not tried*: no tiny model of this type was made, or `transformers` did not run it.

[Models](models.md#other-models) says how layers with *states* work, and where drafts are *chains*.
"""


def main() -> None:
    """Print the table and what it counts."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    print(f"{PAGE}\n{HEAD}")
    for model_type in sys.argv[1:] or model_types():
        rows.append(tried(model_type, raising=bool(sys.argv[1:])))
        print(rows[-1].line, flush=True)
    counts = Counter(row.outcome for row in rows)
    print("\n" + ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) + ".")
    sys.exit(counts["different"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
