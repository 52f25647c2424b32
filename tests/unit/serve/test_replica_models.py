"""Models come and go while requests are answered: the swap, the way back, the shadow, and what the coordinator decides."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from builders.click_models import ANY, logits_of, make_model, make_preprocessor, row_text
from builders.requests import ask, post, post_async
from hosts.ports import free_ports

from rayrec.checkpoint import folder_of
from rayrec.commands.serving import serve
from rayrec.config import InputError
from rayrec.inference.model import ServedModel
from rayrec.observe.console import Console
from rayrec.serve import client, deployment, server
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.coordinator import GONE_S, CoordinatorState
from rayrec.serve.counters import Counters
from rayrec.serve.protocol import Change, Configured, Source, Status, Wanted
from rayrec.serve.replica_models import ReplicaModels
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
    models.apply(Wanted(1, Source(0, "a"), next=Source(1, "gone")))
    assert models.model is MODELS["a"]
    assert models.status().failures == {1: "gone: damaged"}


def test_columns_are_those_accepted_before_a_replica_started() -> None:
    other = make_model(make_preprocessor(ANY))
    models = ReplicaModels({"other": other, "a": MODELS["a"]}.__getitem__, Counters())
    models.apply(Wanted(2, Source(1, "other"), schema=MODELS["a"].preprocessor.schema))
    assert not models.ready
    assert models.failed
    assert "schemas differ in" in models.status().failures[1]
    models.apply(Wanted(3, Source(0, "a"), schema=MODELS["a"].preprocessor.schema, shadow=Source(3, "other")))
    assert models.model is MODELS["a"]
    assert "schemas differ in" in models.status().failures[3]


def test_a_next_model_does_not_answer() -> None:
    models, _ = _host()
    models.apply(Wanted(1, Source(0, "a"), next=Source(1, "b")))
    assert models.model is MODELS["a"]
    assert models.status().standby == Source(1, "b")
    models.hear(Wanted(2, Source(1, "b"), previous=Source(0, "a")))
    assert models.model is MODELS["b"]
    assert models.status().standby == Source(0, "a")


def test_an_accepted_model_that_failed_is_tried_again() -> None:
    found = dict(MODELS)
    models, _ = _host(load=lambda path: found[path])
    model = found.pop("b")
    models.apply(Wanted(2, Source(1, "b")))
    assert models.status().failures == {1: "'b'"}
    found["b"] = model
    models.load()
    assert models.model is MODELS["a"]
    models.load(retry=True)
    assert models.model is MODELS["b"]
    assert models.status().failures == {}


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


# -- replicas and the coordinator


class _Replicas:
    """Processes of replicas, in this process, that exchange with a coordinator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coordinator, self.ended = CoordinatorState("a"), False
        self.slow: dict[str, threading.Event] = {}
        """Set once a model may be loaded, by path."""
        self.loading: list[str] = []
        self._lock = threading.Lock()
        monkeypatch.setattr("rayrec.inference.model.open_served", lambda path, device, own: self._load(path))
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(deployment, "EXCHANGE_EVERY_S", 0.01)
        monkeypatch.setattr(deployment._ReplicaProcess, "_ask", lambda replica, *asked: self._ask(*asked))
        self._monkeypatch = monkeypatch

    def _load(self, path: str) -> ServedModel:
        self.loading.append(path)
        if path in self.slow:
            assert self.slow[path].wait(60)
        return make_model(make_preprocessor(ANY)) if path == "other columns" else load(path)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self.ended:
            raise SystemExit
        with self._lock:
            return self.coordinator.exchange(*arguments, now_s=time.monotonic())

    def start(self, name: str) -> deployment._ReplicaProcess:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), app_name="rayrec")
        self._monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
        replica = deployment._ReplicaProcess(ServeConfig(), None, None)
        replica._start()
        return replica

    def starting(self, name: str, *, path: str) -> threading.Thread:
        """Returns once the replica loads the model."""
        self.slow[path], before = threading.Event(), len(self.loading)
        thread = threading.Thread(target=self.start, args=(name,))
        thread.start()
        _wait(lambda: len(self.loading) > before)
        return thread

    def request(self, *arguments: str) -> int:
        with self._lock:
            number = self.coordinator.request(*arguments)  # type: ignore[arg-type]
        assert isinstance(number, int)
        return number

    def end_of(self, request: int) -> Change:
        _wait(lambda: self.coordinator.decisions.change(request).state != "pending")
        return self.coordinator.decisions.change(request)

    def versions(self) -> list[str]:
        return [replica["model"] for replica in self.coordinator.decisions.describe()["replicas"].values()]


