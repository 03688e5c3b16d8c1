"""Speed, costs and losslessness, measured. Knows nothing of the search."""
