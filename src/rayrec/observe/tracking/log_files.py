"""Run logs in MLPerf format and in the iteration format of the original DLRM."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, final

from rayrec import storage
from rayrec.observe.run_summary import RunSummary, select_metrics
from rayrec.observe.tracking.tracker import AppendFile

TOKEN: Final = ":::MLLOG "
BENCHMARKS: Final = {"mlperf_dcnv2": "dlrm_dcnv2", "mlperf_dlrm": "dlrm"}
"""MLPerf benchmark of each recipe that trains one."""
_SCORES: Final = ("auroc", "accuracy", "loss")
"""Candidates for eval_accuracy, in order of preference. dlrm_dcnv2 uses AUROC."""
Type = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]


@final
class MlLogTracker:
    """Writer of RUN/mllog.log in the format of mlperf-logging 6. Each line is `:::MLLOG ` and a
    JSON object with namespace, time_ms, event_type, key, value and metadata. It is not a
    submission: submission_org is rayrec, submission_division open, and other rules are not checked.
    Repeated evaluations of a step appear once. eval_start is the time of the previous log, because
    evaluation follows it immediately. run_stop is a success if the run reached its target or has
    none.
    """

    def __init__(self, folder: str, *, config: Mapping[str, Any]) -> None:
        self._file = AppendFile(storage.join(folder, "mllog.log"))
        self._config = config
        self._sets: Mapping[str, int] = {}
        self._last_ms = 0
        self._epoch = -1
        self._running = False
        self._status: str | None = None
        self._end: tuple[int, dict[str, Any]] = 0, {}
        """Time and position of the end of training."""

    # Events of a run and the lines that they write:
    #
    #   run         the first one only   submission_*, seed, init_start
    #   start       the first one only   settings, init_stop, run_start
    #   step        in a new epoch       epoch_stop, block_stop, block_start, epoch_start
    #   evaluate    no repeat            eval_start, eval_accuracy, eval_stop
    #   close       after an end         epoch_stop, block_stop, run_stop
    #
    # A resumed run continues the file: run_stop waits for `close`, because a failure may be
    # followed by another attempt.
    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        kind = event["kind"]
        before_ms = self._last_ms
        self._last_ms = time_ms = int(event["time"] * 1000)
        if kind == "run" and not before_ms:
            self._begin(time_ms)
        elif kind == "prepared":
            self._sets = event.get("rows_of_sets", {})
        elif kind == "start":
            self._status = None
            if not self._running:
                self._start(time_ms, run.global_batch_size)
        elif kind == "step":
            self._enter_epoch(run.epoch_at(event["step"])[0], time_ms)
        elif kind == "evaluate" and not run.is_repeat:
            self._evaluation(event, run, before_ms)
        elif kind in ("stop", "failure") or (
            kind in ("early_stop", "finish") and self._status is None
        ):
            missed = event.get("target") is not None and event["target_step"] is None
            self._status = "aborted" if missed or kind in ("stop", "failure") else "success"
            self._end = time_ms, _metadata_at(run.step, run)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._running and self._status is not None:
            end_ms, position = self._end
            self._end_epoch(end_ms)
            self._write_line(
                "INTERVAL_END", "run_stop", None, end_ms, status=self._status, **position
            )
        self._file.close()

    def _begin(self, time_ms: int) -> None:
        recipe = self._config["recipe"]
        for key, value in (
            ("cache_clear", False),
            ("submission_benchmark", BENCHMARKS.get(recipe, recipe)),
            ("submission_org", "rayrec"),
            ("submission_division", "open"),
            ("submission_status", "research"),
            ("submission_platform", "ray"),
            ("seed", self._config["seed"]),
        ):
            self._write_line("POINT_IN_TIME", key, value, time_ms)
        self._write_line("INTERVAL_START", "init_start", None, time_ms)

    def _start(self, time_ms: int, global_batch_size: int | None) -> None:
        """Log the settings and the start of training after setup."""
        self._running = True
        workload = self._config["workload"]
        for key, value in (
            ("global_batch_size", global_batch_size),
            ("gradient_accumulation_steps", workload.get("accumulate", 1)),
            ("train_samples", self._sets.get("train")),
            (
                "eval_samples",
                min(
                    filter(None, (self._sets.get("validation"), self._config["eval_rows"])),
                    default=None,
                ),
            ),
            *optimizer_lines(workload),
        ):
            if value is not None:
                self._write_line("POINT_IN_TIME", key, value, time_ms)
        self._write_line("INTERVAL_END", "init_stop", None, time_ms)
        self._write_line("INTERVAL_START", "run_start", None, time_ms)

    def _enter_epoch(self, epoch: int, time_ms: int) -> None:
        while self._epoch < epoch:
            self._end_epoch(time_ms)
            self._epoch += 1
            self._write_line(
                "INTERVAL_START",
                "block_start",
                None,
                time_ms,
                first_epoch_num=self._epoch,
                epoch_count=1,
            )
            self._write_line("INTERVAL_START", "epoch_start", None, time_ms, epoch_num=self._epoch)

    def _end_epoch(self, time_ms: int) -> None:
        """End the current epoch, if any, and its block. As in the original DLRM, each epoch is a
        block.
        """
        if self._epoch >= 0:
            self._write_line("INTERVAL_END", "epoch_stop", None, time_ms, epoch_num=self._epoch)
            self._write_line(
                "INTERVAL_END", "block_stop", None, time_ms, first_epoch_num=self._epoch
            )

    def _evaluation(self, event: Mapping[str, Any], run: RunSummary, begin_ms: int) -> None:
        position = _metadata_at(event["step"], run)
        score = next((event[name] for name in _SCORES if event.get(name) is not None), None)
        self._write_line("INTERVAL_START", "eval_start", None, begin_ms, **position)
        if score is not None:
            self._write_line("POINT_IN_TIME", "eval_accuracy", score, self._last_ms, **position)
        self._write_line("INTERVAL_END", "eval_stop", None, self._last_ms, **position)

    def _write_line(
        self, event_type: Type, key: str, value: Any, time_ms: int, **metadata: Any
    ) -> None:
        self._file.write(
            line(event_type, key, value, time_ms=time_ms, metadata=metadata).encode() + b"\n"
        )


def _metadata_at(step: int, run: RunSummary) -> dict[str, float]:
    return {"epoch_num": round(run.epochs_at(step), 6), "samples_count": run.rows_at(step)}


def line(
    event_type: Type, key: str, value: Any, *, time_ms: int, metadata: Mapping[str, Any]
) -> str:
    """Format one log line. Adds `file` and `lineno` to the metadata, as mlperf-logging does."""
    record = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": event_type,
        "key": key,
        "value": value,
    }
    return TOKEN + json.dumps(
        record | {"metadata": {"file": "rayrec", "lineno": 0, **metadata}}, allow_nan=False
    )


def optimizer_lines(workload: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values for the optimizer and its schedule. Click models report the dense
    optimizer, which MLPerf's recipes also use for the tables. PyTorch's Adagrad starts at 0 and has
    no decay.
    """
    optimizer = workload.get("dense_optimizer") or workload.get("optimizer")
    if optimizer is None:
        return
    kind = optimizer["kind"]
    schedule = workload.get("schedule", {})
    yield "opt_name", kind
    yield "opt_base_learning_rate", optimizer["learning_rate"]
    yield "opt_weight_decay", optimizer["weight_decay"]
    if kind == "adagrad":
        yield "opt_adagrad_epsilon", optimizer["eps"]
        yield "opt_adagrad_initial_accumulator_value", 0
        yield "opt_adagrad_learning_rate_decay", 0
    elif kind in ("adam", "adamw", "lamb"):
        yield f"opt_{kind}_epsilon", optimizer["eps"]
        yield f"opt_{kind}_beta_1", optimizer["betas"][0]
        yield f"opt_{kind}_beta_2", optimizer["betas"][1]
    yield "opt_learning_rate_warmup_steps", schedule.get("warmup_steps")
    yield "opt_learning_rate_decay_start_step", schedule.get("decay_start_step")
    yield "opt_learning_rate_decay_steps", schedule.get("decay_steps")


