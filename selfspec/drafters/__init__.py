"""Drafters, which propose tokens: one interface, one file for each drafter, and a registry of kinds."""

from selfspec.drafters.adaptive_path import ClaspDrafter, SwiftDrafter
from selfspec.drafters.cross_vocabulary import CrossVocabularyDrafter
from selfspec.drafters.draft_model import ModelDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.input_guided import InputDrafter
from selfspec.drafters.jacobi import JacobiDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.lookahead import LookaheadDrafter
from selfspec.drafters.lookup_drafter import LookupDrafter
from selfspec.drafters.plain import PlainDrafter
from selfspec.drafters.recycle import RecycleDrafter
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
