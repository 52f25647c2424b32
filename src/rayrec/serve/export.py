"""A trained model as a folder that other tools read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint import open_checkpoint
from rayrec.checkpoint.folders import refuse_pickles
from rayrec.config import InputError
from rayrec.serve.export_config import ExportConfig
from rayrec.workloads.recsys import ClickWorkload

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig


def export(checkpoint: str, out: str, *, config: TrainConfig, settings: ExportConfig | None = None) -> dict[str, Any]:
    """Writes the model of a checkpoint (or of a run: the one to use) into folder `out`, which appears complete or not at all;
    what it holds is the workload's affair. Returns what there is to tell of it, out and checkpoint.

    Raises InputError for an unusable checkpoint, a model that cannot be exported so, a click model whose export would score
    otherwise, and where `out` exists.
    """
    settings = settings or ExportConfig()
    opened = open_checkpoint(checkpoint)
    refuse_pickles(opened.path, opened.manifest()["files"])
    is_click_model = isinstance(config.workload, ClickWorkload)
    if not is_click_model and settings != ExportConfig():
        raise InputError(
            f"export: recipe {config.recipe} trains no click model; --quantize, --triton and the comparison are for those only"
        )
    with storage.writing_folder(out) as folder:
        if is_click_model:
            from rayrec.serve.click_export import export_clicks
            from rayrec.workloads.recsys_scoring import cache_folder

            cache = cache_folder(opened.path)
            told = export_clicks(opened, folder, config=config, settings=settings, cache=cache)
        else:
            told = config.workload.export(config, checkpoint=opened.path, out=folder)
    return {**told, "out": storage.absolute(out), "checkpoint": opened.path}
