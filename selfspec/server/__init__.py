"""The OpenAI-compatible HTTP server over a model that drafts for itself. A `Batch` does the decoding."""
