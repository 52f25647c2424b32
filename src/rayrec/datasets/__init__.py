"""Public datasets: schemas, splits, published files and their download."""