def _wait(done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Replicas]:
    made = _Replicas(monkeypatch)
    yield made
    made.ended = True
    for thread in threading.enumerate():
        if thread.name == "coordinator":
            thread.join(60)


def test_the_coordinator_knows_the_model_of_a_replica_that_is_ready(replicas: _Replicas) -> None:
    """The process that started the server asks it once, as soon as Ray Serve calls the replica ready."""
    replicas.start("first")
    assert replicas.versions() == [MODELS["a"].version]


def test_a_replica_that_starts_during_a_swap_has_the_new_model(replicas: _Replicas) -> None:
    replicas.start("first")
    thread = replicas.starting("second", path="a")
    request = replicas.request("swap", "b")
    _wait(lambda: "b" in replicas.loading)
    assert replicas.coordinator.decisions.change(request).state == "pending"
    replicas.slow["a"].set()
    thread.join(60)
    assert replicas.end_of(request) == Change("done", version=MODELS["b"].version)
    assert replicas.versions() == [MODELS["b"].version] * 2


def test_a_replica_that_starts_during_a_rejected_swap_never_serves_it(replicas: _Replicas) -> None:
    first = replicas.start("first")
    replicas.request("swap", "b")
    _wait(lambda: first._models.model is MODELS["b"])
    thread = replicas.starting("second", path="b")
    requests = [replicas.request("swap", path) for path in ("other columns", "gone", "other columns")]
    ends = [replicas.end_of(request) for request in requests]
    assert ends[0].cause == ends[1].cause == "a later request replaced this one"
    assert "schemas differ in" in ends[2].cause
    replicas.slow["b"].set()
    thread.join(60)
    assert replicas.versions() == [MODELS["b"].version] * 2
    found = replicas.coordinator.decisions.describe()
    assert (found["model"], found["previous"]) == ("b", "a")
    assert replicas.end_of(replicas.request("roll_back")).version == MODELS["a"].version
    assert replicas.versions() == [MODELS["a"].version] * 2


def test_a_first_model_that_cannot_be_loaded_is_reported(replicas: _Replicas) -> None:
    replicas.coordinator = CoordinatorState("gone")
    with pytest.raises(RuntimeError, match="gone: damaged"):
        replicas.start("first")
    assert replicas.coordinator.decisions.describe()["failures"] == {"0": "gone: damaged"}


def test_a_restarted_coordinator_answers_once_it_knows(replicas: _Replicas) -> None:
    """A replica that starts waits for what the others have, and requests wait until all were heard."""
    replicas.start("first")
    replicas.request("swap", "b")
    _wait(lambda: replicas.versions() == [MODELS["b"].version])
    known = replicas.coordinator.decisions.wanted
    after = CoordinatorState("a", restart=1000, now_s=0)
    counters = Counters().snapshot()
    assert after.exchange("second", None, Status(), counters, now_s=0.1) is None
    assert not after.configure(Configured("a"), model="a", shadow=None, now_s=0.2)
    assert after.exchange("first", known, Status(model=known.model), counters, now_s=0.3) == known
    assert after.exchange("second", None, Status(), counters, now_s=0.4) == known
    assert after.request("swap", "c") is None
    after.exchange("first", known, Status(model=known.model), counters, now_s=GONE_S + 0.1)
    assert after.request("swap", "c") == 1000


def test_counts_outlive_a_replica() -> None:
    coordinator = CoordinatorState("a")
    counters = Counters()
    counters.waiting_rows.set(3)
    counters.rows.labels("v").inc(5)
    counters.batch_rows.observe(5)
    rows, waiting = ("rayrec_serve_rows_total", (("model", "v"),)), ("rayrec_serve_waiting_rows", ())
    batches = [("rayrec_serve_batch_rows_bucket", (("le", bound),)) for bound in ("4.0", "16.0", "+Inf")]

    coordinator.exchange("one", None, Status(), pickle.loads(pickle.dumps(counters.snapshot())), now_s=0)
    coordinator.exchange("three", None, Status(), counters.snapshot(), now_s=1)
    two = Counters()
    two.rows.labels("v").inc(10)
    coordinator.exchange("two", None, Status(), two.snapshot(), now_s=1)
    found = coordinator.collect().values()
    assert (found[rows], found[waiting]) == (20, 6)
    assert [found[key] for key in batches] == [0, 2, 2]
    coordinator.exchange("two", None, Status(), two.snapshot(), now_s=2 + GONE_S)
    found = coordinator.collect().values()
    assert (found[rows], found[waiting]) == (20, 0)  # the gauge of "two"
    assert set(coordinator.decisions.describe()["replicas"]) == {"two"}
    coordinator.exchange("one", None, Status(), two.snapshot(), now_s=3 + GONE_S)  # it was busy, and counts on
    assert coordinator.collect().values()[rows] == 25


