"""selfspec called by other libraries, as theirs: `transformers`' generate. Knows nothing of the command line."""
