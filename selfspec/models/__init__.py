"""Loaded `transformers` models as the runtime reads them: families, sub-layers, weight layouts and kernels."""
