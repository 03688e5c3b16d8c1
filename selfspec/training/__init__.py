"""Training of draft heads, bridges, adapters and draft models on texts that the model generated."""
