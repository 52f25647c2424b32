"""Layers of click models, in plain torch without TorchRec or Ray."""
