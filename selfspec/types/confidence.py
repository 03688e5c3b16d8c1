"""The confidence of a drafted token: plain data, for profiles, drafters and the search.

`selfspec.search` fits it to a trace. Does not import torch.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from selfspec.basics.checked_model import Data

MIN_GAP, MIN_PROBABILITY = 1e-6, 1e-9  # lower bounds of a gap, and of a probability's distance from 0 and 1
Weight = Annotated[float, Field(allow_inf_nan=False)]


class Confidence(Data):
    """The estimated chance that a drafted token is right, from the distribution that the drafter computed.

        1 / (1 + exp(-(bias + probability * log(p / (1 - p)) + gap * log(g))))

    p: the token's probability; g: the gap between the two best logits after processors and temperature (under rule
    `match`, between the two best sums of log p and noise). By default the confidence is p itself.

    A draft path that skips little is wrong only where the model itself hardly prefers one token to another. A small gap
    shows such positions; a low probability does not.
    """

    bias: Weight = 0.0
    probability: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    gap: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def plain(self) -> bool:
        """Whether the confidence is the probability itself."""
        return self.bias == 0 and self.probability == 1 and self.gap == 0

    @property
    def inputs(self) -> str:
        """The inputs of the estimate: `probability`, `gap`, `both`, or `nothing` (equal for all tokens)."""
        if not self.probability:
            return "gap" if self.gap else "nothing"
        return "both" if self.gap else "probability"

    def estimate(self, probability: float, gap: float) -> float:
        """Return the confidence of a token with this probability and gap."""
        if self.plain:
            return probability
        x = self.bias
        if self.probability:
            p = min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY)
            x += self.probability * math.log(p / (1 - p))
        if self.gap:
            x += self.gap * math.log(max(gap, MIN_GAP))
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


PROBABILITY = Confidence()
