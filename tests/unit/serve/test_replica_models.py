"""Models come and go while requests are answered: the swap, the way back, the shadow, and what the coordinator decides."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from asgi_client import ask, post, post_async
from ports import free_ports
from served_click_model import ANY, logits_of, make_model, make_preprocessor, row_text

import rayrec.api
from rayrec.checkpoint import folder_of
from rayrec.config import InputError
from rayrec.inference.model import ServedModel
from rayrec.observe.console import Console
from rayrec.serve import client, deployment, server
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.coordinator import GONE_S, Change, CoordinatorState
from rayrec.serve.counters import Counters
from rayrec.serve.replica_models import Configured, ReplicaModels, Source, Status, Wanted
from rayrec.serve.server import choose

MODELS = {name: make_model(seed=number) for number, name in enumerate("abc")}
TEXT = b"".join(row_text(number) for number in range(20))


def load(path: str) -> ServedModel:
    if path not in MODELS:
        raise InputError(f"{path}: damaged")
    return MODELS[path]


def _host(*, load: object = load) -> tuple[ReplicaModels, Counters]:
    counters = Counters()
    models = ReplicaModels(load, counters)  # type: ignore[arg-type]
    models.apply(Wanted(0, Source(0, "a")))
    return models, counters


def test_a_swap_under_load_loses_no_request_and_mixes_no_models() -> None:
    def slowly(path: str) -> ServedModel:
        time.sleep(0.2)
        return load(path)

    models, counters = _host(load=slowly)
    app = ScoringApp(models, counters, config=ServeConfig())
    expected = {model.version: logits_of(model, TEXT) for model in MODELS.values()}
    done = threading.Event()

    def swap() -> None:
        for serial, name in enumerate("bcabc", start=1):
            models.apply(Wanted(serial, Source(serial, name)))
        done.set()

    async def load_it() -> list[dict[str, object]]:
        async def client() -> list[dict[str, object]]:
            found = []
            while not done.is_set():
                reply = await post_async(app, TEXT)
                assert reply.status == 200
                found.append(reply.json())
            return found

        threading.Thread(target=swap).start()
        return [answer for answers in await asyncio.gather(*(client() for _ in range(8))) for answer in answers]

    answers = asyncio.run(load_it())
    assert {answer["model"] for answer in answers} == set(expected)
    for answer in answers:
        logits = np.array(answer["logits"], np.float32)
        np.testing.assert_allclose(logits, expected[str(answer["model"])], atol=1e-5)
    app.close()


def test_what_cannot_be_loaded_changes_nothing() -> None:
    models, _ = _host()
    models.apply(Wanted(1, Source(1, "gone"), previous=Source(0, "a")))
    assert models.model is MODELS["a"]
    assert models.status().failures == {1: "gone: damaged"}
    other = make_model(make_preprocessor(ANY))
    others, _ = _host(load=lambda path: other if path == "other" else MODELS[path])
    others.apply(Wanted(1, Source(1, "other")))
    assert others.model is MODELS["a"]
    assert "schemas differ in" in others.status().failures[1]


def test_going_back_needs_no_loading() -> None:
    opened: list[str] = []

    def noted(path: str) -> ServedModel:
        opened.append(path)
        return load(path)

    models, _ = _host(load=noted)
    models.apply(Wanted(1, Source(1, "b"), previous=Source(0, "a")))
    models.apply(Wanted(2, Source(0, "a"), previous=Source(1, "b")))
    models.apply(Wanted(3, Source(1, "b"), previous=Source(0, "a")))
    assert models.model is MODELS["b"]
    assert opened == ["a", "b"]
    models.apply(Wanted(4, Source(4, "b")))  # wished for again: the folder may hold something else now
    assert opened == ["a", "b", "b"]


def test_shadow() -> None:
    models, counters = _host()
    app = ScoringApp(models, counters, config=ServeConfig())
    plain = post(app, TEXT).json()
    models.apply(Wanted(1, Source(0, "a"), shadow=Source(1, "b")))
    assert post(app, TEXT).json() == plain
    for _ in range(3):
        post(app, TEXT)
    version = MODELS["b"].version
    deadline_s = time.monotonic() + 60
    while counters.snapshot().values().get(("rayrec_serve_shadow_rows_total", (("model", version),))) != 80.0:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    counted = counters.snapshot().values()
    scores = [1 / (1 + np.exp(-logits_of(MODELS[name], TEXT).astype(np.float64))) for name in "ab"]
    differences = np.tile(np.abs(scores[0] - scores[1]), 4)
    name = "rayrec_serve_shadow_score_difference"
    assert counted[f"{name}_sum", ()] == pytest.approx(differences.sum(), rel=1e-3)
    assert counted[f"{name}_count", ()] == 80
    assert counted[f"{name}_bucket", (("le", "0.01"),)] == np.count_nonzero(differences <= 0.01)
    assert f'rayrec_serve_shadow_rows_total{{model="{version}"}} 80' in ask(app, "GET", "/metrics").body.decode()
    models.apply(Wanted(2, Source(0, "a")))
    assert models.status().shadow is None
    app.close()


def test_a_slow_shadow_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models, counters = _host()
    go_on = threading.Event()
    monkeypatch.setattr("rayrec.serve.responses.BatchScorer.score", lambda *_: go_on.wait(30))
    models.apply(Wanted(1, Source(0, "a"), shadow=Source(1, "b")))
    app = ScoringApp(models, counters, config=ServeConfig())
    for _ in range(20):
        assert post(app, TEXT).status == 200
    dropped = counters.snapshot().values()["rayrec_serve_shadow_dropped_rows_total", ()]
    assert dropped in (20 * 11, 20 * 12)  # 8 wait, and one may be at work
    go_on.set()
    app.close()


# -- the coordinator


def test_the_board_knows_the_model_of_a_replica_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that started the server asks it once, as soon as Ray Serve calls the replica ready."""
    decisions = CoordinatorState("a")

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="first"), app_name="rayrec")
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("rayrec.inference.model.open_served", lambda path, device, own: load(path))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    held = deployment._ReplicaProcess(ServeConfig(), None, None)
    monkeypatch.setattr(
        deployment._ReplicaProcess, "_ask", lambda held, method, *told: decisions.exchange(*told, now_s=0.0)
    )
    held._start()
    assert decisions.describe()["replicas"]["first"]["model"] == MODELS["a"].version


