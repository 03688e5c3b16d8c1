"""Plain numbers that rooms hand to each other: draft paths, costs, acceptance, counts. Knows nothing of torch."""
