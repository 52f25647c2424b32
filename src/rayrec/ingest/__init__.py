"""How rows reach a training loop: order, stream, batches, engines of a cluster. Stays empty: RayDP's Python has no torch."""
