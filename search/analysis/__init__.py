"""Analyses of a search for notebooks: sweeps, comparisons of strategies, drafted tokens."""
