"""Foundations of all packages: errors, files, validated data, and the machine."""