def _tell(
    decisions: CoordinatorState, replica: str, status: Status, now_s: float, known: Wanted | None = None
) -> Wanted:
    counters = Counters()
    counters.rows.labels("v").inc(10)
    return decisions.exchange(replica, known, status, counters.snapshot(), now_s=now_s)


def _serves(source: Source) -> Status:
    return Status(model=source, version=f"version of {source.path}")


def test_a_swap_is_done_once_all_replicas_say_so() -> None:
    decisions = CoordinatorState("a")
    first = decisions.wanted.model
    _tell(decisions, "one", _serves(first), 0)
    _tell(decisions, "two", _serves(first), 0)
    serial = decisions.swap("b")
    assert decisions.change(serial).state == "pending"
    second = _tell(decisions, "one", _serves(first), 1).model
    assert second == Source(serial, "b")
    _tell(decisions, "one", _serves(second), 2)
    assert decisions.change(serial).state == "pending"
    _tell(decisions, "two", _serves(second), 2)
    change = decisions.change(serial)
    assert (change.state, change.version) == ("done", "version of b")
    assert decisions.roll_back() == first.serial
    assert decisions.change(first.serial).state == "pending"
    assert _tell(decisions, "one", _serves(second), 3).model == first
    _tell(decisions, "one", _serves(first), 4)
    _tell(decisions, "two", _serves(first), 4)
    assert decisions.change(first.serial).state == "done"
    assert decisions.roll_back() == serial


def test_one_replica_that_cannot_load_a_model_brings_all_back() -> None:
    decisions = CoordinatorState("a")
    first = decisions.wanted.model
    second = Source(decisions.swap("b"), "b")
    for replica in ("one", "two"):
        _tell(decisions, replica, _serves(second), 0)
    serial = decisions.swap("broken")
    third = _tell(decisions, "one", _serves(second), 1).model
    _tell(decisions, "one", _serves(third), 2)
    wanted = _tell(decisions, "two", Status(model=second, failures={serial: "damaged"}), 2)
    assert (wanted.model, wanted.previous) == (second, first)
    assert decisions.change(serial).cause == "damaged"
    assert _tell(decisions, "one", _serves(third), 3) == wanted
    assert decisions.roll_back() == first.serial


