"""Trained parts: the model's own texts to learn from, and fitting a part to them. Knows nothing of the command line."""
