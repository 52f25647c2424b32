"""Layers that native kernels compute on CPUs, and the threads of those."""
