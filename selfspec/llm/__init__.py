"""The front door from Python: load, wrap, generate, stream. Knows nothing of the command line."""
