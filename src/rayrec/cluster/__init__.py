"""Cluster connection, resource layout and run supervision; never imports torch."""
