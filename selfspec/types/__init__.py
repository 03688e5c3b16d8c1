"""Plain data shared by the packages: draft paths, costs, acceptance, counts. Does not import torch."""
