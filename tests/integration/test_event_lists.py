"""Training, evaluations and predictions on events, whose lists are built once into the cache."""

import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.events import NEW_ITEMS, SCHEMA, USERS, events, events_run, grown_events, write_events
from builders.faults import rejects
from builders.interactions import ITEMS, SMALL
from builders.runs import QUIET, check_same_in_two_parts, evaluated_and_predicted, train
from hosts.processes import run_command

import rayrec
from rayrec import storage
from rayrec.training.result import Result


def weights(run: Result) -> str:
    return run.summary["weights_sha256"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Result]:
    """Return the folder, the events and the run of a training."""
    folder = tmp_path_factory.mktemp("events")
    path = write_events(folder)
    return folder, path, train(events_run(path, folder / "runs"))


def test_evaluation_reads_test_lists(trained: tuple[Path, str, Result]) -> None:
    _, path, run = trained
    own = rayrec.evaluate(run.folder, console=QUIET)
    assert (own["rows"], own["set"], own["targets"]) == (USERS, "test", USERS)
    again = rayrec.evaluate(run.folder, path, console=QUIET)
    assert (own.pop("training_rows"), again.pop("training_rows")) == (0, None)
    assert again == own


def test_popularity_is_measured_on_test_lists(trained: tuple[Path, str, Result]) -> None:
    _, _, run = trained
    lists = events().sort_values(["user", "time"]).groupby("user")["item"].agg(list)
    counts = Counter(item for items in lists for item in items[:-2])
    recalls = []
    for *history, target in lists:
        others = [counts[item] for item in {*counts} - {*history, target}]
        above = sum(count > counts[target] for count in others)
        ties = 1 + sum(count == counts[target] for count in others)
        places = range(above, above + ties)
        recalls.append(sum(place < 5 for place in places) / ties)
    (popularity,) = rayrec.evaluate(run.folder, console=QUIET)["baselines"]
    assert popularity["recall_at_5"] == pytest.approx(np.mean(recalls))


