"""What is installed here, and whether it works."""