@final
class IterationTracker:
    """Writer of RUN/iterations.log, with the lines of the original DLRM (its `--mlperf-logging` and
    e2eAIOK).

    - Finished training it 16/150 of epoch 0, 439.75 ms/it, loss 0.561402, accuracy 74.972 %
    - Testing at - 150/150 of epoch 0, loss 0.463800, auc 0.7926, best auc 0.7926, accuracy 78.221
      %, best accuracy 78.221 %
    - Test time:1.9700

    Training lines have the accuracy with `observe.accuracy`, and with `observe.by_worker` one
    follows for each worker, after [RANK]. Models without AUROC list their metrics. Repeated steps
    appear again, as in the original.
    """

    def __init__(self, folder: str) -> None:
        self._file = AppendFile(storage.join(folder, "iterations.log"))
        self._best: dict[str, float] = {}

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        kind = event["kind"]
        if kind == "step":
            each_ms = (
                1000 * run.interval.elapsed_s / run.interval.steps if run.interval.steps else 0.0
            )
            start = f"Finished training it {_position(event, run)}, {each_ms:.2f} ms/it"
            ranks = (f"[{rank}] " for rank in range(len(event.get("workers", ()))))
            for rank, fields in zip(("", *ranks), (event, *event.get("workers", ())), strict=True):
                accuracy = (
                    f", accuracy {_percent(fields['accuracy'])}" if "accuracy" in fields else ""
                )
                self._write_line(f"{rank}{start}, loss {_number(fields['loss'], 6)}{accuracy}")
        elif kind == "evaluate":
            self._write_line(
                f"Testing at - {_position(event, run)}, {self._tested(select_metrics(event))}"
            )
            if "seconds" in event:
                self._write_line(f"Test time:{event['seconds']:.4f}")

    def _tested(self, metrics: Mapping[str, Any]) -> str:
        if not {"auroc", "logloss", "accuracy"} <= metrics.keys():
            return ", ".join(
                f"{name} {value:.6f}" for name, value in metrics.items() if isinstance(value, float)
            )
        best = self._best = {
            name: max(self._best.get(name, 0.0), metrics[name] or 0.0)
            for name in ("auroc", "accuracy")
        }
        auc = f"auc {_number(metrics['auroc'], 4)}, best auc {_number(best['auroc'], 4)}"
        accuracy = (
            f"accuracy {_percent(metrics['accuracy'])}, best accuracy {_percent(best['accuracy'])}"
        )
        return f"loss {_number(metrics['logloss'], 6)}, {auc}, {accuracy}"

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_line(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")


def _number(value: float | None, digits: int) -> str:
    return "nan" if value is None else f"{value:.{digits}f}"


def _percent(fraction: float | None) -> str:
    return f"{_number(None if fraction is None else 100 * fraction, 3)} %"


def _position(event: Mapping[str, Any], run: RunSummary) -> str:
    epoch, done = run.epoch_at(event["step"])
    return f"{done}/{run.steps_per_epoch} of epoch {epoch}"
