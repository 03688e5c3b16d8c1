"""Trained draft modules: draft heads, bridges and adapters, with their files and their code for drafting."""
