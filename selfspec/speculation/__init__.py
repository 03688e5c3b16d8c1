"""Drafts, sampling, verification rules and one speculative round; the target is seen only as a `Checker`."""

from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

__all__ = ["Sampler", "SequenceState"]
