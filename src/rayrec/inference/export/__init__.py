"""Click model exports: writing, reading, and comparison with the checkpoint."""
