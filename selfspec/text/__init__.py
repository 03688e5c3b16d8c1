"""Prompts in, text out: prompt files, pieces of text as tokens come, guides. Knows nothing of models."""
