"""Click models of decision trees, one file each, as in `rayrec.models.ranking`. Boosting rounds
train them, not gradients.
"""
