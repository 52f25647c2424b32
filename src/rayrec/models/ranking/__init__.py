"""Click models, one file each, with a configuration (`rayrec.models.base.ClickModelConfig`) and its
network. Networks treat a dense feature as a field whose embedding is the feature times a learned
vector, unless they say otherwise. For scoring, networks are built on the meta device, so they
compute constants that are not saved on use.
"""
