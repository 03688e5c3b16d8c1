"""Shared limits: the width of a verification pass, and the number of a model's layers."""

from __future__ import annotations

WIDEST_DRAFT = 64  # most drafted tokens in a verification pass, besides the root
MOST_ROWS = 1 + WIDEST_DRAFT  # most rows of a verification pass for one sequence
MOST_LAYERS = 10_000
LOWEST_TEMPERATURE = 1e-5  # below it float32 scores overflow, and sampling is greedy decoding anyway
