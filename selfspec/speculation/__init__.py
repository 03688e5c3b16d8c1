"""Drafts, sampling, verification rules and one speculative round. The target is used only through a `Checker`."""

from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

__all__ = ["Sampler", "SequenceState"]
