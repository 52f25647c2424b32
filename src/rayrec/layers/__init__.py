"""Layers that click models are made of; plain torch, neither TorchRec nor Ray."""
