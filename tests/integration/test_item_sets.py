"""Models of item sets go the whole road on lines of users: split by files, train, evaluate,
predict, export, recommend.
"""

from pathlib import Path
from typing import Any

import pytest
from builders.click_models import make_app
from builders.faults import rejects
from builders.recommendations import recommend
from builders.runs import (
    LEAN,
    QUIET,
    check_same_in_two_parts,
    evaluated_and_predicted,
    export,
    short_run,
    train,
)

import rayrec
from rayrec import recipes
from rayrec.inference.model import open_served
from rayrec.schema import Schema, SequenceColumns, SequenceSplit
from rayrec.workloads.base import TrainConfig

pytestmark = pytest.mark.usefixtures("own_cache")

USERS = 60
ITEMS = 40
"""Users have items with their own remainder of GROUPS."""
GROUPS = 4
SCHEMA = Schema(
    label=None,
    sequence=SequenceColumns(
        user="user",
        item="item",
        max_length=10,
        user_input=True,
    ),
    split=SequenceSplit(kind="files", validation="10%"),
    format="user_items",  # Lines of one length could be a table
)
MODELS = {
    "youtube_dnn": {},
    "simplex": {"pooling": "mean"},
    "simplex with attention": {"pooling": "attention"},
}


def items_of(user: int) -> list[int]:
    """Return nine of the ten items of a user's group, in another order for each."""
    items = range(user % GROUPS, ITEMS, GROUPS)
    start = user // GROUPS
    return [items[(start + 3 * place) % len(items)] for place in range(9)]


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Folder with the last two items of each user in another file."""
    folder = tmp_path / "log"
    folder.mkdir()
    for name, part in (("train", slice(7)), ("test", slice(7, 9))):
        lines = [" ".join(map(str, [user, *items_of(user)[part]])) for user in range(USERS)]
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    return str(folder)


def config_of(name: str, log: str, folder: Path, steps: int, **changes: Any) -> TrainConfig:
    model = {
        "class": name.partition(" ")[0],
        "embedding_dim": 16,
        "negatives": 64,
        "k": 5,
        **MODELS[name],
    }
    rates = {f"{kind}_optimizer": {"learning_rate": 0.02} for kind in ("sparse", "dense")}
    workload = {"model": model, "schedule": {"decay_fraction": 0.0}, **rates}
    config = recipes.next_item(log, SCHEMA)
    fields = {"batch_size": 20, "min_steps_per_epoch": 1, "workload": workload, **LEAN}
    return short_run(config, folder / "runs", steps, **{**fields, **changes})


@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_item_set_model_trains_exports_and_recommends(
    name: str,
    log: str,
    tmp_path: Path,
) -> None:
    config = config_of(name, log, tmp_path, 80, checkpoint={"every": 40})
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=40)

    metrics = rayrec.evaluate(whole.folder, k=(1, 5), console=QUIET)
    assert (metrics["set"], metrics["rows"], metrics["targets"]) == ("test", USERS, 2 * USERS)
    # Three items of the group are left: two targets, and one that the user never has
    assert metrics["recall_at_5"] > 0.75  # 0.15 at random
    assert metrics["recall_at_1"] <= 0.5
    again, predicted = evaluated_and_predicted(
        whole.folder,
        log,
        tmp_path / "scores",
    )
    assert again["ndcg_at_5"] == pytest.approx(metrics["ndcg_at_5"], rel=1e-12)
    users = [int(user) for user in predicted["user"].to_pylist()]
    items = predicted["items"].to_pylist()
    assert not any({*items_of(user)} & {*row} for user, row in zip(users, items, strict=True))
    firsts = [row[0] % GROUPS == user % GROUPS for user, row in zip(users, items, strict=True)]
    assert sum(firsts) > 0.6 * USERS

    report = export(whole.checkpoint, tmp_path / "plain")
    assert report["program_parity"]["max_logit_difference"] < 1e-4
    rows = [{"user": user, "history": items_of(user)} for user in users[:8]]
    for path in (whole.checkpoint, f"{tmp_path}/plain"):
        answer = recommend(make_app(open_served(path)), rows, k=5)
        assert answer["items"] == items[:8]
        assert answer["fallback"] == [None] * 8


def test_user_vector_answers_request_without_history(log: str, tmp_path: Path) -> None:
    config = config_of("simplex", log, tmp_path, 80)
    run = train(config.replace(workload={"model": {"user_weight": 1.0}}))
    app = make_app(open_served(run.checkpoint))
    rows = [{"user": 6}, {"user": "6", "history": []}, {"user": "nobody"}, {}]
    answer = recommend(app, rows, k=5)
    assert answer["fallback"] == [None, None, "popularity", "popularity"]
    assert sum(item % GROUPS == 2 for item in answer["items"][0]) >= 4
    assert answer["items"][1] == answer["items"][0]


def test_simplex_without_column_of_users_is_rejected(log: str, tmp_path: Path) -> None:
    config = config_of("simplex", log, tmp_path, 1).replace(
        workload={"schema": {"sequence": {"user_input": False}}}
    )
    rejects(
        "Set user_input: true of its sequence, or user_weight 0",
        train,
        config,
    )
