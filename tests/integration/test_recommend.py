"""Recommendations of trained models: in files, over HTTP and from exports, against brute force."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.click_models import make_app, make_model
from builders.events import events, events_run, grown_events, write_events
from builders.faults import rejects
from builders.interactions import ITEMS, LENGTH, LISTS, small, write_log
from builders.recommendations import (
    ITEM_TEXTS,
    post_recommend,
    recommend,
    text_lists,
    write_items,
)
from builders.requests import ask, request, score
from builders.runs import QUIET, export, train

import rayrec
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.inference.export.items import ITEM_IDS, ITEM_VECTORS
from rayrec.inference.model import open_served
from rayrec.schema import Feature
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.control import DesiredState, ModelSource
from rayrec.serve.counters import Counters
from rayrec.serve.recommendations import RecommendBody, RequestRecommender
from rayrec.serve.replica_models import ReplicaModels
from rayrec.serve.requests import RequestError
from rayrec.workloads.recsys.items.recommender import Recommender, TopItems

pytestmark = pytest.mark.usefixtures("own_cache")

LISTS_OF_USERS = text_lists(3, 80)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoint of a next-item model of items with texts."""
    folder = tmp_path_factory.mktemp("recommend")
    log = write_items(folder / "log" / "log.parquet", LISTS_OF_USERS)
    return train(small("next_item", log, folder, 20)).checkpoint


@pytest.fixture(scope="module")
def app(checkpoint: str) -> ScoringApp:
    return make_app(open_served(checkpoint))


def brute_force(checkpoint: str, history: list[str], left_out: set[str]) -> dict[str, float]:
    """Return the score of each item that is not left out, by the network's answer with all."""
    answer = recommend(
        make_app(open_served(checkpoint)),
        [{"history": history}],
        exclude_seen=False,
        k=1000,
    )
    found = dict(zip(answer["items"][0], answer["scores"][0], strict=True))
    return {item: value for item, value in found.items() if item not in left_out}


def test_answers_have_ids_of_log(checkpoint: str, app: ScoringApp) -> None:
    answer = recommend(app, [{"history": LISTS_OF_USERS[0]}], k=1000, exclude_seen=False)
    assert sorted(answer["items"][0]) == sorted(set(chain(*LISTS_OF_USERS)))
    assert answer["scores"][0] == sorted(answer["scores"][0], reverse=True)
    served = open_served(checkpoint)
    assert (answer["model"], answer["fallback"]) == (served.version, [None])
    scored = score(app, {"rows": [{"item": LISTS_OF_USERS[0]}]})
    assert scored["items"][0] == answer["items"][0][:5]


@pytest.mark.parametrize("keep_seen", [False, True])
def test_predictions_equal_answers(checkpoint: str, keep_seen: bool, tmp_path: Path) -> None:
    """Lists are longer than the model reads, and all of their items are left out."""
    later = [*text_lists(9, 40), [], ["new"]]
    log = write_items(
        tmp_path / "later" / "log.parquet",
        later,
        user=list(range(42)),
    )
    out = tmp_path / "scores"
    options = {"k": 7, "exclude_seen": not keep_seen, "keep": ("user",), "batch_rows": 16}
    rayrec.predict(checkpoint, log, out=str(out), console=QUIET, **options)
    found = pq.read_table(out).sort_by("row")
    assert found.schema.field("items").type.value_type == pa.large_string()
    assert found["user"].to_pylist() == list(range(42))
    answer = recommend(
        make_app(open_served(checkpoint)),
        [{"history": items} for items in later[:40]],
        k=7,
        exclude_seen=not keep_seen,
    )
    assert found["items"].to_pylist()[:40] == answer["items"]
    for row in range(40):
        assert found["scores"][row].as_py() == pytest.approx(answer["scores"][row], abs=1e-5)
        assert len(answer["items"][row]) == min(7, 35 - len(set(later[row])) * (not keep_seen))
    seen = [set(items) & set(later[row]) for row, items in enumerate(answer["items"])]
    assert any(seen) == keep_seen


