"""Layers whose products run as native kernels on CPUs."""
