"""Optuna study of a search: the values and results of its trials, and the journal for resuming."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from rayrec import storage
from rayrec.tuning.space import LISTS, Domain, Space, TuneConfig
from rayrec.tuning.trials import PartResult

_NAME: Final = "search"
_ERROR: Final = "error"
"""User attribute with the error of a failed trial."""


# States of a trial, as Optuna names them. An intermediate value is the metric after a wave.
#
# RUNNING:  New, paused after a wave, or to be trained again after a failure.
# PRUNED:   Stopped after a wave, because others were better.
# COMPLETE: Trained to its end.
# FAIL:     Failed because of its settings.
@final
class Study:
    """Trials of a search in the order of their numbers. `save` writes changes to the journal, which
    the next search with the same path reads.
    """

    def __init__(self, path: str, space: Space, options: TuneConfig) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._options = options
        self._journal = _Journal(path)
        self._storage = JournalStorage(self._journal)
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            load_if_exists=True,
            direction="maximize" if options.metric == "auroc" else "minimize",
        )
        self._study_id = self._storage.get_study_id_from_name(_NAME)
        # Not a failure in the journal: the settings are not to blame, and a sampler must not learn
        # from an outage.
        self._outside_errors: dict[int, str] = {}
        """Errors of trials that the next search trains again, which the journal does not keep."""

    def __len__(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def create_trial(self, setting: int, fixed: Mapping[str, int]) -> None:
        """Create the next trial. Setting 0 has only the fixed values, given as positions in their
        lists. Each further setting has the same drawn values in all its trials.
        """
        if fixed:
            self._study.enqueue_trial(dict(fixed))
        # Seeded for each setting, because the state of a sampler is not in the journal: a resumed
        # search must draw the same values.
        seed = random.Random(f"{self._options.seed} {setting}").getrandbits(32)
        if self._options.algorithm == "tpe":
            self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        else:
            self._study.sampler = optuna.samplers.RandomSampler(seed=seed)
        self._study.ask(
            {
                domain.field: _distribution(domain)
                for domain in self._space.domains
                if setting or domain.field in fixed
            }
        )

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial by field."""
        return self._space.values(self._trial(number).params)

    def record(self, number: int, wave: int, result: PartResult) -> None:
        """Save the result of training a trial in a wave."""
        if result.error is not None and result.can_retry:
            self._outside_errors[number] = result.error
            return
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        if result.error is not None:
            self._storage.set_trial_user_attr(trial_id, _ERROR, result.error)
            self._study.tell(number, state=TrialState.FAIL)
        else:
            # The journal needs a value to tell a trained wave from one that was not.
            value = math.nan if result.value is None else result.value
            self._storage.set_trial_intermediate_value(trial_id, wave, value)
            if result.finished:
                self._study.tell(number, value)
        self.save()

    def stop_paused(self, group: Sequence[int]) -> None:
        """Stop the paused trials of a group, so that the sampler learns from them. If one failed
        for an outside reason, its next attempt may change which trials continue, so none is.
        """
        if self._outside_errors.keys().isdisjoint(group):
            for number in group:
                self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
            self.save()

    def has_ended(self, number: int, wave: int) -> bool:
        """Return whether nothing is left to train of a trial in this wave."""
        trial = self._trial(number)
        return (
            trial.state.is_finished()
            or wave in trial.intermediate_values
            or number in self._outside_errors
        )

    def metric(self, number: int, wave: int) -> float | None:
        """Return the metric after a wave, or of the selected weights if the trial had finished by
        then. None without metric, or if the trial failed before.
        """
        trial = self._trial(number)
        return _finite(trial.intermediate_values.get(wave, trial.value))

    def last_metric(self, number: int) -> float | None:
        """Return the metric after the last wave that the trial was trained in, None before one."""
        values = self._trial(number).intermediate_values
        return _finite(values[max(values)]) if values else None

    def error(self, number: int) -> str | None:
        """Return the error of a failed trial, None for others."""
        return self._outside_errors.get(number) or self._trial(number).user_attrs.get(_ERROR)

    def outcome(self, number: int) -> str:
        """Return whether the trial is finished, failed or stopped."""
        if self.error(number) is not None:
            return "failed"
        return "finished" if self._trial(number).state == TrialState.COMPLETE else "stopped"

    def save(self) -> None:
        self._journal.save()

    def _trial(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _distribution(domain: Domain) -> BaseDistribution:
    if domain.kind in LISTS:
        # Positions, because Optuna's journal stores only plain values, and these may be lists.
        return CategoricalDistribution(range(len(domain.values)))
    low, high = domain.values
    if domain.kind == "integers":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


# Protocol of the journal. Optuna appends operations while trials run, and reads them all when a
# study is opened.
#
#   append_logs  keeps the operation in memory, several for one change of a trial
#   save         replaces the file after the last operation of a change
#
# A kill before `save` loses the whole change, never a part of it. The trial is then RUNNING without
# its last value, and trains that part again, to the same bits. There is one writer: this process.
# Optuna's own file backend locks and appends, which object stores cannot do.
class _Journal(BaseJournalBackend):
    """Journal in Optuna's file format, one operation a line, local or at a URL. Object stores
    cannot append, so `save` replaces the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines = storage.read_text(path).splitlines() if storage.exists(path) else []

    def read_logs(self, log_number_from: int) -> Sequence[dict[str, Any]]:
        return [json.loads(line) for line in self._lines[log_number_from:]]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._lines += [json.dumps(log, separators=(",", ":")) for log in logs]

    def save(self) -> None:
        storage.write_bytes(self._path, "".join(f"{line}\n" for line in self._lines).encode())
