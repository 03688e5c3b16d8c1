"""Trained draft modules: draft heads, bridges and adapters, their files, and how they run while drafting."""
