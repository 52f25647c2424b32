"""Launchers of workers: this process, torchrun or Ray Train."""