# -- starting


def test_ray_inherits_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: dict[str, str] = {}

    def connect(*_: object, **__: object) -> None:
        inherited.update(os.environ)
        raise InputError("no Ray")

    monkeypatch.setattr(server, "source_of", lambda path: path)
    monkeypatch.setattr(server, "quieten", lambda: None)
    monkeypatch.setattr("rayrec.cluster.connection.connect", connect)
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
    monkeypatch.setattr("rayrec.cluster.connection.connect", connect)
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
        (None, {"stop": True, "port": 81, "replicas": 2}, "stop: .* takes no port, replicas"),
        (None, {"shadow": "b", "follow": "newest"}, "shadow: .* takes no follow"),
        (None, {"rollback": True, "stop": True}, "one at a time"),
        ("a", {"rollback": True}, "take no model"),
        (None, {"swap": True}, "which model"),
    ],
)
def test_what_a_running_server_is_not_told_is_refused(model: str | None, given: dict[str, Any], unused: str) -> None:
    with pytest.raises(InputError, match=unused):
        serve(model, **given)


# -- following a run


def _save(run: Path, step: int, score: float | None) -> str:
    from rayrec.checkpoint.discovery import Checkpoint
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


def test_damaged_checkpoints_are_skipped_by_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rayrec.checkpoint.format import VERSION, seal
    from rayrec.storage import write_json

    good = _save(tmp_path, 10, 0.5)
    sound = {"version": VERSION, "files": {}, "tensors": {}, "state": {}, "block_bytes": 1, "score": 0.9}
    without_score = {name: value for name, value in sound.items() if name != "score"}
    without_files = {name: value for name, value in sound.items() if name != "files"}
    damaged = [
        without_score,
        without_files,
        {**sound, "files": None},
        {**sound, "score": "0.9"},
        {**sound, "version": 9},
    ]
    for step, manifest in enumerate(damaged, start=20):
        write_json(f"{folder_of(str(tmp_path), step)}/manifest.json", seal(manifest))
    (Path(folder_of(str(tmp_path), 30)) / "manifest.json").mkdir(parents=True)
    coordinator = _Coordinator("the first", monkeypatch)
    watch = _watch(coordinator)
    for which in ("newest", "best"):
        assert choose(str(tmp_path), which) == good  # type: ignore[arg-type]
        watch.follow(str(tmp_path), which)  # type: ignore[arg-type]
        assert coordinator.wanted.next == Source(coordinator.wanted.generation, good)
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == len(damaged) + 1
    assert all("follow: skipping a checkpoint: " in note for note in notes)


