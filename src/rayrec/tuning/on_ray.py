"""Trials on Ray Tune: where they train, when one is stopped, and what people see meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, final

from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from rayrec import storage
from rayrec.launch import cluster
from rayrec.observe.console import Console
from rayrec.tuning.config import TuneConfig
from rayrec.tuning.trial import Ended, folder_of, run_trial
from rayrec.workloads.base import ClusterConfig, TrainConfig

_MOST_EVALUATIONS = 1 << 30
"""Of a trial: its own steps or epochs end it."""


@final
class _SparesTheFirst(AsyncHyperBandScheduler):
    """ASHA that never stops trial 0, which the best one is compared with."""

    def on_trial_result(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if trial.config["trial"] == 0 else decision


@final
class _Told(Callback):
    """Writes down which trials were stopped, and shows how many have ended."""

    def __init__(self, configs: Sequence[TrainConfig], num_left: int, metric: str, console: Console) -> None:
        self._configs, self._metric, self._console = configs, metric, console
        self._ended, self._num_left = 0, num_left

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune stores its callbacks, and we never restore them: trials resume by themselves

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        folder = folder_of(self._configs[trial.config["trial"]])
        if Ended.of(folder) is None:
            Ended("stopped").save(folder)
        self._tell(trial)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._tell(trial)

    def _tell(self, trial: RayTrial) -> None:
        self._ended += 1
        number = trial.config["trial"]
        ended, value = Ended.of(folder_of(self._configs[number])), (trial.last_result or {}).get(self._metric)
        state = "interrupted" if ended is None else ended.error or ended.state
        known = "" if value is None else f", {self._metric} {value:.5f}"
        self._console.note(f"trial {number}: {state}{known} ({self._ended} of {self._num_left})")


def run_trials(
    configs: Sequence[TrainConfig],
    left: Sequence[int],
    wanted: ClusterConfig,
    *,
    folder: str,
    options: TuneConfig,
    console: Console,
) -> None:
    """Trains those of `configs` whose numbers are `left`, as many at once as there is room for. A trial that fails ends alone."""
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # whose tables cannot be turned off
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # a trial has events and a report of its own
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    cluster.connect(
        wanted.address,
        num_cpus=wanted.num_cpus,
        object_store_bytes=wanted.object_store_bytes,
        log_to_driver=console.verbose,
    )
    cluster.ship_code(configs[0])
    scheduler: TrialScheduler = FIFOScheduler()
    if options.stop_early:
        scheduler = _SparesTheFirst(
            time_attr="evaluation", grace_period=1, reduction_factor=options.reduction, max_t=_MOST_EVALUATIONS
        )
    resources = {"cpu": float(options.cpus_per_trial), "gpu": options.gpus_per_trial}
    trainable = tune.with_resources(tune.with_parameters(run_trial, configs=list(configs)), resources)
    tune.Tuner(
        trainable,
        param_space={"trial": tune.grid_search(list(left))},
        tune_config=tune.TuneConfig(
            metric=options.metric,
            mode="max" if options.metric == "auroc" else "min",
            scheduler=scheduler,
            max_concurrent_trials=options.concurrent,
            reuse_actors=True,  # importing torch and TorchRec takes a process longer than a short trial
        ),
        run_config=tune.RunConfig(
            name="ray",
            storage_path=storage.join(folder, "tune"),
            verbose=0,
            callbacks=[_Told(configs, len(left), options.metric, console)],
        ),
    ).fit()
