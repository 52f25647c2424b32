"""Items that retrieval models recommend."""
