"""Prompts and text: prompt files, detokenisation of token streams, and guides."""
