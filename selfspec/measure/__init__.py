"""Measurements of speed, costs and losslessness."""
