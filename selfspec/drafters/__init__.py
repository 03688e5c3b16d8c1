"""Drafters, which propose tokens: one interface, one file for each drafter, and a registry of kinds."""

from selfspec.drafters.adaptive_path import ClaspDrafter, SwiftDrafter
from selfspec.drafters.cross_vocabulary import TranslatedDrafter
from selfspec.drafters.draft_model import ModelDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.input_guided import InputDrafter
from selfspec.drafters.jacobi import JacobiDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.lookahead import LookaheadDrafter
from selfspec.drafters.lookup_drafter import FreeDrafter
from selfspec.drafters.plain import PlainDrafter
from selfspec.drafters.recycle import RecycleDrafter
from selfspec.drafters.registry import make_ahead, make_drafter, make_guarded, register
from selfspec.drafters.router import Route, Router, calibrate, routed
from selfspec.drafters.tree_merge import MergedDrafter
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
    "calibrate",
    "make_ahead",
    "make_drafter",
    "make_guarded",
    "register",
    "routed",
]
