"""Who runs the workers: this process, torchrun or Ray Train."""