def test_items_of_preprocessed_lists_are_left_out(checkpoint: str, tmp_path: Path) -> None:
    lists = text_lists(9, 12, longest=LENGTH)
    log = write_items(tmp_path / "later" / "log.parquet", lists)
    rayrec.preprocess(
        log,
        out=str(tmp_path / "rows"),
        format="parquet",
        preprocessor=f"{checkpoint}/preprocessor",
        schema=Preprocessor.load(checkpoint).schema,
        console=QUIET,
    )
    tables = []
    for path in (log, str(tmp_path / "rows")):
        rayrec.predict(checkpoint, path, out=f"{path}-scores", k=9, batch_rows=5, console=QUIET)
        tables.append(pq.read_table(f"{path}-scores"))
    assert tables[0]["items"] == tables[1]["items"]


def test_best_items_equal_brute_force(checkpoint: str, app: ScoringApp) -> None:
    history = ["größe 3", "8", "größe 3", "größe 20"]
    expected = brute_force(checkpoint, history, {*history, "größe 1"})
    answer = recommend(app, [{"history": history}], k=6, exclude=[["größe 1", "nobody's"]])
    assert answer["items"][0] == list(expected)[:6]
    among = ["größe 1", 9, "größe 5", "nobody's", 8]
    for lists in (among, [among]):
        answer = recommend(app, [{"history": history}], among=lists)
        allowed = {"größe 1", "9", "größe 5"}
        order = [
            item
            for item in brute_force(
                checkpoint,
                history,
                set(),
            )
            if item in allowed
        ]
        assert answer["items"][0] == order
    assert recommend(app, [{"history": history}], among=[])["items"] == [[]]
    rows = [{"history": history}, {"history": history}]
    lists_of_rows = recommend(app, rows, among=[["größe 5"], None])["items"]
    assert lists_of_rows == [["größe 5"], []]


