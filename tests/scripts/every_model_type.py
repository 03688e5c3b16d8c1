"""The table of all causal model types of the installed `transformers`: equal to its `generate`, or refused, and why.

    python tests/scripts/every_model_type.py              # all types, to standard output
    python tests/scripts/every_model_type.py jamba opt    # these types, with tracebacks

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
from model_types import model_types
from type_table import HEAD, tried


def main() -> None:
    """Print the table and what it counts."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    print(HEAD)
    for model_type in sys.argv[1:] or model_types():
        rows.append(tried(model_type, raising=bool(sys.argv[1:])))
        print(rows[-1].line, flush=True)
    counts = Counter(row.outcome for row in rows)
    print("\n" + ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    sys.exit(counts["different"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
