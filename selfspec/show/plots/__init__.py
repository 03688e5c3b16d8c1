"""Plots of results: each function takes a tidy data frame or a profile and returns a matplotlib figure.

Does not import torch.
"""

from __future__ import annotations

from selfspec.show.plots.style import save

__all__ = ["save"]
