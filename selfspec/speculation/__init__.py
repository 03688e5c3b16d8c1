"""Drafts, sampling, verification rules, one round. Knows nothing of models and caches: it sees them as a checker."""
