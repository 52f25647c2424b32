"""Retrieval models, one file each, as in `rayrec.models.ranking`. Their networks select among all
items, without labels.
"""