def test_predictions_name_users(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    _, path, run = trained
    _, scores = evaluated_and_predicted(run.folder, path, tmp_path / "scores")
    assert sorted(scores["user"].to_pylist()) == sorted({*map(str, range(USERS))})
    assert len(scores["items"][0]) == SMALL["next_item"]["k"]
    assert {*scores["items"][0].as_py()} <= {*range(100, 100 + ITEMS)}


def test_lists_built_before_train_alike(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    _, path, run = trained
    rayrec.sequences(
        path,
        out=str(tmp_path / "lists"),
        schema=SCHEMA,
        console=QUIET,
    )
    lists = str(tmp_path / "lists")
    assert weights(train(events_run(lists, tmp_path / "runs"))) == weights(run)
    metrics, scores = evaluated_and_predicted(
        run.folder,
        lists,
        tmp_path / "scores",
    )
    assert (metrics["set"], scores.num_rows) == ("test", USERS)
    other = events_run(lists, tmp_path / "runs", name="other")
    other = other.replace(workload={"schema": {"sequence": {"min_length": 3}}})
    rejects("sequence.min_length of the schema must match 2.*got 3", train, other)


def test_preprocessed_lists_train_alike(tmp_path: Path) -> None:
    frame = events()
    frame["item"] = "film " + frame["item"].astype(str)
    path = write_events(tmp_path, frame)
    ready = str(tmp_path / "ready")
    rows = {"schema": SCHEMA, "min_count": 1, "console": QUIET}
    assert (
        rayrec.preprocess(
            path,
            out=ready,
            format="parquet",
            **rows,
        )["rows"]
        == 3 * USERS
    )
    raw, run = (
        train(events_run(data, tmp_path / "runs", name=name))
        for name, data in (("raw", path), ("ready", ready))
    )
    assert weights(run) == weights(raw)
    assert run.metrics == raw.metrics
    expected = rayrec.evaluate(raw.folder, baselines=("itemknn",), console=QUIET)
    metrics = rayrec.evaluate(run.folder, baselines=("itemknn",), console=QUIET)
    assert metrics["baselines"] == expected["baselines"]
    scores = [
        evaluated_and_predicted(each.folder, path, tmp_path / str(number))[1]
        for number, each in enumerate((raw, run))
    ]
    assert scores[0].equals(scores[1])
    assert scores[0]["items"][0][0].as_py().startswith("film ")


def test_vocabulary_counts_training_items(
    trained: tuple[Path, str, Result],
    tmp_path: Path,
) -> None:
    _, path, run = trained
    options = {"schema": SCHEMA, "min_count": 1, "console": QUIET}
    counted = rayrec.vocabulary(path, out=str(tmp_path / "counted"), **options)
    assert (counted["rows"], counted["hash"]) == (USERS, run.summary["preprocessor"])
    grown = write_events(tmp_path, grown_events())
    out = str(tmp_path / "extended")
    extended = rayrec.vocabulary(grown, out=out, extend=run.folder, console=QUIET)
    assert extended["rows"] == USERS + 2 * USERS
    assert (extended["kept"]["item"], extended["appended"]["item"]) == (ITEMS, NEW_ITEMS)


def test_rows_in_memory_train_alike(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    *_, run = trained
    result = rayrec.train(
        events_run(None, tmp_path / "runs"),
        data=events(),
        console=QUIET,
    )
    assert weights(result) == weights(run)
    metrics = rayrec.evaluate(run.folder, events(), console=QUIET)
    assert (metrics["set"], metrics["rows"]) == ("test", USERS)
    rayrec.predict(
        run.folder,
        events(),
        out=str(tmp_path / "scores"),
        console=QUIET,
    )
    assert pq.read_table(tmp_path / "scores").num_rows == USERS


LOSSES = [
    ("sasrec", "gbce"),
    ("sasrec", "bce"),
    ("sasrec", "in_batch"),
    ("sasrec", "full"),
    ("hstu", "ccl"),
    ("fuxi", "sampled"),
]


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("esasrec", "mixed"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in LOSSES),
    ],
)
def test_resumed_run_has_equal_weights(model: str, loss: str, tmp_path: Path) -> None:
    """From within an epoch on, with dropout and random items."""
    network = {"class": model, "loss": loss, "negatives": 16, "dropout": 0.1}
    workload = {"model": network, "schedule": {"decay_fraction": 0.0}}
    path = write_events(tmp_path)
    config = events_run(
        path,
        tmp_path / "runs",
        5,
        batch_size=24,
        workload=workload,
    )
    # The last weights, since a run in two parts has more evaluations to choose from
    config = config.replace(early_stopping={"patience": 0})
    check_same_in_two_parts(config, train(config, name="whole"), steps=2)


def test_lists_are_built_once(trained: tuple[Path, str, Result]) -> None:
    folder, path, run = trained
    built = [*(folder / "runs" / ".cache" / "sequences").glob("*/sequences.json")]
    assert len(built) == 1
    before = built[0].stat().st_mtime_ns
    assert weights(
        train(
            events_run(
                path,
                folder / "runs",
                name="again",
            )
        )
    ) == weights(run)
    assert built[0].stat().st_mtime_ns == before


def test_edited_log_replaces_older_lists(tmp_path: Path) -> None:
    path = write_events(tmp_path)
    train(events_run(path, tmp_path / "runs"))
    with open(path, "a") as file:
        print("900,100,1800000000", file=file)
    run = train(events_run(path, tmp_path / "runs", name="later"))
    assert len([*(tmp_path / "runs" / ".cache" / "sequences").glob("*/sequences.json")]) == 1
    _, scores = evaluated_and_predicted(run.folder, path, tmp_path / "scores")
    assert scores.num_rows == USERS + 1


_KILLED = """
import os, signal, sys
from rayrec.data.sequences import build
from rayrec.__main__ import main
def killed(task, *, job):
    os.kill(os.getpid(), signal.SIGKILL)
build.{phase} = killed
sys.argv[0] = "rayrec"
main()
"""


@pytest.mark.parametrize("phase", ["spill_events", "write_lists", "count_items"])
def test_run_killed_in_build_resumes(
    phase: str,
    trained: tuple[Path, str, Result],
    tmp_path: Path,
) -> None:
    _, path, run = trained
    config = events_run(path, tmp_path / "runs")
    storage.write_bytes(str(tmp_path / "run.yaml"), config.to_yaml().encode())
    code = _KILLED.format(phase=phase)
    words = ("train", "next_item", "--config", str(tmp_path / "run.yaml"), "-q")
    run_command(sys.executable, "-c", code, *words, status=-signal.SIGKILL)
    assert not [*(tmp_path / "runs" / ".cache" / "sequences").glob("*/sequences.json")]
    assert weights(train(config)) == weights(run)


def test_other_rows_to_evaluate_are_rejected(tmp_path: Path) -> None:
    path = write_events(tmp_path)
    config = events_run(path, tmp_path / "runs", eval_data={"path": path})
    rejects("eval_data.path: must be None with events", train, config)


def test_invalid_events_end_run(tmp_path: Path) -> None:
    path = write_events(tmp_path)
    with open(path, "a") as file:
        print(",100,1800000000", file=file)
    config = events_run(path, tmp_path / "runs")
    rejects(
        "more than max_bad_fraction.*a value is missing in column user",
        train,
        config,
    )
    train(config.replace(max_bad_fraction=0.01))
    rejects(
        "1 events are invalid, more than max_bad_fraction",
        train,
        config.replace(name="strict"),
    )
