"""Workloads, one file each: what a kind of training supplies to the one loop."""
