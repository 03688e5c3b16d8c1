"""The OpenAI API over a model that drafts for itself. Knows nothing of drafts and caches: a `Batch` decodes."""
