"""Proposers: how a text may go on, told from texts alone. Pure Python; knows nothing of models and drafts."""
