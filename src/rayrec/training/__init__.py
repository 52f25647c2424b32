"""Training loop, driver and workers."""
