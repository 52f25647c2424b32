"""Hyperparameter search: prepare the data once, train the trials, select the best one, test it, and
report on all.
"""

import contextlib
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from rayrec import host_resources, storage
from rayrec.checkpoint import open_checkpoint
from rayrec.cluster import connection
from rayrec.config import InputError, error_line
from rayrec.data.engine import ThreadEngine
from rayrec.data.log_source import LogSource, index_log
from rayrec.data.materialized.dataset import open_preprocessed
from rayrec.data.materialized.formats import best_format
from rayrec.data.materialized.writer import preprocess
from rayrec.humanize import aligned, value_text
from rayrec.imports import require
from rayrec.inference.config import ComparisonConfig, ScoringConfig
from rayrec.inference.evaluate import ScoredRows, model_cost, score_baseline
from rayrec.inference.result_tables import SEEDS_NOTE, seeded_rows
from rayrec.inference.scoring import ScoringRequest
from rayrec.metrics.significance import (
    METRICS,
    Resampling,
    SeededScores,
    compare_models,
    compare_seeds,
    holm,
)
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.observe.report.charts import NUM_SERIES, Line, line_chart
from rayrec.observe.report.page import Section, charts, document, join_parts, paragraph, table
from rayrec.observe.run_summary import RunSummary
from rayrec.training.session import check_settings, preflight
from rayrec.tuning.space import Space, TuneConfig, with_values
from rayrec.tuning.study import Study
from rayrec.tuning.trials import PartResult, train_parts, trial_folder, validations_in
from rayrec.tuning.waves import TrainParts, groups_of, train_waves, wave_fractions
from rayrec.workloads.base import RunContext, TrainConfig
from rayrec.workloads.recsys.baselines import PACKAGES, open_baselines
from rayrec.workloads.recsys.settings import Prepared
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import ClusterConfig

SEARCH: Final = "search.json"
"""File in the search folder with the search's settings."""
JOURNAL: Final = "journal.log"
"""File in the search folder with the trials' values and states, in Optuna's format."""
_DATA = "data"
_TRIALS = "trials"
_PREPARED = "prepared"


@dataclass(frozen=True)
class Trial:
    """State and results of a trial."""

    number: int
    values: Mapping[str, Any]
    """Overrides of the recipe's settings. Empty for the recipe's own settings."""
    state: str
    error: str | None
    step: int
    rows: int
    seconds: float
    share: float
    """Trained share of the steps."""
    curve: tuple[tuple[int, float], ...]
    """(step, metric) of each validation."""
    best: float | None
    """Metric of the selected weights: of the last validation, or of the best one with early
    stopping.
    """
    checkpoint: str | None
    """Selected checkpoint. None if the trial is not finished."""


