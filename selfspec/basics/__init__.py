"""The ground floor: errors, files, checked values, the machine. Knows nothing of models, profiles and decoding."""
