"""Drafters: what proposes tokens. One interface, one file each. They know nothing of the loop."""

from selfspec.drafters.base import Drafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.plain import PlainDrafter

__all__ = ["Drafter", "Guard", "LayerSkipDrafter", "PlainDrafter"]
