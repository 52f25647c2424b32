"""The settings that a search tries: which fields of a configuration, and which values of each."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Gt, Le

from rayrec.bounds import Amount, Count
from rayrec.config import Config, InputError
from rayrec.workloads.base import TrainConfig

Kind = Literal["grid", "choice", "uniform", "loguniform", "integers"]
_LISTS: Final = ("grid", "choice")
_KINDS: Final = (*_LISTS, "uniform", "loguniform", "integers")
_EXPONENT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SHARED: Final = {
    "train_data": "all trials read the same rows",
    "eval_data": "all trials are compared on the same rows",
    "workload.schema": "all trials read the same rows",
    "workload.preset": "all trials share one Preprocessor",
    "workload.preprocessor": "all trials share one Preprocessor",
    "workload.teacher": "all trials share one Preprocessor, which a teacher brings along",
    "name": "a trial's name is its number",
    "storage_path": "trials are kept in the search's folder",
    "cluster": "a trial trains in one process of the search's Ray",
    "scaling": "a trial trains in one process",
    "recipe": "trials are of one recipe",
}
"""Fields that trials have in common, and why."""


@dataclass(frozen=True)
class Domain:
    """The values of one field."""

    field: str
    """By its path in the configuration, such as workload.model.dropout."""
    kind: Kind
    values: tuple[Any, ...]
    """grid and choice: the values; the others: the least and the largest."""

    def draw(self, chance: random.Random) -> Any:
        """A random value. Not of a grid."""
        if self.kind == "choice":
            return chance.choice(self.values)
        low, high = self.values
        if self.kind == "integers":
            return chance.randint(low, high)
        if self.kind == "uniform":
            return chance.uniform(low, high)
        return math.exp(chance.uniform(math.log(low), math.log(high)))


@dataclass(frozen=True)
class Space:
    """The values of all fields that are searched."""

    domains: tuple[Domain, ...]

    @classmethod
    def of(cls, values: object, *, source: str) -> Space:
        """Of a mapping such as {workload.model.dropout: {uniform: [0, 0.5]}}; `source` is named in errors. Raises InputError for
        anything else."""
        if not isinstance(values, Mapping) or not values:
            raise InputError(f"{source}: needs fields and their values, such as workload.model.dropout: {{uniform: [0, 0.5]}}")
        return cls(tuple(_domain(str(field), given, source) for field, given in values.items()))

    @classmethod
    def read(cls, text: str, *, source: str) -> Space:
        """Of a YAML file's text. Raises InputError for what `of` refuses."""
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"{source}: is not YAML ({' '.join(str(error).split())})") from None
        return cls.of(values, source=source)

    def plain(self) -> dict[str, Any]:
        """The mapping that `of` takes."""
        return {domain.field: {domain.kind: list(domain.values)} for domain in self.domains}

    def check(self, config: TrainConfig) -> None:
        """Raises InputError for a field that trials have in common, and for values that the configuration refuses."""
        for domain in self.domains:
            for shared, why in _SHARED.items():
                if domain.field == shared or domain.field.startswith(f"{shared}."):
                    raise InputError(f"search: {domain.field} cannot be searched: {why}")
            for value in domain.values:
                with_values(config, {domain.field: value})

    def trials(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The values of each trial by field, the default's (none) first: of every combination of the grids as many draws of the
        other fields as `count` allows, at least one; without such fields each combination once. Pure."""
        grids = [domain for domain in self.domains if domain.kind == "grid"]
        others = [domain for domain in self.domains if domain.kind != "grid"]
        combinations = [
            dict(zip((grid.field for grid in grids), values, strict=True))
            for values in itertools.product(*(grid.values for grid in grids))
        ]
        draws = max(1, (count - 1) // len(combinations)) if others else 1
        chance = random.Random(seed)
        found: list[dict[str, Any]] = [{}]
        for _ in range(draws):
            for combination in combinations:
                drawn = {domain.field: domain.draw(chance) for domain in others}
                found.append({domain.field: {**combination, **drawn}[domain.field] for domain in self.domains})
        return found


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a trial. Raises InputError for values that do not fit together."""
    changes: dict[str, Any] = {}
    for field, value in values.items():
        *path, last = field.split(".")
        inner = changes
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return config.updated(changes, where="search: ")


def _domain(field: str, given: object, source: str) -> Domain:
    where = f"{source}: {field}"
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InputError(f"{where}: needs one of {', '.join(_KINDS)}, such as {{choice: [1, 2]}}")
    ((kind, values),) = given.items()
    if kind not in _KINDS:
        raise InputError(f"{where}: {kind} is none of {', '.join(_KINDS)}")
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputError(f"{where}.{kind}: needs a list of values")
    values = _numbers(values)
    if kind not in _LISTS:
        _check_range(f"{where}.{kind}", kind, values)
    return Domain(field, kind, tuple(values))


def _numbers(value: Any) -> Any:
    """1e-4 is a text in YAML 1.1, and a number to everybody else."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_range(where: str, kind: str, values: Sequence[Any]) -> None:
    wanted = int if kind == "integers" else int | float
    fits = len(values) == 2 and all(isinstance(value, wanted) and not isinstance(value, bool) for value in values)
    if not fits or not values[0] < values[1] or not all(math.isfinite(value) for value in values):
        numbers = "integers" if kind == "integers" else "numbers"
        raise InputError(f"{where}: {list(values)} must be two {numbers}, the least and the largest")
    if kind == "loguniform" and values[0] <= 0:
        raise InputError(f"{where}: {values[0]} must be above 0")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """How many trials there are, how the best is chosen, and what each of them gets."""

    trials: Count = 20
    """Trials, the recipe's own settings being one of them; grids alone decide this themselves."""
    metric: Literal["auroc", "logloss"] = "auroc"
    """Of the validation rows: what the best trial is best in."""
    seed: int = 0
    """Of the values that are drawn."""
    stop_early: bool = True
    """Train all trials for the first part of their steps only, then the best of them for longer, and so on (successive halving);
    the recipe's own settings are always trained to the end. False: all trials are."""
    keep_fraction: Annotated[float, Gt(0), Le(0.5)] = 1 / 3
    """Share of the trials that train on after each part. By default trials are compared when 1/27, 1/9 and 1/3 of their steps are
    done."""
    cpus_per_trial: Count = 1
    """Threads of a trial, which trains in one process."""
    gpus_per_trial: Amount = 0.0
    """GPUs of a trial; a fraction lets several share one."""
    concurrent: Count | None = None
    """Most trials at once; None: as many as there is room for."""
