"""Drafters: who proposes tokens; one interface, one file each. Knows nothing of the loop."""

from selfspec.drafters.guard import Guard
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.plain import PlainDrafter
from selfspec.speculation.drafter import Drafter

__all__ = ["Drafter", "Guard", "LayerSkipDrafter", "PlainDrafter"]