def test_a_model_to_go_back_to_that_cannot_be_loaded_any_longer() -> None:
    """The replica has let go of it meanwhile, or was started after it."""
    decisions = CoordinatorState("a")
    first = decisions.wanted.model
    _tell(decisions, "one", _serves(first), 0)
    second = Source(decisions.swap("b"), "b")
    for replica in ("one", "two"):
        _tell(decisions, replica, _serves(second), 1)
    assert decisions.roll_back() == first.serial
    _tell(decisions, "one", _serves(first), 2)
    wanted = _tell(decisions, "two", Status(model=second, failures={first.serial: "removed"}), 2)
    assert wanted.model == second
    assert decisions.change(first.serial) == Change("failed", cause="removed")
    assert _tell(decisions, "one", _serves(second), 3).model == second


def test_a_shadow_that_cannot_be_loaded() -> None:
    decisions = CoordinatorState("a")
    serial = decisions.shadow("broken")
    assert serial is not None
    wanted = _tell(decisions, "one", Status(model=decisions.wanted.model, failures={serial: "damaged"}), 0)
    assert wanted.shadow is None
    assert decisions.change(serial).state == "failed"
    assert decisions.shadow("b") != serial
    assert decisions.shadow(None) is None


def test_what_all_have_served_is_not_given_up_for_one_that_comes_later() -> None:
    decisions = CoordinatorState("a")
    first = decisions.wanted.model
    failed = Status(failures={first.serial: "the store was out"})
    _tell(decisions, "one", failed, 0)
    assert decisions.change(first.serial).state == "failed"
    _tell(decisions, "one", _serves(first), 1)  # Ray Serve started it again
    assert decisions.describe()["failures"] == {}
    second = Source(decisions.swap("b"), "b")
    _tell(decisions, "one", _serves(second), 2)
    assert _tell(decisions, "two", Status(failures={second.serial: "the store was out"}), 3).model == second
    assert decisions.roll_back() == first.serial
    assert _tell(decisions, "one", _serves(first), 4).model == first


def test_nothing_to_go_back_to() -> None:
    with pytest.raises(InputError, match="no other model"):
        CoordinatorState("a").roll_back()


def test_a_board_that_was_started_anew_learns_from_the_replicas() -> None:
    before = CoordinatorState("a")
    before.swap("b")
    known = before.wanted
    after = CoordinatorState("a")
    assert _tell(after, "one", _serves(known.model), 0, known) == known
    assert _tell(after, "two", Status(), 0) == known


def test_a_configuration_counts_once() -> None:
    """A replica that starts later names what was configured before, and changes nothing."""
    decisions = CoordinatorState("a")
    decisions.configure(Configured("run"), model="a", shadow=None)
    assert decisions.wanted.model == Source(0, "a")
    swapped = decisions.swap("b")
    decisions.configure(Configured("run"), model="a2", shadow=None)
    assert decisions.wanted.model == Source(swapped, "b")
    decisions.configure(Configured("c", "d"), model="c", shadow="d")
    assert (
        decisions.wanted.model.path,
        decisions.wanted.previous,
        decisions.wanted.shadow,
    ) == (
        "c",
        Source(swapped, "b"),
        Source(decisions.wanted.generation - 1, "d"),
    )
    decisions.configure(Configured("c"), model="c", shadow=None)
    assert (decisions.wanted.model.path, decisions.wanted.shadow) == ("c", None)
    after = CoordinatorState("a")  # the coordinator was restarted
    _tell(after, "one", Status(), 0, decisions.wanted)
    after.configure(Configured("c"), model="c", shadow=None)
    assert after.wanted == decisions.wanted


