"""The one training loop, its driver and its workers."""
