"""Integrations into other libraries: `transformers`' generate."""
