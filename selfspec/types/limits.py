"""Limits that rooms share: how wide a verification may be, and how many layers a model may have."""

from __future__ import annotations

WIDEST_DRAFT = 64  # tokens that a verification may have beside the root
MOST_ROWS = 1 + WIDEST_DRAFT
MOST_LAYERS = 10_000
