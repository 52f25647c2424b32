"""Click models, one file each: a configuration (`rayrec.models.base.ClickModelConfig`) and the network it builds.

For scoring it is built on the meta device, so a network computes constants that are not saved when it needs them, not when it is
built. A network of the user's own need not.
"""
