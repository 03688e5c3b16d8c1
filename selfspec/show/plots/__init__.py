"""Plots of what was measured: each takes a tidy data frame or a profile and returns a matplotlib figure.

Knows nothing of torch and of the search.
"""

from __future__ import annotations

from selfspec.show.plots.style import save

__all__ = ["save"]
