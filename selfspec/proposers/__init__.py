"""Proposers look up likely continuations of a text (lookup tokens) in texts, without a model. Does not import torch."""