# Sequence of a search. Every step can be killed: the same call repeats what is not stored yet.
#
#   begin    search.json and the first group's values    a changed search is refused from here on
#   prepare  data/                                       indexed, counted and preprocessed once
#   train    journal.log, trials/trial_NNNN              group by group, wave by wave
#   conclude trials.json, best.yaml, report.html         computed again by each call
def tune(
    config: TrainConfig,
    space: Space,
    *,
    options: TuneConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Search the settings of a click recipe for the best trial.

    The log is indexed, counted and preprocessed once, into `FOLDER/data`. Each trial trains on that
    in one Ray process, or with `cluster.address` none sequentially in this process.
    `rayrec.tuning.waves` selects the trials to continue. FOLDER is storage_path/name. The same
    call again resumes the search. The result does not depend on timing. Raises InputError before
    anything starts, for an invalid recipe, space or data; later, if no trial finished.

    Returns:
        Plain JSON: `folder`, `best` (number, values, validation metric), `best_config` (a file for
        `rayrec train --config`), `trials` (one dict each), `compared` (test-set differences of the
        best trial minus the recipe's settings, with intervals and p-values; None if the recipe's
        settings are best, or with several seeds), `validation_rows`, `test_rows`, `trained_share`
        (trained rows, relative to training all trials to their end), and `groups`. With several
        seeds, `groups` has a dict per setting, the recipe's own first, and per baseline: test
        metrics, cost, and difference from the first.
    """
    options, console = options or TuneConfig(), console or Console()
    config = config.replace(
        name=config.name or f"tune-{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    _check_request(config, options)
    folder = storage.join(storage.absolute(config.storage_path), str(config.name))
    space.check(config)
    check_settings(config)
    preflight(
        config.replace(scaling={"num_workers": 1}, cluster={"address": connection.IN_PROCESS})
    )
    if not connection.is_in_process(config.cluster.address):
        connection.require_direct(config.cluster.address)
    search = _Search(config, space, options, folder)
    search.begin()
    prepared, data = _prepare(config, folder, console)
    if options.seeds > 1 and "test" not in prepared.sets:
        raise InputError(
            "tune.seeds: settings are compared on test rows, and the split has none. Choose "
            "another split."
        )
    search.train(data, console)
    trials = [search.trial(number) for number in range(len(search.configs))]
    return _conclude(
        config, search.configs, trials, prepared, folder=folder, options=options, console=console
    )


def _check_request(config: TrainConfig, options: TuneConfig) -> None:
    """Check the model, the data and the options before anything is created. Raises InputError."""
    workload = config.workload
    if not isinstance(workload, ClickWorkload) or not workload.predicts_clicks:
        raise InputError(f"tune: requires a click model, and recipe {config.recipe} is not one")
    if (
        config.eval_data.path is not None
        or LogSource.at(config.train_data.path or "").is_preprocessed
    ):
        raise InputError(
            "tune: requires one raw log, split into training, validation and test rows. Omit "
            "--eval-data.path."
        )
    if options.baselines and options.seeds == 1:
        raise InputError(
            "tune.baselines: require several seeds, got tune.seeds 1. Add --tune.seeds 3."
        )
    if options.algorithm == "tpe" and options.seeds > 1:
        raise InputError(
            "tune.seeds: compare settings that do not depend on results, got tune.algorithm tpe. "
            "Use --tune.algorithm random or grid."
        )
    if options.seeds > 1:
        require("scipy", *(PACKAGES[kind] for kind in options.baselines), extra="baselines")


@final
class _Search:
    """Trials of a search: their values, configurations and training, in groups."""

    def __init__(self, config: TrainConfig, space: Space, options: TuneConfig, folder: str) -> None:
        self._config = config
        self._options = options
        self._folder = folder
        self._settings = space.settings(config, options)
        self._groups = groups_of(len(self._settings) * options.seeds, options)
        self.configs: list[TrainConfig] = []
        """Configurations of the trials."""
        # Where trials train, how many at once and which baselines join may change between calls,
        # because they change no result.
        # The settings that all searches of a folder share.
        self._shared = {
            "config": config.replace(cluster=ClusterConfig()).to_dict(),
            "space": space.plain(),
            "options": {
                name: value
                for name, value in options.to_dict().items()
                if name not in ("concurrent", "baselines")
            },
            "waves": wave_fractions(options),
        }
        _check_same(folder, self._shared)
        self._study = Study(storage.join(folder, JOURNAL), space, options)

    def begin(self) -> None:
        """Check the settings of the first group, then create the folder. Raises InputError."""
        self._create_trials(self._groups[0])
        # Trials of later groups, in the journal of a resumed search, may have failed.
        for number in range(max(self._groups[0]) + 1):
            check_settings(with_values(self._config, self.values(number)))
        storage.make_folder(self._folder)
        storage.write_json(storage.join(self._folder, SEARCH), self._shared)
        self._study.save()

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial. With several seeds, `seed` is one of them."""
        values = self._study.values(number)
        if self._options.seeds > 1:
            offset = number % self._options.seeds
            return {**values, "seed": with_values(self._config, values).seed + offset}
        return values

    def train(self, data: str, console: Console) -> None:
        """Train all trials on preprocessed rows."""
        with contextlib.ExitStack() as stack:
            # Opened by the first wave with something to train, and shared by all groups.
            @functools.cache
            def pool() -> TrainParts:
                # Ray is connected only if there is something to train.
                cluster = self._config.cluster
                if cluster.address == connection.IN_PROCESS:
                    return train_parts
                from rayrec.tuning.ray_pool import ray_pool

                opened = ray_pool(cluster, self._options, self.configs[0], console=console)
                return stack.enter_context(opened).run

            # A group's values may depend on the results of the groups before (TPE), so they are
            # drawn only now. They are stored before training begins: a resumed search must train
            # the same values.
            for group in self._groups:
                self._create_trials(group)
                self._study.save()
                for number in range(len(self.configs), len(self._study)):
                    self.configs.append(self._trial_config(number, data))
                train_waves(
                    group, self.configs, self._study, pool, options=self._options, note=console.note
                )
                self._study.stop_paused(group)

    def trial(self, number: int) -> Trial:
        """Return the results of a trial, from the study and the trial's folder."""
        folder = trial_folder(self.configs[number])
        path = storage.join(folder, "events.jsonl")
        summary = storage.join(folder, "summary.json")
        events = read_events(path) if storage.exists(path) else []
        validations = validations_in(events)
        run = RunSummary(events, curves=False)
        last = run.latest.get("step")
        return Trial(
            number,
            self.values(number),
            self._study.outcome(number),
            self._study.error(number),
            step=validations[-1]["step"] if validations else 0,
            rows=last["rows"] if last else 0,
            seconds=run.working_s,
            share=last["step"] / last["steps"] if last else 0.0,
            curve=tuple((event["step"], event[self._options.metric]) for event in validations),
            best=self._study.last_metric(number),
            checkpoint=(
                storage.read_json(summary)["checkpoint"] if storage.exists(summary) else None
            ),
        )

    def _create_trials(self, group: Sequence[int]) -> None:
        """Create the trials up to the group's last one that the journal lacks."""
        for number in range(len(self._study), max(group) + 1):
            setting = number // self._options.seeds
            self._study.create_trial(setting, self._settings[setting])

    def _trial_config(self, number: int, data: str) -> TrainConfig:
        """Return the configuration of a trial. A later group may draw values that do not fit
        together, which is a failed trial.
        """
        config = self._config
        try:
            config = with_values(config, self.values(number))
            check_settings(config)
        except InputError as error:
            if not self._study.has_ended(number, 0):
                self._study.record(number, 0, PartResult(error=error_line(error)))
        return config.replace(
            name=f"trial_{number:04d}",
            storage_path=storage.join(self._folder, _TRIALS),
            train_data={"path": data, "files": ()},
            # Preprocessed rows contain no raw values to group by.
            workload={"schema": {"group": None}},
            scaling={"num_workers": 1, "use_gpu": self._options.gpus_per_trial > 0},
            cluster=ClusterConfig(
                address=connection.IN_PROCESS, num_cpus=self._options.cpus_per_trial
            ),
        )


def _check_same(folder: str, searched: Mapping[str, Any]) -> None:
    """Check that the folder contains no other search. Raises InputError."""
    path = storage.join(folder, SEARCH)
    if not storage.exists(path):
        return
    before = storage.read_json(path)
    changed = [
        name
        for name in searched
        if before.get(name) != json.loads(storage.json_text(searched[name]))
    ]
    if changed:
        raise InputError(
            f"{folder}: has a search with a different {' and '.join(changed)}. Use the same, "
            "or another --name."
        )


def _prepare(config: TrainConfig, folder: str, console: Console) -> tuple[Prepared, str]:
    """Return the preparation and the path of the preprocessed rows, created by the first call."""
    # As `train` does, so that the Preprocessor stores the log's order of columns
    config = config.workload.adapted(config)
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    assert config.train_data.path is not None
    cpus = host_resources.usable_cpus(granted=config.cluster.num_cpus)
    data = storage.join(folder, _DATA)
    path = storage.join(folder, _PREPARED)
    storage.make_folder(path)
    with console.preparing():
        engine = ThreadEngine(cpus, max_outage_s=config.failure.max_outage_s)
        context = RunContext(
            config, path, engine, console.note, console.progress, warn=console.warn
        )
        prepared = workload.prepare(context)
        if not LogSource.at(data).is_preprocessed:
            # The log's faults are already reported.
            quiet = dataclasses.replace(context, note=lambda text: None)
            index = workload.open_index(config.train_data, quiet, index_text=index_log)
            preprocessor = prepared.preprocessor.get()
            preprocess(
                index,
                preprocessor=preprocessor,
                out=data,
                format=best_format(preprocessor, data),
                engine=engine,
                sets=workload.split_rows(config.train_data.path, index),
                segments_per_task=config.train_data.segments_per_block,
                progress=lambda rows: console.progress("preprocess (rows)", rows, index.rows),
                note=console.note,
            )
    return prepared, data


def _conclude(
    config: TrainConfig,
    configs: Sequence[TrainConfig],
    trials: Sequence[Trial],
    prepared: Prepared,
    *,
    folder: str,
    options: TuneConfig,
    console: Console,
) -> dict[str, Any]:
    """Select the best trial, test it against the recipe's own settings, and write the result
    files.
    """
    sign = -1.0 if options.metric == "auroc" else 1.0
    ranked = sorted(trials, key=lambda trial: math.inf if trial.best is None else sign * trial.best)
    best = _best_finished(ranked)
    groups = _groups(configs, trials, options, console) if options.seeds > 1 else []
    compared = None
    if not groups and best.number and "test" in prepared.sets:
        compared = _compare(best, trials[0], configs, console)
    started = [trial for trial in trials if trial.share]
    full_rows = sum(trial.rows / trial.share for trial in started)
    winner = with_values(config, best.values).replace(name=None)
    settings = (
        ", ".join(f"{field}: {value}" for field, value in best.values.items())
        or "the recipe's own settings"
    )
    # The file is a configuration for `rayrec train --config`. Its head tells people its origin.
    head = (
        f"# The best of a search: {settings}\n"
        f"# {options.metric} {best.best:.5f} on {prepared.sets['validation'].rows:,} validation "
        "rows, on which it was chosen\n"
    )
    best_config = storage.join(folder, "best.yaml")
    storage.write_bytes(best_config, (head + winner.to_yaml()).encode())
    result = {
        "folder": folder,
        "metric": options.metric,
        "best": {
            "number": best.number,
            "values": dict(best.values),
            options.metric: best.best,
            "checkpoint": best.checkpoint,
        },
        "best_config": best_config,
        "validation_rows": prepared.sets["validation"].rows,
        "test_rows": prepared.sets["test"].rows if "test" in prepared.sets else 0,
        "compared": compared,
        "groups": groups,
        "trained_share": sum(trial.rows for trial in started) / full_rows if full_rows else None,
        "trials": [{**vars(trial), "values": dict(trial.values)} for trial in ranked],
    }
    plain: dict[str, Any] = json.loads(storage.json_text(result))
    storage.write_json(storage.join(folder, "trials.json"), plain)
    page = storage.join(folder, "report.html")
    storage.write_bytes(page, render(str(config.name), plain).encode())
    console.note(table_text(plain))
    console.note(f"Wrote the best settings to {best_config} and the report to {page}")
    return {**plain, "report": page}


def _best_finished(ranked: Sequence[Trial]) -> Trial:
    """Return the first trial with a metric and a checkpoint. Raises InputError if there is none."""
    for trial in ranked:
        if trial.checkpoint is not None and trial.best is not None:
            return trial
    errors = sorted((trial.number, trial.error) for trial in ranked if trial.error)
    reason = "all were interrupted"
    if errors:
        reason = "trial {}: {}".format(*errors[0])
    raise InputError(f"tune: no trial finished ({reason})")


def _compare(
    best: Trial, recipe: Trial, configs: Sequence[TrainConfig], console: Console
) -> dict[str, Any] | None:
    """Return the differences between the best trial and the recipe's own settings on the test rows,
    or None if the latter did not finish.
    """
    if recipe.checkpoint is None:
        return None
    scored = [
        _score_test_rows(configs[trial.number], str(trial.checkpoint), console)
        for trial in (best, recipe)
    ]
    differences = compare_models(
        [rows.logits for rows in scored], scored[0].labels, Resampling()
    ).differences[0, 1]
    return {metric: vars(differences[metric]) for metric in METRICS}


def _score_test_rows(config: TrainConfig, checkpoint: str, console: Console) -> ScoredRows:
    """Score the test rows, which are contiguous in the log."""
    path = str(config.train_data.path)
    first, stop = open_preprocessed(path).sets["test"]
    count = stop - first
    job = ScoringRequest(checkpoint, path, config, ScoringConfig(), console).open(
        evaluating=True, spare_cpus=0
    )
    # The job scores to the end of its last block, which may lie behind the test rows.
    test_rows = ScoredRows()
    for part in job.tables(console, title="score test rows", first_row=first):
        test_rows.update(part.slice(0, count - test_rows.rows))
        if test_rows.rows >= count:
            break
    return test_rows


def _groups(
    configs: Sequence[TrainConfig], trials: Sequence[Trial], options: TuneConfig, console: Console
) -> list[dict[str, Any]]:
    """Compare settings over the seeds of their finished trials, and baselines, on the test rows."""
    groups: list[dict[str, Any]] = []
    scores: list[SeededScores] = []
    # Trials of a setting are neighbours: number = setting x seeds + seed.
    for start in range(0, len(trials), options.seeds):
        finished = [
            trial for trial in trials[start : start + options.seeds] if trial.checkpoint is not None
        ]
        if finished:
            rows = [
                _score_test_rows(configs[trial.number], str(trial.checkpoint), console)
                for trial in finished
            ]
            scores.append(
                SeededScores.from_seeds((scored.logits, scored.labels) for scored in rows)
            )
            checkpoint = open_checkpoint(str(finished[0].checkpoint))
            groups.append(_setting(finished) | model_cost(checkpoint, configs[start]))
    if options.baselines:
        path = str(configs[0].train_data.path)
        baselines = open_baselines(
            configs[0],
            checkpoint.path,
            max_rows=ComparisonConfig.baseline_rows,
            kinds=options.baselines,
        )
        for kind in options.baselines:
            test_rows = baselines.rows(path, *open_preprocessed(path).sets["test"])
            logits, described = score_baseline(kind, baselines, test_rows, rows[0].labels, console)
            # Another seed would yield the same model.
            scores.append(SeededScores.from_seeds([(logits, rows[0].labels)] * 2))
            groups.append(described)
    _add_differences(groups, scores)
    return groups


def _setting(finished: Sequence[Trial]) -> dict[str, Any]:
    """Describe a setting by its finished trials, one for each seed."""
    name = ", ".join(
        _value(value) for field, value in finished[0].values.items() if field != "seed"
    )
    metrics = [math.nan if trial.best is None else trial.best for trial in finished]
    return {
        "name": name or "recipe",
        "trials": [trial.number for trial in finished],
        "seeds": len(finished),
        "seconds": statistics.fmean(trial.seconds for trial in finished),
        **_spread("validation", metrics),
    }


def _add_differences(groups: Sequence[dict[str, Any]], scores: Sequence[SeededScores]) -> None:
    """Add to the groups their metrics on the test rows, and to all but the first the differences
    from it.
    """
    for group, group_scores in zip(groups, scores, strict=True):
        seeds = group.get("seeds", 1)  # A baseline was trained once, whatever its copies above
        group |= _spread("auroc", group_scores.aurocs.tolist()[:seeds])
        group |= _spread("logloss", group_scores.loglosses.tolist()[:seeds])
    tests = [
        compare_seeds(group_scores, scores[0], confidence=Resampling.confidence)
        for group_scores in scores[1:]
    ]
    # All settings are compared with the same first one. Without a correction, one of twenty equal
    # settings would look better at random.
    corrected = holm([test.p_value for test in tests])
    for group, test, p_value in zip(groups[1:], tests, corrected, strict=True):
        group |= {**vars(test), "corrected_p_value": p_value}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation over seeds, NaN for one."""
    return {
        name: statistics.fmean(values),
        f"{name}_std": statistics.stdev(values) if len(values) > 1 else math.nan,
    }


def table_text(result: Mapping[str, Any]) -> str:
    """Format one line per trial, the best first, notes on the best one, and with several seeds one
    line per setting.
    """
    heads, rows = _rows(result)
    comparison = (
        ["", *aligned(seeded_rows(result["groups"])), SEEDS_NOTE] if result["groups"] else []
    )
    return "\n".join([*aligned([heads, *rows], left=()), *_notes(result), *comparison])


def render(name: str, result: Mapping[str, Any]) -> str:
    """Render the page of a search."""
    heads, rows = _rows(result)
    groups = seeded_rows(result["groups"])
    comparison = (
        [table(groups[0], groups[1:], name="Comparison"), paragraph(SEEDS_NOTE)]
        if result["groups"]
        else []
    )
    best = sorted(result["trials"], key=lambda trial: trial["number"] != result["best"]["number"])
    lines = [
        Line(f"trial {trial['number']}", [tuple(point) for point in trial["curve"]])
        for trial in best[:NUM_SERIES]
    ]
    fields = dict.fromkeys(field for trial in result["trials"] for field in trial["values"])
    return document(
        f"Search {name}",
        (
            Section("Comparison", join_parts(comparison)),
            Section("Best", join_parts([paragraph(text) for text in _notes(result)])),
            Section("Trials", table(heads, rows, name="Trials", unfolded=True)),
            Section(
                "Curves",
                charts([line_chart(f"Validation {result['metric']}", lines, x_label="step")]),
            ),
            Section("Settings", charts([_scatter(result, field) for field in fields])),
        ),
        wide=True,
    )


def _notes(result: Mapping[str, Any]) -> list[str]:
    best = result["best"]
    metric = result["metric"]
    values = ", ".join(f"{field} {_value(value)}" for field, value in best["values"].items())
    notes = [
        f"Trial {best['number']} is best: {metric} {best[metric]:.5f} on "
        f"{result['validation_rows']:,} validation rows "
        "(optimistic, because these rows selected it). "
        f"{values or 'It has the settings of the recipe.'}"
    ]
    if result["trained_share"] is not None and result["trained_share"] < 1:
        notes.append(
            f"Trained {result['trained_share']:.1%} of the rows of these trials: weak trials were "
            "stopped early."
        )
    compared = result["compared"]
    if compared is not None:
        auroc = compared["auroc"]
        notes.append(
            f"On {result['test_rows']:,} test rows, its AUROC differs by "
            f"{auroc['difference']:+.5f} from the recipe's own "
            f"settings ({auroc['low']:+.5f} to {auroc['high']:+.5f}, p = {auroc['p_value']:.3g})."
            if None not in auroc.values()
            else (
                f"{result['test_rows']:,} test rows are too few for a comparison with the "
                "recipe's own settings."
            )
        )
    return notes


def _rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    fields = dict.fromkeys(field for trial in result["trials"] for field in trial["values"])
    heads = [
        "trial",
        *(field.rpartition(".")[2] for field in fields),
        result["metric"],
        "step",
        "rows",
        "seconds",
        "state",
    ]
    rows = []
    for trial in result["trials"]:
        settings = [
            _value(trial["values"][field]) if field in trial["values"] else "recipe"
            for field in fields
        ]
        best = "-" if trial["best"] is None else f"{trial['best']:.5f}"
        measured = [best, f"{trial['step']:,}", f"{trial['rows']:,}", f"{trial['seconds']:.0f}"]
        rows.append([str(trial["number"]), *settings, *measured, trial["error"] or trial["state"]])
    return heads, rows


def _scatter(result: Mapping[str, Any], field: str) -> Any:
    """Plot the metric over a numeric field, one dot per trial."""
    points = [
        (float(trial["values"][field]), trial["best"])
        for trial in result["trials"]
        if isinstance(trial["values"].get(field), int | float) and trial["best"] is not None
    ]
    return line_chart(
        f"{result['metric']} by {field}", [Line(result["metric"], sorted(points))], x_label=field
    )


def _value(value: Any) -> str:
    return value_text(value) if isinstance(value, float) else str(value)