def test_counts_outlive_a_replica() -> None:
    decisions = CoordinatorState("a")
    counters = Counters()
    counters.waiting_rows.set(3)
    counters.rows.labels("v").inc(5)
    counters.batch_rows.observe(5)
    rows, waiting = ("rayrec_serve_rows_total", (("model", "v"),)), ("rayrec_serve_waiting_rows", ())
    batches = [("rayrec_serve_batch_rows_bucket", (("le", bound),)) for bound in ("4.0", "16.0", "+Inf")]

    decisions.exchange("one", None, Status(), pickle.loads(pickle.dumps(counters.snapshot())), now_s=0)
    decisions.exchange("three", None, Status(), counters.snapshot(), now_s=1)
    _tell(decisions, "two", Status(), 1)
    found = decisions.collect().values()
    assert (found[rows], found[waiting]) == (20, 6)
    assert [found[key] for key in batches] == [0, 2, 2]
    _tell(decisions, "two", Status(), 2 + GONE_S)
    found = decisions.collect().values()
    assert (found[rows], found[waiting]) == (20, 0)  # the gauge of "two"
    assert set(decisions.describe()["replicas"]) == {"two"}
    _tell(decisions, "one", Status(), 3 + GONE_S)  # it was busy, and counts on from where it was
    assert decisions.collect().values()[rows] == 25


# -- starting


def test_ray_inherits_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: dict[str, str] = {}

    def connect(*_: object, **__: object) -> None:
        inherited.update(os.environ)
        raise InputError("no Ray")

    monkeypatch.setattr(server, "source_of", lambda path: path)
    monkeypatch.setattr(server, "quieten", lambda: None)
    monkeypatch.setattr("rayrec.launch.cluster.connect", connect)
    monkeypatch.setenv("SERVE_TOKEN", "open sesame")
    with pytest.raises(InputError, match="no Ray"):
        server.serve_forever(
            "run", config=ServeConfig(token_env="SERVE_TOKEN"), address=None, console=Console(quiet=True), started=print
        )
    assert inherited
    assert "open sesame" not in inherited.values()


# -- reaching a server


@pytest.fixture
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor in the environment."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it is set by who finds a token


