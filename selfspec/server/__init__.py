"""The OpenAI-compatible HTTP server for a model that drafts for itself; a `Batch` decodes the requests."""
