"""From a checkpoint to predictions."""
