"""Drafts, sampling, verification rules, one round. Knows nothing of models and caches: it sees them as a checker."""

from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

__all__ = ["Sampler", "SequenceState"]
