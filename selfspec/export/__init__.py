"""Export of profiles to other engines: files, the command to run, limitations and the expected acceptance."""
