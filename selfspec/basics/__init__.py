"""What all rooms rest on: errors, files, checked data, the machine. Knows nothing of models, profiles and decoding."""
