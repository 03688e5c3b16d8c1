"""What a person looks at: tables, plots, pages, coloured text. Knows nothing of models and of decoding."""
