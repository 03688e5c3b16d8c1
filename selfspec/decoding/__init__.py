"""The loop: sequences join, take rounds, leave. Knows nothing of files, tokenizers and profiles."""
