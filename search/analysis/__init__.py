"""What only notebooks ask of a search: sweeps, contests, drafted tokens. Knows nothing of the command line."""
