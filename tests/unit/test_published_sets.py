"""Published next-item and retrieval sets in small: their formats are read, and the benchmark's
settings train and evaluate by their protocols.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders.faults import rejects
from builders.runs import QUIET
from builders.scripts import script

import rayrec
from rayrec.models.base import ModelInputs
from rayrec.workloads.recsys.workload import ClickWorkload

pytestmark = pytest.mark.usefixtures("own_cache")

sequences = script("benchmarks", "sequences_benchmark")
USERS = 60
COLD = 6
"""Users whose last item nobody else has."""
RUN_BY_DEFAULT = ("beauty", "bert4rec-ml-1m-sampled")


def items_of(user: int) -> list[int]:
    items = [1 + (user + place) % 30 for place in range(5 + user % 4)]
    return items if user % 10 else [*items, 100 + user]


def write_lines(path: Path, lists: dict[int, Sequence[int]]) -> None:
    """Write lines of a user and her items."""
    lines = [" ".join(map(str, [user, *items])) for user, items in lists.items()]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with all sets."""
    folder = tmp_path_factory.mktemp("sets")
    lists = {user: items_of(user) for user in range(USERS)}
    for name in ("Beauty", "Sports_and_Outdoors", "Toys_and_Games"):
        write_lines(folder / f"{name}.txt", lists)
    pairs = [f"{user} {item}\n" for user, items in lists.items() for item in items]
    for name in ("beauty", "ml-1m"):
        (folder / "bert4rec" / f"{name}.txt").parent.mkdir(exist_ok=True)
        (folder / "bert4rec" / f"{name}.txt").write_text("".join(pairs))
    gowalla = folder / "Gowalla_m1"
    gowalla.mkdir()
    write_lines(gowalla / "train.txt", {user: items[:-2] for user, items in lists.items()})
    write_lines(gowalla / "test.txt", {user: items[-2:] for user, items in lists.items()})
    (gowalla / "user_list.txt").write_text("org_id remap_id\n7 0\n")
    return str(folder)


def folder_of(name: str, files: str) -> str:
    """Return the folder of a set's files. Two have names that differ in case alone."""
    return f"{files}/bert4rec" if name.startswith("bert4rec") else files


@pytest.mark.parametrize(
    "name",
    [
        name if name in RUN_BY_DEFAULT else pytest.param(name, marks=pytest.mark.extended)
        for name in sequences.SETS
    ],
)
def test_published_set_trains_and_evaluates(name: str, files: str, tmp_path: Path) -> None:
    published = sequences.SETS[name]
    config = sequences.published_config(name, folder_of(name, files), str(tmp_path), seed=1)
    run = rayrec.train(config.replace(steps=2, epochs=1), console=QUIET)
    test = rayrec.evaluate(run.folder, console=QUIET)
    per_user = 2 if name.startswith("gowalla") else 1
    assert (test["set"], test["rows"], test["targets"]) == ("test", USERS, per_user * USERS)
    assert test["unknown_targets"] >= COLD
    assert 0 < run.summary["validation"][f"ndcg_at_{published.k}"] <= 1
    assert {f"recall_at_{published.k}", f"ndcg_at_{published.k}"} <= test.keys()


@pytest.mark.parametrize(
    ("name", "longest", "metric"),
    [
        ("toys", 51, "recall_at_10"),
        ("bert4rec-beauty", 51, "ndcg_at_10"),
        ("bert4rec-ml-1m", 201, "ndcg_at_10"),
        ("gowalla-simplex", 1001, "recall_at_20"),
    ],
)
def test_settings_follow_protocol(name: str, longest: int, metric: str, tmp_path: Path) -> None:
    config = sequences.published_config(name, "files", str(tmp_path), seed=0)
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    inputs = ModelInputs.from_schema(workload.schema)
    assert dict(inputs.lists)["item"] == longest  # One more than inputs
    assert workload.objective({}) == metric
    assert workload.schedule.decay_fraction == 0
    rates = {workload.sparse_optimizer.learning_rate, workload.dense_optimizer.learning_rate}
    assert rates == {0.001}


def test_benchmark_prints_row_of_published_set(
    files: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["sequences", "--sets", "gowalla-youtube-dnn", "--files", files],
    )
    sequences.main(quick=True)
    row = json.loads(capsys.readouterr().out)
    assert (row["peer_ndcg_at_20"], row["peer_recall_at_20"]) == (0.1473, 0.1754)
    assert row["ratio"] == pytest.approx(row["ndcg_at_20"] / 0.1473, abs=1e-3)
    assert row["least_ndcg_at_20"] == pytest.approx(row["ndcg_at_20"], abs=1e-4)
    monkeypatch.setattr(sys, "argv", ["sequences", "--sets", "toys"])
    rejects("FOLDER with Toys_and_Games.txt is needed for --sets toys", sequences.main, quick=True)
