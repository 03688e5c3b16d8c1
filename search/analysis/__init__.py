"""Analyses of searches for notebooks: sweeps over skip sets, comparisons of strategies, drafted tokens."""
