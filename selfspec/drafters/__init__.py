"""Drafters, which propose tokens: one interface, and a registry of kinds."""

from selfspec.drafters.adaptive_path import ClaspDrafter, SwiftDrafter
from selfspec.drafters.controlled import LookupDrafter, PlainDrafter
from selfspec.drafters.draft_model import CrossVocabularyDrafter, ModelDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.jacobi import JacobiDrafter, LookaheadDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.recycle import InputDrafter, RecycleDrafter
from selfspec.drafters.registry import make_drafter, make_guarded, make_proposer_chain, register
from selfspec.drafters.router import Route, Router, calibrate, make_router
from selfspec.drafters.tree_merge import MergedDrafter
from selfspec.speculation.drafter import Drafter, Limit

__all__ = [
    "ClaspDrafter",
    "CrossVocabularyDrafter",
    "Drafter",
    "Guard",
    "InputDrafter",
    "JacobiDrafter",
    "LayerSkipDrafter",
    "Limit",
    "LookaheadDrafter",
    "LookupDrafter",
    "MergedDrafter",
    "ModelDrafter",
    "PlainDrafter",
    "RecycleDrafter",
    "Route",
    "Router",
    "SwiftDrafter",
    "calibrate",
    "make_drafter",
    "make_guarded",
    "make_proposer_chain",
    "make_router",
    "register",
]