def test_text_and_number_are_one_item(app: ScoringApp) -> None:
    answers = [
        recommend(app, [{"history": [item, "größe 2"]}], exclude=[[other]])
        for item, other in ((8, 9), ("8", "9"), (8.0, "9"))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert not {"8", "9", "größe 2"} & set(answers[0]["items"][0])


def test_integers_are_answered_as_integers(tmp_path: Path) -> None:
    run = train(
        small(
            "next_item",
            write_log(tmp_path / "log", "next_item"),
            tmp_path,
            3,
        )
    )
    found = Preprocessor.load(run.checkpoint).names
    assert found is not None
    assert found.texts is None
    assert not (Path(run.checkpoint) / "preprocessor" / "names.arrow").exists()
    answer = recommend(make_app(open_served(run.checkpoint)), [{"history": ["100", 101]}], k=1000)
    assert sorted(answer["items"][0]) == list(range(102, 100 + ITEMS))


def test_popular_items_replace_answers(app: ScoringApp) -> None:
    """Frequent among the items that the model reads, the newest of each list."""
    counts = Counter(chain(*(items[-LENGTH:] for items in LISTS_OF_USERS)))
    answer = recommend(app, [{}, {"history": ["new"]}, {"history": ["8"]}], k=4, exclude=[[]] * 3)
    assert answer["fallback"] == ["popularity", "popularity", None]
    by_count = sorted(counts.values(), reverse=True)[:4]
    assert [counts[item] for item in answer["items"][0]] == by_count
    assert answer["scores"][0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    best = answer["items"][0][0]
    without = recommend(app, [{}], k=3, exclude=[[best]])
    assert without["items"][0] == answer["items"][0][1:]
    allowed = recommend(app, [{}], k=3, among=["größe 29", best])
    assert allowed["items"][0][:1] == [best]


# -- histories


def test_users_have_histories(checkpoint: str, tmp_path: Path) -> None:
    """Of several files, with users as texts and integers, and lists that are longer than the model
    reads.
    """
    lists = text_lists(5, 30, longest=20)
    users = [f"ü{number}" for number in range(28)] + ["7", "8"]
    folder = tmp_path / "histories"
    write_items(folder / "part-0.parquet", lists[:20], user=users[:20])
    write_items(
        folder / "part-1.parquet",
        [*lists[20:], []],
        user=[*users[20:], "empty"],
    )
    app = make_app(open_served(checkpoint), histories=str(folder))
    named = recommend(app, [{"user": user} for user in users[:28]] + [{"user": 7}], k=5)
    given = recommend(app, [{"history": items} for items in lists[:29]], k=5)
    assert named["items"] == given["items"]
    assert named["fallback"] == [None] * 29
    cold = recommend(app, [{"user": "nobody"}, {"user": "empty"}, {"user": None}], k=5)
    assert cold["fallback"] == ["popularity"] * 3
    both = recommend(app, [{"user": users[0], "history": ["8"]}], k=5)
    assert both == recommend(app, [{"history": ["8"]}], k=5)


def test_empty_history_has_precedence(checkpoint: str, tmp_path: Path) -> None:
    path = write_items(
        tmp_path / "histories" / "part.parquet",
        [["8"]],
        user=["a"],
    )
    app = make_app(open_served(checkpoint), histories=path)
    answer = recommend(app, [{"user": "a", "history": []}, {"user": "a", "history": None}])
    assert answer["fallback"] == ["popularity", None]


def test_list_names_no_user(checkpoint: str, tmp_path: Path) -> None:
    path = write_items(
        tmp_path / "histories" / "part.parquet",
        [["8"]],
        user=["a"],
    )
    app = make_app(open_served(checkpoint), histories=path)
    reply = post_recommend(app, {"rows": [{"user": ["a"]}]})
    assert reply.status == 400
    assert "row 0: user is a list, not a string" in reply.json()["error"]["message"]


def test_items_of_users_are_limited(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_items(
        tmp_path / "histories" / "part.parquet",
        [["8", "9"] * 2],
        user=["a"],
    )
    app = make_app(open_served(checkpoint), histories=path)
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_IDS", 3)
    assert recommend(app, [{"user": "a"}])["fallback"] == [None]
    reply = post_recommend(app, {"rows": [{"user": "a"}] * 2})
    assert reply.status == 413
    assert "the histories of these users have 8 items" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param({"user": ["a", "a"]}, "a user has several rows", id="twice"),
        pytest.param({"who": ["a", "b"]}, "must have a column user .* got item, who", id="user"),
    ],
)
def test_unusable_histories_are_rejected(
    checkpoint: str,
    columns: Any,
    message: str,
    tmp_path: Path,
) -> None:
    path = write_items(
        tmp_path / "histories" / "part.parquet",
        [["8"], ["9"]],
        **columns,
    )
    models = ReplicaModels(open_served, Counters(), histories=path)
    models.set_desired(DesiredState(0, ModelSource(0, checkpoint)))
    with pytest.raises(AssertionError, match=message):
        assert not models.switch(), models.status().cause


def test_histories_need_retrieval_model(tmp_path: Path) -> None:
    path = write_items(
        tmp_path / "histories" / "part.parquet",
        [["8"]],
        user=["a"],
    )
    model = make_model()
    models = ReplicaModels(
        {model.source: model}.__getitem__,
        Counters(),
        histories=path,
    )
    models.set_desired(DesiredState(0, ModelSource(0, model.source)))
    assert "histories: the model is of a log in Criteo's format" in models.switch()


# -- aligned lists


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> ScoringApp:
    """Model of items with an action each."""
    folder = tmp_path_factory.mktemp("actions")
    actions = [["buy" if len(item) % 2 else "view" for item in items] for items in LISTS_OF_USERS]
    log = write_items(
        folder / "log" / "log.parquet",
        LISTS_OF_USERS,
        action=actions,
    )
    action = Feature(name="action", max_length=LENGTH, aligned_with="item")
    schema = LISTS.replace(
        sparse=("item", "action"),
        lists=("item", "action"),
        features=(*LISTS.features, action),
    )
    config = small(
        "next_item",
        log,
        folder,
        3,
    ).replace(workload={"schema": schema})
    return make_app(open_served(train(config).checkpoint))


def test_aligned_lists_are_read_beside_history(shop: ScoringApp) -> None:
    items = ITEM_TEXTS[: LENGTH + 2]  # More than the model reads
    actions = ["buy", "view"] * (LENGTH // 2 + 1)
    answer = recommend(shop, [{"history": items, "action": actions}], k=5, exclude_seen=False)
    scored = score(shop, {"rows": [{"item": items, "action": actions}]})
    assert (answer["items"], answer["scores"]) == (scored["items"], scored["scores"])
    other = recommend(shop, [{"history": items, "action": actions[::-1]}], k=5, exclude_seen=False)
    assert other["scores"] != answer["scores"]
    reply = post_recommend(shop, {"rows": [{"history": items, "action": actions[1:]}]})
    assert "categories are not at the places" in reply.json()["error"]["message"]


def test_rows_without_aligned_lists_are_answered_alike(shop: ScoringApp) -> None:
    rows = [{"history": items} for items in LISTS_OF_USERS[:3]]
    rows.append({"history": ["8", "9"], "action": ["buy", "view"]})
    alone = [recommend(shop, [row], k=5)["items"][0] for row in rows]
    assert recommend(shop, rows, k=5)["items"] == alone


# -- two towers


def test_users_columns_are_scored_by_two_towers(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower")
    run = train(small("two_tower", log, tmp_path, 5))
    app = make_app(open_served(run.checkpoint))
    rows = [{"user": 3}, {"user": "3", "history": [101, 102]}, {"user": 999}]
    answer = recommend(app, rows, k=1000)
    assert [len(items) for items in answer["items"]] == [24, 22, 24]
    assert answer["fallback"] == [None, None, "popularity"]
    without = [item for item in answer["items"][0] if item not in (101, 102)]
    assert answer["items"][1] == without
    pq.write_table(pa.table({"user": [3, 3], "item": [101, 102]}), tmp_path / "rows.parquet")
    rayrec.predict(
        run.checkpoint,
        str(tmp_path / "rows.parquet"),
        out=str(tmp_path / "out"),
        k=3,
        keep=("user",),
        console=QUIET,
    )
    found = pq.read_table(tmp_path / "out")
    assert found["items"].to_pylist() == [answer["items"][0][:3]] * 2
    assert found["user"].to_pylist() == [3, 3]
    vectors = rayrec.predict(
        run.checkpoint,
        log,
        out=str(tmp_path / "vectors"),
        console=QUIET,
    )
    assert vectors["rows"] == len(pq.read_table(log))
    table = pq.read_table(tmp_path / "vectors")
    scores = (np.array(table["user"].to_pylist()) @ np.array(table["item"].to_pylist()).T)[0]
    best = pq.read_table(log)["item"][int(scores.argmax())].as_py()
    assert table["items"][0][0].as_py() == best


def test_numbers_but_no_items_are_input_of_two_towers(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower")
    table = pq.read_table(log)
    ages = pa.array(np.arange(len(table)) % 50)
    pq.write_table(table.append_column("age", ages), f"{log}/log.parquet")
    config = small("two_tower", log, tmp_path, 1)
    schema = config.workload.schema.replace(dense=("age",))
    app = make_app(open_served(train(config.replace(workload={"schema": schema})).checkpoint))
    answer = recommend(app, [{"age": 30}, {"item": 101}, {"user": 999}, {"user": 3}])
    assert answer["fallback"] == [None, "popularity", "popularity", None]


def test_items_with_several_features_are_not_recommended(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower")
    table = pq.read_table(log)
    kind = pa.array(table["item"].to_numpy() % 3)
    pq.write_table(table.append_column("kind", kind), f"{log}/log.parquet")
    schema = small("two_tower", log, tmp_path, 1).workload.schema
    config = small("two_tower", log, tmp_path, 1).replace(
        workload={
            "schema": schema.replace(sparse=("user", "item", "kind")),
            "model": {"item_features": ("item", "kind")},
        }
    )
    run = train(config)
    reply = post_recommend(make_app(open_served(run.checkpoint)), {"rows": [{"user": 3}]})
    assert reply.status == 404
    assert "items have more features than item" in reply.json()["error"]["message"]
    rejects(
        "k: the model's items have more features than item",
        rayrec.predict,
        run.checkpoint,
        log,
        out=str(tmp_path / "out"),
        k=3,
    )


# -- requests


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": []}, "the request has no rows"),
        ({"rows": [{}], "n": 3}, "unknown field n; fields are rows, k, exclude_seen"),
        ({"rows": [3]}, "row 0 is a number, not an object"),
        ({"rows": [{"history": "8"}]}, "row 0: history is a string, not a list"),
        ({"rows": [{}, {"history": [8, 1.5]}]}, "row 1: history is a number that is not an int"),
        ({"rows": [{"item": ["8"]}]}, "row 0 has a column item; send its items as history"),
        ({"rows": [{"age": 3}]}, "row 0 has an unknown column age"),
        ({"rows": [{}], "k": 0}, "k must be an integer from 1 to 10000"),
        ({"rows": [{}], "k": 10_001}, "k must be an integer from 1 to 10000"),
        ({"rows": [{}], "k": True}, "k must be an integer"),
        ({"rows": [{}], "exclude_seen": 1}, "exclude_seen must be true or false"),
        ({"rows": [{}], "exclude": ["8"]}, "exclude must have a list of ids for each row"),
        ({"rows": [{}], "exclude": [["8"], []]}, "exclude must have a list for each of 1 rows, g"),
        ({"rows": [{}], "among": [["8"], "9"]}, "among must have a list of ids for each row"),
        ({"rows": [{}], "among": "8"}, "among must have a list of ids for each row"),
        ({"rows": [{}], "among": [[{}]]}, "row 0: among is an object, not a string or an integer"),
        (b'{"rows": [{}], "k": 3, "k": 4}', "k occurs twice"),
        (b'{"rows": ', "not JSON"),
    ],
)
def test_bad_request_has_reason(app: ScoringApp, content: Any, message: str) -> None:
    reply = post_recommend(app, content)
    assert reply.status == 400
    assert message in reply.json()["error"]["message"]


def test_limits(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(open_served(checkpoint), max_rows=2, max_k=5)
    assert post_recommend(app, {"rows": [{}] * 3}).status == 413
    assert post_recommend(app, {"rows": [{}], "k": 6}).status == 400
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_IDS", 3)
    reply = post_recommend(app, {"rows": [{"history": ["8", "9"]}], "exclude": [["7", "8"]]})
    assert (reply.status, "4 ids" in reply.json()["error"]["message"]) == (413, True)
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_ANSWERS", 9)
    assert post_recommend(app, {"rows": [{}] * 2, "k": 5}).status == 413


def test_allow_list_of_all_rows_counts_once(
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app(open_served(checkpoint))
    rows = [{"history": ["8"]}, {}, {}]
    among = ["größe 3", "9", "größe 1"]
    expected = recommend(app, rows, among=[among] * 3)
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_IDS", 5)
    assert recommend(app, rows, among=among) == expected
    assert post_recommend(app, {"rows": rows, "among": [among] * 3}).status == 413


def test_other_form_and_method_are_rejected(app: ScoringApp) -> None:
    text = post_recommend(app, b"8", headers={"content-type": "text/csv"})
    assert (text.status, text.json()["error"]["message"]) == (
        415,
        "the content type must be application/json",
    )
    assert ask(app, "GET", "/v1/recommend").status == 405
    assert post_recommend(app, {"rows": [{}]}, query="columns=true").status == 400


def test_click_model_has_no_recommendations() -> None:
    reply = post_recommend(make_app(make_model()), {"rows": [{}]})
    assert reply.status == 404
    assert "without lists of items" in reply.json()["error"]["message"]


def test_token_is_needed(checkpoint: str) -> None:
    app = make_app(open_served(checkpoint), token_digest=b"0" * 32)
    assert post_recommend(app, {"rows": [{}]}).status == 401


def test_document_has_recommendations_of_retrieval_models_only(app: ScoringApp) -> None:
    document = ask(app, "GET", "/openapi.json").json()
    operation = document["paths"]["/v1/recommend"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"rows", "k", "exclude_seen", "exclude", "among"}
    row = body["properties"]["rows"]["items"]
    assert set(row["properties"]) == {"history", "user", "times", "time"}
    answer = document["components"]["schemas"]["Recommendations"]
    assert answer["properties"]["items"]["items"]["items"]["type"] == "string"
    assert set(recommend(app, [{"history": ["8"]}])) == set(answer["required"])
    clicks = ask(make_app(make_model()), "GET", "/openapi.json").json()
    assert "/v1/recommend" not in clicks["paths"]


def test_documented_default_of_k_is_valid(checkpoint: str) -> None:
    app = make_app(open_served(checkpoint), max_k=5)
    document = ask(app, "GET", "/openapi.json").json()
    operation = document["paths"]["/v1/recommend"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["k"]["default"] == len(recommend(app, [{}])["items"][0]) == 5


# -- versions


def at_once(app: ScoringApp, contents: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the answers of requests that are sent together."""

    async def together() -> list[Any]:
        headers = {"content-type": "application/json"}
        sent = [
            request(
                app,
                "POST",
                "/v1/recommend",
                parts=[json.dumps(content).encode()],
                headers=headers,
            )
            for content in contents
        ]
        return [reply.json() for reply in await asyncio.gather(*sent) if reply is not None]

    return asyncio.run(together())


def test_waiting_requests_are_answered_together(app: ScoringApp) -> None:
    """Each with its own k, allow-list and exclusion, and one bad one among them."""
    contents: list[dict[str, Any]] = [
        {"rows": [{"history": lists}], "k": 1 + number % 4}
        for number, lists in enumerate(LISTS_OF_USERS[:12])
    ]
    contents[3] |= {"among": ITEM_TEXTS[:9]}
    contents[5] |= {"exclude_seen": False}
    contents[7] = {"rows": [{"age": 1}]}
    contents[8] |= {"rows": [{}, {"history": ["8"]}], "exclude": [["8"], ["9"]]}
    alone = [post_recommend(app, content).json() for content in contents]

    for one, other in zip(alone, at_once(app, contents), strict=True):
        assert one.get("items") == other.get("items")
        assert one.get("error") == other.get("error")


@pytest.mark.parametrize(("k", "sizes"), [(1, [2]), (100, [1, 1])])
def test_items_of_answers_count_in_batches(
    k: int,
    sizes: list[int],
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = RequestRecommender.answer
    batches = []

    def counted(self: RequestRecommender, bodies: Sequence[RecommendBody]) -> Any:
        batches.append(len(bodies))
        return answer(self, bodies)

    monkeypatch.setattr(RequestRecommender, "answer", counted)
    app = make_app(open_served(checkpoint), max_batch_bytes=2000)
    at_once(app, [{"rows": [{}], "k": k}] * 2)
    assert batches == sizes


def test_requests_are_searched_together_within_bounds(
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the largest k, and by the items of histories."""
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_ANSWERS", 12)
    monkeypatch.setattr("rayrec.serve.recommendations.MAX_IDS", 8)
    found = RequestRecommender(open_served(checkpoint), Counters())
    search = Recommender.top
    searched = []

    def top(self: Recommender, queries: torch.Tensor, k: int, **lists: Any) -> TopItems:
        searched.append((len(queries), k))
        return search(self, queries, k, **lists)

    monkeypatch.setattr(Recommender, "top", top)
    items = ["8", "9"]
    bodies = [
        RecommendBody([{"history": items}], 0, k=12),
        RecommendBody([{"history": items}, {"history": items}], 0, k=3),
        RecommendBody([{"history": items}], 0, k=4),
        RecommendBody([{"history": 3}], 0, k=12),
        RecommendBody([{"history": items * 3}], 0, k=1),
    ]
    answers = found.answer(bodies)
    assert searched == [(1, 12), (3, 4), (1, 1)]
    lengths = [[len(each) for each in answer.items] for answer in answers[:3]]
    assert lengths == [[12], [3, 3], [4]]
    assert isinstance(answers[3], RequestError)


def two_checkpoints(checkpoint: str, folder: Path) -> list[str]:
    log = write_items(folder / "log" / "log.parquet", LISTS_OF_USERS[::-1][:60])
    return [checkpoint, train(small("next_item", log, folder, 8)).checkpoint]


def two_exports(_: str, folder: Path) -> list[str]:
    """Exports of a run on events, and of one that continues from it on a later log."""
    paths = []
    for name, frame in (("old", events()), ("new", grown_events())):
        config = events_run(
            write_events(folder, frame),
            folder / "runs",
            8,
            name=name,
        )
        if paths:
            config = config.replace(init_from=str(folder / "runs" / "old"))
        paths.append(str(folder / f"export-{name}"))
        export(train(config).checkpoint, paths[-1])
    return paths


@pytest.mark.parametrize(
    ("versions", "lists"),
    [
        pytest.param(two_checkpoints, LISTS_OF_USERS[:6], id="checkpoints"),
        pytest.param(
            two_exports,
            [[100, 101], [130, 131], [112, 999]],
            id="exports",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_no_answer_mixes_versions(
    versions: Callable[[str, Path], list[str]],
    lists: list[Any],
    checkpoint: str,
    tmp_path: Path,
) -> None:
    paths = versions(checkpoint, tmp_path)
    rows = [{"history": items} for items in lists]
    expected = {}
    for path in paths:
        answer = recommend(make_app(open_served(path)), rows, k=9)
        expected[answer["model"]] = answer["items"]
    counters = Counters()
    models = ReplicaModels(open_served, counters)
    models.set_desired(DesiredState(0, ModelSource(0, paths[0])))
    assert not models.switch()
    app = ScoringApp(models, counters, config=ServeConfig())
    answers: Counter[str] = Counter()

    async def ask_meanwhile() -> None:
        loop = asyncio.get_running_loop()
        body = json.dumps({"rows": rows, "k": 9}).encode()
        for serial in range(1, 5):
            models.set_desired(DesiredState(serial, ModelSource(serial, paths[serial % 2])))
            switching = loop.run_in_executor(None, models.switch)
            while True:
                is_done = switching.done()
                headers = {"content-type": "application/json"}
                sent = [
                    request(
                        app,
                        "POST",
                        "/v1/recommend",
                        parts=[body],
                        headers=headers,
                    )
                    for _ in range(4)
                ]
                for reply in await asyncio.gather(*sent):
                    assert reply is not None
                    assert reply.status == 200, reply.body
                    answer = reply.json()
                    assert answer["items"] == expected[answer["model"]]
                    answers[answer["model"]] += 1
                if is_done:
                    break
            assert not await switching

    asyncio.run(ask_meanwhile())
    assert answers.keys() == expected.keys()
    assert len(expected) == 2


def test_document_is_of_one_model_in_switch(
    app: ScoringApp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a model without items to one with items, after the first looks at the served one."""
    clicks = make_app(make_model())
    served = chain([clicks._models._serving] * 2, repeat(app._models._serving))
    monkeypatch.setattr(
        ReplicaModels,
        "_serving",
        property(lambda _: next(served)),
        raising=False,
    )
    assert ask(clicks, "GET", "/openapi.json").status == 200


# -- exports and older Preprocessors


def test_export_has_items_and_recommends(checkpoint: str, app: ScoringApp, tmp_path: Path) -> None:
    out = tmp_path / "export"
    export(checkpoint, out)
    ids = pa.ipc.open_file(out / ITEM_IDS).read_all()["id"].to_pylist()
    assert sorted(ids) == sorted(set(chain(*LISTS_OF_USERS)))
    served = open_served(str(out))
    assert served.vectors is not None
    vectors = open_served(checkpoint).scorer.item_vectors()
    assert served.vectors.equal(vectors)
    rows = [{"history": items} for items in LISTS_OF_USERS[:9]]
    answer = recommend(make_app(served), rows)
    assert answer["items"] == recommend(app, rows)["items"]
    path = out / ITEM_VECTORS
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    rejects("vectors.safetensors: damaged", open_served, str(out))


def test_vectors_are_in_memory_once(checkpoint: str) -> None:
    found = open_served(checkpoint).recommender
    assert found.vectors.data_ptr() == found._filled.data_ptr()
    assert found.vectors.shape == (found.num_candidates, 16)


def test_older_preprocessor_answers_tokens(
    checkpoint: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = open_served(checkpoint)
    old = Preprocessor(**{**vars_of(served.preprocessor), "names": None})
    with caplog.at_level(logging.WARNING):
        app = make_app(
            type(served)(
                old,
                "old",
                "old",
                "checkpoint",
                served.scorer,
            )
        )
    assert "does not have the texts of column item" in caplog.text
    answer = recommend(app, [{"history": ["größe 3"]}], k=3)
    named = recommend(make_app(served), [{"history": ["größe 3"]}], k=3)
    assert all(type(item) is int for item in answer["items"][0])
    assert answer["scores"] == named["scores"]
    old.save(str(tmp_path / "old"))
    served.preprocessor.save(str(tmp_path / "new"))
    assert Preprocessor.load(str(tmp_path / "old")).hash() == served.preprocessor.hash()


def vars_of(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return the fields of a Preprocessor, without cached values."""
    return {name: getattr(preprocessor, name) for name in Preprocessor.__dataclass_fields__}


def test_damaged_texts_are_rejected(checkpoint: str, tmp_path: Path) -> None:
    folder = tmp_path / "preprocessor"
    Preprocessor.load(checkpoint).save(str(folder))
    content = (folder / "names.arrow").read_bytes()
    (folder / "names.arrow").write_bytes(content.replace("größe 3".encode(), "größe 4".encode()))
    rejects("names.arrow: damaged", Preprocessor.load, str(folder))
    (folder / "names.arrow").unlink()
    rejects("names.arrow: not found", Preprocessor.load, str(folder))
