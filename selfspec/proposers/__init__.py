"""Proposers: lookup tokens, continuations of a text found in texts alone. Pure Python."""