class _Coordinator:
    """Stands for the coordinator's actor, of a server whose replica serves its model."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ray.get", lambda value: value)
        monkeypatch.setattr(server, "_RETRY_S", 0.0)
        self.state, self.trouble = CoordinatorState(path), list[Exception]()
        self.report(Status(model=Source(0, path), schema=ANY))

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.trouble:
            raise self.trouble.pop(0)
        return getattr(self.state if name == "request" else self.state.decisions, name)(*arguments)

    @property
    def wanted(self) -> Wanted:
        return self.state.decisions.wanted

    def report(self, status: Status, known: Wanted | None = None) -> None:
        self.state.exchange("one", known, status, Counters().snapshot(), now_s=0)

    def restart(self, known: Wanted, first: int) -> None:
        self.state = CoordinatorState("the first", restart=first)
        self.report(Status(model=known.model, schema=ANY), known)
        self.state.decisions = self.state.decisions.complete_restart()


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Coordinator:
    return _Coordinator(_save(tmp_path, 10, None), monkeypatch)


def _watch(coordinator: _Coordinator) -> server._Watch:
    return server._Watch(server.Server("http://x", coordinator, "x:1"), Console())


def test_a_run_is_followed(coordinator: _Coordinator, tmp_path: Path) -> None:
    watch = _watch(coordinator)
    run = os.path.relpath(tmp_path)
    first = coordinator.wanted
    watch.follow(run, "newest")
    assert coordinator.wanted == first  # it serves that already, by whatever name
    newest = Source(first.generation + 1, _save(tmp_path, 20, None))
    watch.follow(run, "newest")
    watch.follow(run, "newest")
    assert coordinator.wanted == replace(first, generation=first.generation + 1, next=newest)
    coordinator.report(Status(model=first.model, standby=newest, schema=ANY), coordinator.wanted)
    assert (coordinator.wanted.model, coordinator.wanted.previous) == (newest, first.model)
    coordinator.request.remote("roll_back")
    assert watch.poll()
    watch.follow(run, "newest")  # after a rollback that is what the user wants
    assert first.model in (coordinator.wanted.model, coordinator.wanted.next)


def test_a_checkpoint_that_was_not_loaded_is_tried_again(
    coordinator: _Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = _watch(coordinator)
    newest = _save(tmp_path, 20, None)
    first = coordinator.wanted.model
    for _ in range(10):
        watch.follow(str(tmp_path), "newest")
        if (wanted := coordinator.wanted.next) is not None:
            assert wanted.path == newest
            coordinator.report(Status(model=first, failures={wanted.request: "the store was out"}))
        watch.poll()
    assert len(coordinator.state.decisions.failures) == 4
    assert capsys.readouterr().err.count("not served: the store was out") == 4


def test_a_checkpoint_is_tried_again_after_a_restart_lost_it(coordinator: _Coordinator, tmp_path: Path) -> None:
    watch = _watch(coordinator)
    newest, known = _save(tmp_path, 20, None), coordinator.wanted
    watch.follow(str(tmp_path), "newest")
    coordinator.restart(known, 1000)
    assert coordinator.wanted.next is None
    watch.follow(str(tmp_path), "newest")
    assert coordinator.wanted.next == Source(1000, newest)


def test_following_outlives_its_store_and_its_board(
    coordinator: _Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = _watch(coordinator)
    for error in (OSError("the store was out for 5 s"), InputError("access denied"), None):
        monkeypatch.setattr(server, "choose", _raises(error) if error else choose)
        for _ in range(3):
            watch.follow(str(tmp_path), "newest")
            assert watch.poll()
    newest = _save(tmp_path, 20, None)
    coordinator.trouble = [_unavailable()] * 2
    watch.follow(str(tmp_path), "newest")
    assert watch.poll()
    watch.follow(str(tmp_path), "newest")
    assert coordinator.wanted.next is not None
    assert coordinator.wanted.next.path == newest
    printed = capsys.readouterr().err
    for cause in ("the store was out for 5 s", "access denied"):
        assert printed.count(f"follow: {cause}; the server keeps its model") == 1
    coordinator.trouble = [ray.exceptions.ActorDiedError()]
    assert not watch.poll()


def _unavailable() -> Exception:
    return ray.exceptions.ActorUnavailableError("it starts again", b"\0" * 16)


def _raises(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> Any:
        raise error

    return raise_it


# -- requests


def test_a_request_outlives_a_restart_of_the_coordinator(
    coordinator: _Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, polls = coordinator.wanted, []

    def go_on(_: float) -> None:
        polls.append(coordinator.wanted.next)
        if len(polls) == 1:
            assert coordinator.wanted.next == Source(known.generation + 1, "b")
            coordinator.restart(known, 1000)
            coordinator.trouble = [_unavailable()]
        elif coordinator.wanted.next == Source(1000, "b"):
            status = Status(model=known.model, standby=coordinator.wanted.next, schema=ANY)
            coordinator.report(status, coordinator.wanted)
            coordinator.report(Status(model=Source(1000, "b"), version="of b", schema=ANY), coordinator.wanted)

    monkeypatch.setattr(client.time, "sleep", go_on)
    assert client.request(coordinator, "swap", "b") == Change("done", version="of b")


def test_a_request_ends_with_the_cause(coordinator: _Coordinator) -> None:
    with pytest.raises(InputError, match="no other model"):
        client.request(coordinator, "roll_back")
    coordinator.trouble = [ray.exceptions.ActorDiedError()]
    with pytest.raises(InputError, match="swap: the server was stopped"):
        client.request(coordinator, "swap", "b")
    assert client.request(coordinator, "swap", "b", timeout_s=0).state in ("lost", "pending")


def test_a_shadow_is_gone_once_replicas_say_so(coordinator: _Coordinator) -> None:
    first, shadow = coordinator.wanted.model, Source(coordinator.wanted.generation + 1, "b")
    coordinator.request.remote("set_shadow", "b")
    coordinator.report(Status(model=first, schema=ANY, shadow=shadow, shadow_version="of b"), coordinator.wanted)
    assert coordinator.change.remote(shadow.serial) == Change("done", version="of b")
    request = coordinator.request.remote("set_shadow", None)
    assert coordinator.change.remote(request).state == "pending"
    models, _ = _host()
    models.apply(Wanted(1, Source(0, "a"), shadow=Source(1, "b")))
    assert models.status().shadow_version == MODELS["b"].version
    models.apply(Wanted(2, Source(0, "a"), shadow=Source(request, "")))
    assert models.status().shadow_version == ""
    coordinator.report(replace(models.status(), model=first), coordinator.wanted)
    assert coordinator.change.remote(request).state == "done"
    assert coordinator.describe.remote()["shadow"] is None
    models.close()
