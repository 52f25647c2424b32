"""Reaches and describes the machine and the cluster; never imports torch."""
