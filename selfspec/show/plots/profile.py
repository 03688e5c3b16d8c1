"""Plots of a profile: what it bypasses, and how often its drafts were right by their confidence."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from selfspec.basics.errors import SelfspecError
from selfspec.profile.schema import Profile
from selfspec.show.plots.grid import Grid
from selfspec.show.plots.style import BLUE, DASHES, MARKS, SERIES, WIDTH, styled, subplots

RUNS, BYPASSED = BLUE, "#FFFFFF"
_FURTHER = 4  # candidates whose chances are drawn


def skip_map(profile: Profile, *, width: float = WIDTH) -> Figure:
    """A grid of layers: attention above, MLP below; dark where a sub-layer runs while drafting, white where not."""
    layers = profile.model.layers
    bypassed = np.array(profile.skip_set.bits(layers)).reshape(2, layers)
    with styled():
        grid = Grid(("attention", "mlp"), layers, width=width)
        grid.cells(bypassed.astype(float), cmap=ListedColormap([RUNS, BYPASSED]), vmin=0, vmax=1)
        grid.figure.legend(
            handles=[Patch(fc=RUNS, label="runs"), Patch(fc=BYPASSED, ec="#888888", label="bypassed while drafting")],
            loc="outside upper left",
            ncols=2,
            fontsize=8.5,
        )
    return grid.figure


def acceptance_by_confidence(profile: Profile, *, width: float = WIDTH) -> Figure:
    """The profile's acceptance curve: of a drafted token, of the one after it, of other candidates for its place.

    Raises `SelfspecError` where the profile has none.
    """
    curve = profile.acceptance
    if curve is None:
        raise SelfspecError(
            "the profile holds no acceptance curve; one that selfspec search found with candidates does"
        )
    lines = {"the drafted token is right": curve.accepted, "then the next one is right, too": curve.following}
    for rank, chances in enumerate(curve.candidates[:_FURTHER], 2):
        lines[f"candidate {rank} is right in its stead"] = chances
    with styled():
        figure, (axes,) = subplots(width=width)
        for (label, chances), colour, mark, dash in zip(lines.items(), SERIES, MARKS, DASHES, strict=False):
            axes.plot(curve.confidence, chances, color=colour, marker=mark, ls=dash, label=label)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("confidence: the draft's probability of the token that it drafts")
        axes.set_ylabel("share of drafted places")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return figure
