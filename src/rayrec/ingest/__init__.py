"""Input pipeline of the training loop: order, stream, batches, cluster engines. Stays empty:
RayDP's Python has no torch.
"""
