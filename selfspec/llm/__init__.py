"""The Python API: load or wrap a model, generate and stream."""