@pytest.mark.usefixtures("_no_ray")
@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:10001"])
def test_what_ray_takes_as_an_address_is_left_to_it(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def connect(given: str, **_: object) -> None:
        raise InputError(f"asked for {given}")

    monkeypatch.setattr(client, "quieten", lambda: None)
    monkeypatch.setattr("rayrec.launch.cluster.connect", connect)
    with pytest.raises(InputError, match=f"asked for {address}"):
        client.roll_back(address=address)


@pytest.mark.usefixtures("_no_ray")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_that_is_not_there(host: str) -> None:
    with pytest.raises(InputError, match=r"no Ray cluster answers there"):
        client.roll_back(address=f"{host}:{free_ports(1)}")
    with pytest.raises(InputError, match="no Ray cluster answers there"):
        client.roll_back(address=f"{host}:70000")


@pytest.mark.usefixtures("_no_ray")
def test_no_server_is_named() -> None:
    for address in (None, "local"):  # of a new Ray, which has none
        with pytest.raises(InputError, match="which server"):
            client.roll_back(address=address)


@pytest.mark.parametrize(
    ("model", "given", "unused"),
    [
        ("a", {"swap": True, "shadow": "b"}, "swap: .* takes no shadow"),
        ("a", {"swap": True, "follow": "best"}, "swap: .* takes no follow"),
        (None, {"rollback": True, "shadow": "b"}, "rollback: .* takes no shadow"),
        (None, {"no_shadow": True, "shadow": "b"}, "no_shadow: .* takes no shadow"),
        (None, {"stop": True, "config": ServeConfig(port=81, replicas=2)}, "stop: .* takes no port, replicas"),
        (None, {"shadow": "b", "follow": "newest"}, "shadow: .* takes no follow"),
        (None, {"rollback": True, "stop": True}, "one at a time"),
        ("a", {"rollback": True}, "take no model"),
        (None, {"swap": True}, "which model"),
    ],
)
def test_what_a_running_server_is_not_told_is_refused(model: str | None, given: dict[str, Any], unused: str) -> None:
    with pytest.raises(InputError, match=unused):
        rayrec.api.serve(model, **given)


# -- following a run


def _save(run: Path, step: int, score: float | None) -> str:
    from rayrec.checkpoint.folders import Checkpoint
    from rayrec.checkpoint.format import MANIFEST, VERSION, seal
    from rayrec.storage import write_json

    place = folder_of(str(run), step)
    manifest = {"version": VERSION, "files": {}, "tensors": {}, "state": {}, "block_bytes": 1, "score": score}
    write_json(f"{place}/{MANIFEST}", seal(manifest))
    assert Checkpoint(place).manifest()["score"] == score
    return place


def test_the_checkpoint_to_follow(tmp_path: Path) -> None:
    assert choose(str(tmp_path), "newest") is None
    first = _save(tmp_path, 10, None)
    assert choose(str(tmp_path), "newest") == first
    assert choose(str(tmp_path), "best") is None
    best = [_save(tmp_path, 20, 0.75), _save(tmp_path, 30, 0.8), _save(tmp_path, 40, 0.8)][-1]
    newest = _save(tmp_path, 50, 0.7)
    assert choose(str(tmp_path), "best") == best
    assert choose(str(tmp_path), "newest") == newest
    (Path(newest) / "manifest.json").write_text("{")
    assert choose(str(tmp_path), "newest") == best
    assert choose(os.path.relpath(tmp_path), "best") == best


class _Coordinator:
    """Stands for the coordinator's actor."""

    def __init__(self, path: str) -> None:
        self.decisions, self.trouble = CoordinatorState(path), None

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.trouble is not None:
            raise self.trouble
        return getattr(self.decisions, name)(*arguments)


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Coordinator:
    monkeypatch.setattr("ray.get", lambda told: told)
    monkeypatch.setattr(server, "_RETRY_S", 0.0)
    return _Coordinator(_save(tmp_path, 10, None))


def _watch(coordinator: _Coordinator) -> server._Watch:
    return server._Watch(server.Server("http://x", coordinator, "x:1"), Console())


def test_a_run_is_followed(coordinator: _Coordinator, tmp_path: Path) -> None:
    watch = _watch(coordinator)
    run = os.path.relpath(tmp_path)
    watch.follow(run, "newest")
    assert coordinator.decisions.wanted.generation == 0  # it serves that already, by whatever name
    newest = _save(tmp_path, 20, None)
    watch.follow(run, "newest")
    watch.follow(run, "newest")
    assert coordinator.decisions.wanted == Wanted(
        1, Source(1, newest), previous=Source(0, coordinator.decisions.wanted.previous.path)
    )
    coordinator.decisions.roll_back()
    assert watch.poll()
    watch.follow(run, "newest")  # after a rollback that is what the user wants
    assert coordinator.decisions.wanted.model.serial == 0


def test_a_checkpoint_that_was_not_loaded_is_tried_again(
    coordinator: _Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = _watch(coordinator)
    newest = _save(tmp_path, 20, None)
    first = coordinator.decisions.wanted.model
    for _ in range(10):
        watch.follow(str(tmp_path), "newest")
        wanted = coordinator.decisions.wanted.model
        if wanted.path == newest:
            _tell(
                coordinator.decisions,
                "one",
                Status(model=first, failures={wanted.serial: "the store was out"}),
                0,
            )
        watch.poll()
    assert len(coordinator.decisions.describe()["failures"]) == 4
    assert capsys.readouterr().err.count("not served: the store was out") == 4


def test_following_outlives_its_store_and_its_board(
    coordinator: _Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = _watch(coordinator)
    for error in (OSError("the store was out for 5 s"), InputError("access denied"), None):
        monkeypatch.setattr(server, "choose", _raises(error) if error else choose)
        for _ in range(3):
            watch.follow(str(tmp_path), "newest")
            assert watch.poll()
    _save(tmp_path, 20, None)
    coordinator.trouble = ray.exceptions.ActorUnavailableError("it starts again", b"\0" * 16)
    watch.follow(str(tmp_path), "newest")
    assert watch.poll()
    coordinator.trouble = None
    watch.follow(str(tmp_path), "newest")
    assert coordinator.decisions.wanted.generation == 1
    told = capsys.readouterr().err
    for cause in ("the store was out for 5 s", "access denied"):
        assert told.count(f"follow: {cause}; the server keeps its model") == 1
    coordinator.trouble = ray.exceptions.ActorDiedError()
    assert not watch.poll()


def _raises(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object) -> Any:
        raise error

    return raise_it
