"""Search space: the fields of a configuration and the values to try."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Gt, Le

from rayrec.bounds import Amount, Count
from rayrec.config import Config, InputError, nest, packaged_json
from rayrec.workloads.base import TrainConfig

Kind = Literal["grid", "choice", "uniform", "loguniform", "integers"]
LISTS: Final = ("grid", "choice")
"""Kinds with a list of values."""
_KINDS: Final = (*LISTS, "uniform", "loguniform", "integers")
_EXPONENT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SHARED: Final[dict[str, str]] = packaged_json(__package__, "shared_fields.json")
"""Fields shared by all trials, and the reasons."""


@dataclass(frozen=True)
class Domain:
    """Values of one field."""

    field: str
    """Dotted path in the configuration, such as workload.model.dropout."""
    kind: Kind
    values: tuple[Any, ...]
    """All values for grid and choice, otherwise minimum and maximum."""


@dataclass(frozen=True)
class Space:
    """Domains of all searched fields."""

    domains: tuple[Domain, ...]

    @classmethod
    def parse(cls, values: object, *, source: str) -> Space:
        """Parse a mapping such as {workload.model.dropout: {uniform: [0, 0.5]}}. Raises InputError,
        naming `source`.
        """
        if not isinstance(values, Mapping) or not values:
            raise InputError(
                f"{source}: must map fields to values, such as workload.model.dropout: {{uniform: "
                f"[0, 0.5]}}"
            )
        return cls(tuple(_domain(str(field), spec, source) for field, spec in values.items()))

    @classmethod
    def read(cls, text: str, *, source: str) -> Space:
        """Parse a YAML text. Raises InputError with `source` if it is invalid."""
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"{source}: invalid YAML ({' '.join(str(error).split())})") from None
        return cls.parse(values, source=source)

    def plain(self) -> dict[str, Any]:
        """Return the mapping that `parse` parses."""
        return {domain.field: {domain.kind: list(domain.values)} for domain in self.domains}

    def check(self, config: TrainConfig) -> None:
        """Check that all fields may be searched and that the configuration accepts their values.
        Raises InputError.
        """
        for domain in self.domains:
            for shared, why in _SHARED.items():
                if domain.field == shared or domain.field.startswith(f"{shared}."):
                    raise InputError(f"search: {domain.field} cannot be searched: {why}")
            for value in domain.values:
                with_values(config, {domain.field: value})

    def values(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values for a sample of the fields: numbers, or for lists positions."""
        return {
            domain.field: domain.values[sample[domain.field]]
            if domain.kind in LISTS
            else sample[domain.field]
            for domain in self.domains
            if domain.field in sample
        }

    def settings(self, config: TrainConfig, options: TuneConfig) -> list[dict[str, int]]:
        """Return the fixed fields of each setting, as positions in their lists. The first setting
        is the recipe's own. Combines each grid point with as many draws of the other fields as
        `options.trials` allows, at least one. Without these, uses each grid point once; with
        several seeds, the recipe's own settings occur once. Pure.
        """
        grids = [domain for domain in self.domains if "grid" in (domain.kind, options.algorithm)]
        for domain in grids:
            if domain.kind not in LISTS:
                raise InputError(
                    f"search: {domain.field}: {domain.kind} has no list of values, required by "
                    "tune.algorithm grid. Use grid or choice, or --tune.algorithm random."
                )
        combinations = [
            dict(zip((grid.field for grid in grids), positions, strict=True))
            for positions in itertools.product(*(range(len(grid.values)) for grid in grids))
        ]
        # Other fields are drawn, so that no setting can equal the recipe's own.
        if len(grids) < len(self.domains):
            num_draws = max(1, (options.trials - 1) // len(combinations))
            return [{}, *combinations * num_draws]
        # Only grids: the recipe's own settings may be among the points, and need not be trained
        # twice.
        equal = (
            positions
            for positions in combinations
            if options.seeds > 1 and with_values(config, self.values(positions)) == config
        )
        recipe = next(equal, {})
        return [
            recipe,
            *(positions for positions in combinations if positions != recipe),
        ]


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a trial. Raises InputError for incompatible values."""
    return config.updated(nest(values), where="search: ")


def _domain(field: str, spec: object, source: str) -> Domain:
    label = f"{source}: {field}"
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise InputError(f"{label}: must be one of {', '.join(_KINDS)}, such as {{choice: [1, 2]}}")
    ((kind, values),) = spec.items()
    if kind not in _KINDS:
        raise InputError(f"{label}: must be one of {', '.join(_KINDS)}, got {kind}")
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputError(f"{label}.{kind}: must be a list of values")
    values = _numbers(values)
    if kind not in LISTS:
        _check_range(f"{label}.{kind}", kind, values)
    return Domain(field, kind, tuple(values))


def _numbers(value: Any) -> Any:
    """Convert numbers such as 1e-4, which YAML 1.1 parses as text."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_range(label: str, kind: str, values: Sequence[Any]) -> None:
    number_type = int if kind == "integers" else int | float
    fits = len(values) == 2 and all(
        isinstance(value, number_type) and not isinstance(value, bool) for value in values
    )
    if not fits or not values[0] < values[1] or not all(math.isfinite(value) for value in values):
        numbers = "integers" if kind == "integers" else "numbers"
        raise InputError(f"{label}: must be two {numbers} (minimum, maximum), got {list(values)}")
    if kind == "loguniform" and values[0] <= 0:
        raise InputError(f"{label}: must be above 0, got {values[0]}")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """Settings of a search: number of trials, selection, and resources per trial."""

    trials: Count = 20
    """Number of trials of different settings, including the recipe's own. Ignored if all domains
    are grids.
    """
    seeds: Count = 1
    """Number of seeds to train each setting with. Several train all trials to the end, and compare
    settings on test rows.
    """
    algorithm: Literal["random", "grid", "tpe"] = "random"
    """How to choose values: at random, every combination of the listed ones (choice counts as
    grid), or by a tree-structured Parzen estimator from the trials before (Optuna's TPE).
    """
    metric: Literal["auroc", "logloss"] = "auroc"
    """Validation metric that selects the best trial."""
    seed: int = 0
    """Seed of the drawn values. The same seed repeats a search."""
    stop_early: bool = True
    """Whether to stop weak trials early (successive halving): train all for a few steps and only
    the best for longer. The recipe's own settings are always trained to the end.
    """
    keep_fraction: Annotated[float, Gt(0), Le(0.5)] = 1 / 3
    """Share of trials to continue after each part. By default, trials are compared after 1/27, 1/9
    and 1/3 of their steps.
    """
    cpus_per_trial: Count = 1
    """Number of threads per trial."""
    gpus_per_trial: Amount = 0.0
    """Number of GPUs per trial. With a fraction, several trials share a GPU."""
    concurrent: Count | None = None
    """Maximum number of concurrent trials. None: as many as fit."""
    baselines: tuple[Literal["lightgbm", "logistic"], ...] = ()
    """Baselines to compare settings with (see `rayrec compare`), trained on at most the last
    million training rows.
    """
