"""Optuna study of a search: the values of its trials, and the journal for resuming."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
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

from rayrec import storage
from rayrec.tuning.space import LISTS, Domain, Space, TuneConfig
from rayrec.tuning.trials import TrialState

_NAME: Final = "search"


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

    def __len__(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial by field."""
        return dict(self._study.get_trials(deepcopy=False)[number].user_attrs["values"])

    def state(self, number: int) -> TrialState:
        """Return the state of a trial, as last recorded."""
        stored = self._storage.get_study_user_attrs(self._study_id).get(f"trial {number}")
        if stored is None:
            return TrialState("new")
        return TrialState(**{**stored, "values": tuple(stored["values"])})

    def create_trial(self, setting: int, fixed: Mapping[str, int]) -> None:
        """Create the next trial. Setting 0 has only the fixed values, given as positions in their
        lists. Each further setting has the same drawn values in all its trials.
        """
        domains = self._space.domains if setting else ()
        if domains and fixed:
            self._study.enqueue_trial(dict(fixed))
        # Seeded for each setting, because the state of a sampler is not in the journal: a resumed
        # search must draw the same values.
        seed = random.Random(f"{self._options.seed} {setting}").getrandbits(32)
        if self._options.algorithm == "tpe":
            self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        else:
            self._study.sampler = optuna.samplers.RandomSampler(seed=seed)
        trial = self._study.ask({domain.field: _distribution(domain) for domain in domains})
        trial.set_user_attr("values", self._space.values({**fixed, **trial.params}))

    def record(self, number: int, state: TrialState) -> None:
        """Save the state of a trial. It belongs to the study, because a trial that Optuna has been
        told about cannot change, but may continue after a trial that failed is trained again.
        """
        self._study.set_user_attr(f"trial {number}", vars(state))
        self.save()

    def finish(self, numbers: Iterable[int]) -> None:
        """Return the final states of trials to the sampler. A trial that the next search retries
        stays open.
        """
        for number in numbers:
            state = self.state(number)
            trial = self._study.get_trials(deepcopy=False)[number]
            if trial.state.is_finished() or state.can_retry:
                continue
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            for wave, value in enumerate(state.values):
                if value is not None:
                    self._storage.set_trial_intermediate_value(trial_id, wave, value)
            if state.state == "finished" and state.values[-1] is not None:
                self._study.tell(number, state.values[-1])
            elif state.state == "paused":
                self._study.tell(number, state=optuna.trial.TrialState.PRUNED)
            else:
                self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        self.save()

    def save(self) -> None:
        self._journal.save()


def _distribution(domain: Domain) -> BaseDistribution:
    if domain.kind in LISTS:
        # Positions, because Optuna's journal stores only plain values, and these may be lists.
        return CategoricalDistribution(range(len(domain.values)))
    low, high = domain.values
    if domain.kind == "integers":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


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
