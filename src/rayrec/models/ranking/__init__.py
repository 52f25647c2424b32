"""Click models, one file each: a configuration (`rayrec.models.base.ClickModelConfig`) and the network it builds."""
