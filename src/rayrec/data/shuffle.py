"""A shuffle of a whole log outside the trainer, the same for a seed whoever does it, and how well an order mixes days."""
