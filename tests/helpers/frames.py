"""Data frames as benchmarks are read into, for tests of plots and captions."""

from __future__ import annotations

import pandas as pd

SOURCES = pd.DataFrame(
    [
        (0.0, "profile", "qa", "draft path", 0.9),
        (0.0, "profile", "all", "draft path", 0.6),
        (0.0, "profile", "all", "lookup", 0.25),
        (0.8, "profile", "all", "lookup", 0.1),
    ],
    columns=["temperature", "method", "task", "source", "share"],
)
"""The shares of tokens by their source."""
