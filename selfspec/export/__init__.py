"""Profiles for other engines: files, the command to run, what is lost and to be expected. Knows nothing of the cli."""
