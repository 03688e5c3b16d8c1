"""Training of draft heads, bridges, adapters and draft models on the model's own texts."""
