"""Drafters: who proposes tokens; one interface, one file each, a registry of kinds. Knows nothing of the loop."""

from selfspec.drafters.chosen import ClaspDrafter, SwiftDrafter
from selfspec.drafters.draft_model import ModelDrafter
from selfspec.drafters.free import FreeDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.input_guided import InputDrafter
from selfspec.drafters.jacobi import JacobiDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.lookahead import LookaheadDrafter
from selfspec.drafters.merged import MergedDrafter
from selfspec.drafters.plain import PlainDrafter
from selfspec.drafters.recycle import RecycleDrafter
from selfspec.drafters.registry import make_ahead, make_drafter, make_guarded, register
from selfspec.drafters.router import Route, Router, look_here, routed
from selfspec.drafters.translated import TranslatedDrafter
from selfspec.speculation.drafter import Drafter, Limit

__all__ = [
    "ClaspDrafter",
    "Drafter",
    "FreeDrafter",
    "Guard",
    "InputDrafter",
    "JacobiDrafter",
    "LayerSkipDrafter",
    "Limit",
    "LookaheadDrafter",
    "MergedDrafter",
    "ModelDrafter",
    "PlainDrafter",
    "RecycleDrafter",
    "Route",
    "Router",
    "SwiftDrafter",
    "TranslatedDrafter",
    "look_here",
    "make_ahead",
    "make_drafter",
    "make_guarded",
    "register",
    "routed",
]
