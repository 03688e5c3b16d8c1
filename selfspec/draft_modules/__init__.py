"""Trained parts: their files, and how they run while drafting. Knows nothing of drafts, prompts and training."""
