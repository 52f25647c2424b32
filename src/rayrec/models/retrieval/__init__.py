"""Retrieval models, one file each, as in `rayrec.models.ranking`: their networks choose items among all, without labels."""
