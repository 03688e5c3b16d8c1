"""Loaded `transformers` models, made readable: families, weights, how they lie. Knows nothing of caches and drafts."""
