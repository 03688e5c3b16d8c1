"""Profiles that ship, one YAML file each; found by name."""
