"""Toy vocabularies of draft models."""

from __future__ import annotations

import torch


class Renamed:
    """Token i is called order[i] there; of these, `shared` (all) may be drafted."""

    def __init__(self, order, shared=None):
        self.order = order
        self.ours = torch.tensor(sorted(range(len(order)) if shared is None else shared))
        self.theirs = torch.tensor([order[i] for i in self.ours.tolist()])

    def read(self, tokens):
        return [self.order[token] for token in tokens]


class Doubled:
    """Token i is the tokens i and i + size there, one after the other; each can be drafted by its first."""

    def __init__(self, size):
        self.size = size
        self.ours = self.theirs = torch.arange(size)

    def read(self, tokens):
        return [one for token in tokens for one in (token, token + self.size)]
