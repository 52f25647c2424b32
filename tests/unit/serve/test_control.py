"""Model changes of a server in one process: any order of events, replica starts and failures, lost
registers.
"""

import asyncio
import contextlib
import itertools
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from builders.click_models import (
    ANY,
    logits_of,
    make_model,
    make_preprocessor,
    row_text,
)
from builders.faults import raising, rejects, until
from builders.item_model import shop_model, write_items
from builders.requests import ask, post, post_async, sample_values, score

from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.data.features import lookups
from rayrec.data.features.lookups import swapped_tables
from rayrec.inference.model import ServedModel
from rayrec.metrics.binary import sigmoid
from rayrec.schema import NamedTable, Schema
from rayrec.serve import control, deployment, replica_models
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.control import (
    REGISTER,
    REPORT_TIMEOUT_S,
    ConfiguredModels,
    Control,
    DesiredState,
    ModelSource,
    Register,
    Status,
    change_shadow,
    follow_model,
    revert_model,
    swap_model,
    swap_tables,
)
from rayrec.serve.counters import Counters, Snapshot
from rayrec.serve.replica_models import BatchScorer, ReplicaModels
from rayrec.serve.requests import RequestBody

MODELS = {name: make_model(seed=number) for number, name in enumerate("abc")}
OTHER = make_model(make_preprocessor(ANY))
DIED = ray.exceptions.ActorDiedError()


def load(path: str) -> ServedModel:
    found = {**MODELS, "other columns": OTHER}
    if path not in found:
        raise InputError(f"{path}: damaged")
    return found[path]


class Cluster:
    """Fake of Ray for `Control` and replicas: calls of the register and of all replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.register = Register()
        self.running = True
        self.calls: dict[str, Callable[[str, DesiredState], tuple[str, str]]] = {}
        """Of the replicas that take requests, by name."""
        self.before_call: Callable[[], None] = lambda: None
        self.timeouts_s: list[tuple[str, float]] = []
        """Method and time limit of each call of all replicas."""
        self.lock = threading.RLock()
        for name in ("get_shared_actor", "find_shared_actor"):
            monkeypatch.setattr(ray_compat, name, lambda *_: self)
        monkeypatch.setattr(ray_compat, "call_replicas", self._call_replicas)
        monkeypatch.setattr(ray, "get", lambda value, timeout: value)
        monkeypatch.setattr("ray.serve.get_app_handle", lambda _: None)
        monkeypatch.setattr(
            "ray.serve.status",
            lambda: SimpleNamespace(applications={"rayrec"} if self.running else set()),
        )
        for module in (control, deployment):
            monkeypatch.setattr(module, "resolve_source", lambda path: path)

    def __getattr__(self, name: str) -> SimpleNamespace:
        def call(*arguments: Any) -> Any:
            self.before_call()
            if not self.running:
                raise DIED
            with self.lock:
                return getattr(self.register, name)(*pickle.loads(pickle.dumps(arguments)))

        return SimpleNamespace(remote=call)

    def _call_replicas(
        self, _: None, method: str, desired: DesiredState, *, timeout_s: float
    ) -> list[Any]:
        self.timeouts_s.append((method, timeout_s))
        result: list[Any] = []
        for name in list(self.calls):
            self.before_call()
            result.append(self.calls[name](method, desired) if name in self.calls else DIED)
        return result

    def versions(self) -> list[str]:
        return [replica["model"] for replica in self.register.describe()["replicas"].values()]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


class World:
    """Replicas of a server with random events between two calls: a change, a start, a failure, a
    lost register.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.names = itertools.count()
        self.replicas: dict[str, ReplicaModels] = {}
        self.dead = set[str]()
        self.budget = 6
        self.depth = 0
        cluster.register = Register()
        cluster.before_call = self.disturb
        cluster.calls.clear()
        self.start()
        self.start()

    def open(self, path: str) -> ServedModel:
        return load("damaged" if path == "b" and self.random.random() < 0.1 else path)

    def start(self) -> None:
        name = str(next(self.names))
        models = ReplicaModels(self.open, Counters())
        models.set_desired(DesiredState(0, ModelSource(0, "a"), configured=ConfiguredModels("a")))
        self.report(name, models)
        while not models.ready or models.incomplete:
            self.disturb()
            models.switch()
            self.report(name, models)
        self.replicas[name] = models
        self.cluster.calls[name] = lambda method, desired: (
            name,
            self.call(name, models, method, desired),
        )

    def call(self, name: str, models: ReplicaModels, method: str, desired: DesiredState) -> str:
        if method != "switch":
            return getattr(models, method)(desired) or ""
        models.set_desired(desired)
        cause = models.switch()
        self.report(name, models)
        return cause

    def report(self, name: str, models: ReplicaModels) -> None:
        if name in self.dead:
            return
        desired, _ = self.cluster.register.report(
            name,
            models.desired,  # type: ignore[arg-type]
            models.status(),
            Snapshot(()),
            None,
        )
        models.set_desired(desired)
        model = models.status().model
        assert model is None or model.path in ("a", "b", "c")  # only what was accepted answers

    def report_all(self) -> None:
        for name, models in list(self.replicas.items()):
            self.report(name, models)
            if models.incomplete:
                self.call(name, models, "switch", models.desired)

    def disturb(self) -> None:
        if self.budget == 0 or self.depth > 1 or self.random.random() < 0.8:
            return
        self.budget, self.depth = self.budget - 1, self.depth + 1
        self.random.choice((self.change, self.start, self.kill, self.restart, self.report_all))()
        self.depth -= 1

    def kill(self) -> None:
        if len(self.replicas) > 1:
            name = self.random.choice(list(self.replicas))
            self.dead.add(name)
            del self.replicas[name], self.cluster.calls[name]
            if name in self.cluster.register._seen_s:  # as after REPORT_TIMEOUT_S
                self.cluster.register._seen_s[name] = -REPORT_TIMEOUT_S
        self.start()

    def restart(self) -> None:
        """Restart the register. A starting replica may report first."""
        self.cluster.register = Register()
        if self.random.random() < 0.5:
            self.start()

    def change(self) -> None:
        path = self.random.choice(("b", "b", "c", "damaged", "other columns"))
        with contextlib.suppress(InputError):
            Control("rayrec").change(
                self.random.choice((lambda desired: swap_model(desired, path), revert_model)),
                timeout_s=0.1,
            )


@pytest.mark.parametrize("first_seed", [0, 100])
def test_any_event_order_converges_to_one_model(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, first_seed: int
) -> None:
    monkeypatch.setattr(
        replica_models,
        "BatchScorer",
        lambda model, _, histories: SimpleNamespace(model=model, warm=lambda: None),
    )
    monkeypatch.setattr(replica_models, "RETRY_S", -1.0)
    ends = set()
    for seed in range(first_seed, first_seed + 100):
        world = World(cluster, seed)
        clock = SimpleNamespace(
            monotonic=time.monotonic,
            time_ns=time.time_ns,
            sleep=lambda _, world=world: world.report_all(),
        )
        monkeypatch.setattr(control, "time", clock)  # not the module, which other threads use, too
        for _ in range(3):
            world.change()
        cluster.before_call = lambda: None
        for _ in range(60):
            world.report_all()
        desired: Any = cluster.register.desired()
        assert {models.status().model for models in world.replicas.values()} == {desired.model}
        assert cluster.register.waiting(desired) == ([], "")
        ends.add(desired.model.path)
    assert ends == {"a", "b", "c"}


class Replicas:
    """Replicas of a deployment, without Ray Serve."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self.loading = list[str]()
        self._monkeypatch = monkeypatch
        self.slow: dict[str, threading.Event] = {}
        """Set once a model may be loaded, by path."""
        monkeypatch.setattr(
            "rayrec.inference.model.open_served", lambda path, device, own: self._load(path)
        )
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)

    def _load(self, path: str) -> ServedModel:
        self.loading.append(path)
        if path in self.slow:
            assert self.slow[path].wait(60)
        return load(path)

    def start(
        self, name: str, *, announced: bool = True, model: str = "a", **configured: Any
    ) -> deployment._Replica:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), app_name="rayrec")
        self._monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
        replica = deployment._Replica(ServeConfig(), None, None, announced)
        asyncio.run(replica.reconfigure({"model": model, **configured}))
        asyncio.run(replica.check_health())
        self.reach(name, replica)
        return replica

    def reach(self, name: str, replica: deployment._Replica) -> None:
        self.cluster.calls[name] = lambda method, desired: asyncio.run(
            getattr(replica, method)(desired)
        )

    def swap(self, path: str) -> dict[str, Any]:
        return Control("rayrec").change(lambda desired: swap_model(desired, path))

    def begin(self, change: Callable[..., object], *arguments: str) -> threading.Thread:
        """Begin a change, and return once a replica loads a model for it."""
        before = len(self.loading)
        thread = threading.Thread(target=change, args=arguments)
        thread.start()
        until(lambda: len(self.loading) > before)
        return thread


@pytest.fixture
def replicas(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    yield Replicas(cluster, monkeypatch)
    for thread in threading.enumerate():  # while Ray is still the fixture's
        if thread.name == "models":
            thread.join(60)


@pytest.fixture
def served(replicas: Replicas) -> Replicas:
    """Replicas, of which the first has started."""
    replicas.start("first")
    return replicas


def test_swap_rollback_and_shadow(served: Replicas) -> None:
    served.start("second")
    server = Control("rayrec")
    rejects("no other model", server.change, revert_model)
    result = served.swap("b")
    assert (result["model"], result["previous"], result["shadow"]) == ("b", "a", None)
    assert served.cluster.versions() == [MODELS["b"].version] * 2
    for path, cause in (
        ("other columns", "schemas differ in"),
        ("gone", r"gone: damaged \(the current model stays\)"),
    ):
        rejects(cause, served.swap, path)
        rejects(cause, server.change, lambda desired, path=path: change_shadow(desired, path))
    assert len(server.call_register("describe")["failures"]) == 4
    assert (server.change(revert_model)["model"], server.change(revert_model)["model"]) == (
        "a",
        "b",
    )
    result = server.change(lambda desired: change_shadow(desired, "c"))
    assert result["shadow"] == "c"
    assert {replica["shadow"] for replica in result["replicas"].values()} == {MODELS["c"].version}
    result = server.change(lambda desired: change_shadow(desired, None))
    assert [result["shadow"], *(replica["shadow"] for replica in result["replicas"].values())] == [
        None
    ] * 3


def test_register_rejects_second_change(served: Replicas) -> None:
    register = served.cluster.register
    desired = register.desired()
    first = swap_model(desired, "b")
    second = swap_model(desired, "c")
    assert register.accept(first, desired.serial)
    assert not register.accept(second, desired.serial)
    assert register.accept(first, desired.serial)  # asked again, as after a lost answer
    assert register.desired() == first


def test_replica_started_during_swap_has_new_model(served: Replicas) -> None:
    served.slow["a"] = threading.Event()
    thread = served.begin(served.start, "second")
    swap = served.begin(served.swap, "b")
    served.slow["a"].set()
    thread.join(60)
    swap.join(60)
    assert served.cluster.versions() == [MODELS["b"].version] * 2


def test_replica_started_during_rejected_swap_keeps_model(served: Replicas) -> None:
    served.slow["a"] = threading.Event()
    thread = served.begin(served.start, "second")
    for path in ("other columns", "gone"):
        rejects(r"schemas differ|damaged", served.swap, path)
    served.slow["a"].set()
    thread.join(60)
    assert served.cluster.versions() == [MODELS["a"].version] * 2


def test_unreached_replica_catches_up(replicas: Replicas) -> None:
    late = replicas.start("first")
    replicas.start("second")
    del replicas.cluster.calls["first"]  # until another process sees it
    swap = replicas.begin(replicas.swap, "b")
    assert late._models.model is MODELS["a"]
    replicas.reach("first", late)
    swap.join(60)
    assert replicas.cluster.versions() == [MODELS["b"].version] * 2
    desired: Any = replicas.cluster.register.desired()
    # and the process that asked for it died
    replicas.cluster.register.accept(swap_model(desired, "c"), desired.serial)
    asyncio.run(late.check_health())
    until(lambda: late._models.model is MODELS["c"])


def test_change_waits_for_unswitched_replica(replicas: Replicas) -> None:
    late = replicas.start("first")
    call = replicas.cluster.calls["first"]
    replicas.cluster.calls["first"] = lambda method, desired: (
        DIED if method == "switch" else call(method, desired)
    )
    change = partial(
        Control("rayrec").change, lambda desired: swap_model(desired, "b"), timeout_s=0.3
    )
    rejects("not all replicas have switched within 0.3 s", change)
    assert late._models.model is MODELS["a"]


def test_announcement_outlives_register() -> None:
    """A replica that missed the announcement may report first to a restarted register."""
    register = Register()
    before = DesiredState(1, A, announced=False)
    announced = [
        register.report("one", desired, Status(), Snapshot(()), None)[0].announced
        for desired in (before, control.announce(before), before)
    ]
    assert announced == [False, True, True]


def test_unloadable_first_model_is_reported(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    # for which a change waits for the replica that did not start
    monkeypatch.setattr(control, "REPORT_TIMEOUT_S", 0.5)
    rejects("gone: damaged", replicas.start, "first", model="gone")
    assert replicas.cluster.register.describe()["failures"] == {"0": "gone: damaged"}
    # of a configuration that was corrected
    assert replicas.start("second", model="b")._models.model is MODELS["b"]
    replicas.start("third", model="b", shadow="gone")
    result = replicas.cluster.register.describe()
    assert (result["model"], result["shadow"]) == ("b", None)


def test_configuration_applies_once_and_keeps_swaps(replicas: Replicas) -> None:
    both = [replicas.start("first"), replicas.start("second")]

    def configure(model: str, shadow: str | None = None) -> None:
        for replica in both:
            asyncio.run(replica.reconfigure({"model": model, "shadow": shadow}))

        def is_wanted() -> bool:
            for replica in both:
                asyncio.run(replica.check_health())
            return getattr(
                replicas.cluster.register.desired(), "configured", None
            ) == ConfiguredModels(model, shadow)

        until(is_wanted)

    def have_switched() -> bool:
        for replica in both:  # A report that was older than the switch may have come after it
            asyncio.run(replica.check_health())
        return replicas.cluster.versions() == [MODELS["b"].version] * 2

    configure("b")
    until(have_switched)
    assert replicas.loading.count("b") == 2
    replicas.swap("c")
    replicas.start("third", model="b")
    asyncio.run(both[0].check_health())
    assert replicas.cluster.versions() == [MODELS["c"].version] * 3
    configure("gone", shadow="c")
    assert replicas.cluster.versions() == [MODELS["c"].version] * 3
    assert "gone: damaged" in str(replicas.cluster.register.describe()["failures"])
    configure("gone", shadow="b")
    until(lambda: replicas.cluster.register.describe()["shadow"] == "b")


def test_restarted_register_recovers_from_replicas(replicas: Replicas) -> None:
    first = replicas.start("first")
    replicas.swap("b")
    replicas.cluster.register = Register()
    assert Control("rayrec").call_register("desired") is None
    replicas.start("second")  # it knows of nothing but the configuration
    asyncio.run(first.check_health())
    assert Control("rayrec").change(revert_model)["model"] == "a"
    assert set(replicas.cluster.versions()) == {MODELS["a"].version}


def test_replicas_have_time_of_change(served: Replicas) -> None:
    served.swap("b")
    rejects("damaged", served.swap, "gone")
    assert {method for method, _ in served.cluster.timeouts_s} == {"load", "switch", "drop"}
    assert all(0 < timeout_s <= control.CHANGE_S for _, timeout_s in served.cluster.timeouts_s)
    assert all(
        timeout_s > control.CHANGE_S / 2
        for method, timeout_s in served.cluster.timeouts_s
        if method != "drop"
    )


def test_unresponsive_replica_rejects_change(served: Replicas) -> None:
    lost: Any = TimeoutError
    served.cluster.calls["second"] = lambda method, desired: lost()
    rejects("load: a replica did not answer in time", served.swap, "b")
    assert served.cluster.versions() == [MODELS["a"].version]


@pytest.mark.parametrize("failing", ["drop", "fail"])
def test_failed_cleanup_keeps_first_error(
    served: Replicas, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A replica or the register that is lost meanwhile neither hides the cause nor delays it by
    minutes.
    """
    call = served.cluster.calls["first"]
    limits_s: list[float] = []
    if failing == "drop":
        lost: Any = TimeoutError()
        served.cluster.calls["first"] = lambda method, desired: (
            lost if method == "drop" else call(method, desired)
        )
    else:
        call_register = Control.call_register

        def fail(
            self: Control, method: str, *arguments: Any, timeout_s: float = control.CALL_S
        ) -> Any:
            if method == "fail":
                limits_s.append(timeout_s)
                raise ray.exceptions.GetTimeoutError
            return call_register(self, method, *arguments, timeout_s=timeout_s)

        monkeypatch.setattr(Control, "call_register", fail)
    rejects(r"^gone: damaged \(the current model stays\)$", served.swap, "gone")
    limits_s += [timeout_s for method, timeout_s in served.cluster.timeouts_s if method == "drop"]
    assert limits_s
    assert max(limits_s) <= 5


def test_unexpected_error_of_change_outlives_failed_cleanup(served: Replicas) -> None:
    errors: Any = {"load": RuntimeError("no space"), "drop": RuntimeError("gone")}
    served.cluster.calls["first"] = lambda method, desired: errors[method]
    with pytest.raises(RuntimeError, match="no space"):
        served.swap("b")


def test_successful_change_omits_earlier_failures(served: Replicas) -> None:
    rejects("damaged", served.swap, "gone")
    server = Control("rayrec")
    assert served.swap("b")["failures"] == {}
    assert server.change(revert_model)["failures"] == {}
    assert server.change(lambda desired: change_shadow(desired, "c"))["failures"] == {}
    # For the server's log
    assert list(server.call_register("describe")["failures"].values()) == ["gone: damaged"]


def test_stopped_server_raises(cluster: Cluster) -> None:
    cluster.running = False
    rejects("desired: the server was stopped", Control("rayrec").change, revert_model)


def test_lost_leader_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica applies a new configuration to all, the first that reports it."""
    now_s = [0.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now_s[0])
    register = Register()
    desired = DesiredState(0, A, configured=ConfiguredModels("a"))

    def leads(name: str) -> bool:
        return register.report(name, desired, Status(), Snapshot(()), ConfiguredModels("b"))[1]

    assert [leads("one"), leads("two"), leads("one")] == [True, False, True]
    now_s[0] = REPORT_TIMEOUT_S
    assert not leads("two")
    now_s[0] += 1
    assert [leads("two"), leads("one")] == [True, False]


def test_counters_outlive_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now_s[0])
    register = Register()
    counters = Counters()
    two = Counters()
    counters.waiting_rows.set(3)
    counters.rows.labels("v").inc(5)
    counters.batch_rows.observe(5)
    two.rows.labels("v").inc(10)
    rows = ("rayrec_serve_rows_total", (("model", "v"),))
    waiting = ("rayrec_serve_waiting_rows", ())
    batches = [
        ("rayrec_serve_batch_rows_bucket", (("le", bound),)) for bound in ("4.0", "16.0", "+Inf")
    ]

    def report(name: str, counted: Counters) -> None:
        sent = pickle.loads(pickle.dumps(counted.snapshot()))
        register.report(name, DesiredState(0, ModelSource(0, "a")), Status(), sent, None)

    report("one", counters)
    now_s[0] = 1.0
    report("three", counters)
    result = sample_values(register.collect("two", two.snapshot()))
    assert (result[rows], result[waiting]) == (20, 6)
    assert [result[key] for key in batches] == [0, 2, 2]
    now_s[0] = 2 + REPORT_TIMEOUT_S
    report("two", two)
    result = sample_values(register.collect("two", two.snapshot()))
    assert (result[rows], result[waiting]) == (20, 0)
    assert set(register.describe()["replicas"]) == {"two"}
    report("one", two)  # it was busy, and counts on
    assert sample_values(register.collect("two", two.snapshot()))[rows] == 25


def test_register_pickles_without_rayrec() -> None:
    actor = ray_compat.shared_actor(REGISTER, Register, started_serve=True)["deployment_actors"][0]
    code = (
        "import pickle, sys; pickle.loads(sys.stdin.buffer.read()); assert 'rayrec' not in "
        "sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=actor._serialized_actor_class, check=True, timeout=120
    )


def test_announcement_reaches_late_replicas(replicas: Replicas) -> None:
    first = replicas.start("first", announced=False)
    assert not first._models.announced
    server = Control("rayrec")
    assert server.change(control.announce)["model"] == "a"
    late = replicas.start("second", announced=False)
    assert (first._models.announced, late._models.announced) == (True, True)
    assert replicas.loading == ["a", "a"]
    assert replicas.swap("b")["previous"] == "a"
    assert first._models.announced


# -- Model changes of a replica while it answers: swap, rollback, shadow
TEXT = b"".join(row_text(number) for number in range(20))
A = ModelSource(0, "a")
B = ModelSource(1, "b")


def _switch(models: ReplicaModels, desired: DesiredState) -> str:
    models.set_desired(desired)
    return models.switch()


def _host(*, load: object = load) -> tuple[ReplicaModels, Counters]:
    counters = Counters()
    models = ReplicaModels(load, counters)  # type: ignore[arg-type]
    assert not _switch(models, DesiredState(0, A))
    return models, counters


def test_swap_under_load_loses_no_request() -> None:
    models, counters = _host(load=lambda path: time.sleep(0.2) or load(path))
    app = ScoringApp(models, counters, config=ServeConfig())
    expected = {model.version: logits_of(model, TEXT) for model in MODELS.values()}
    done = threading.Event()

    def swap() -> None:
        for serial, name in enumerate("bcabc", start=1):
            _switch(models, DesiredState(serial, ModelSource(serial, name)))
        done.set()

    answers: list[dict[str, Any]] = []

    async def load_it() -> None:
        async def client() -> None:
            while not done.is_set():
                reply = await post_async(app, TEXT)
                assert reply.status == 200
                answers.append(reply.json())

        threading.Thread(target=swap).start()
        await asyncio.gather(*(client() for _ in range(8)))

    asyncio.run(load_it())
    assert {answer["model"] for answer in answers} == set(expected)
    for answer in answers:
        np.testing.assert_allclose(
            np.array(answer["logits"], np.float32), expected[answer["model"]], atol=1e-5
        )
    app.close()


def test_readiness_waits_for_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.serve.app._ANNOUNCEMENT_S", 0.1)
    models = ReplicaModels(load, Counters())
    counters = Counters()
    app = ScoringApp(models, counters, config=ServeConfig())
    assert ask(app, "GET", "/readyz").status == 503
    assert ask(app, "GET", "/healthz").json()["model"] is None
    assert not _switch(models, DesiredState(0, A, announced=False))
    early = ask(app, "GET", "/readyz")
    assert (early.status, early.headers["retry-after"]) == (503, "1")
    assert ask(app, "GET", "/healthz").json()["model"] == MODELS["a"].version
    assert post(app, TEXT).status == 200
    monkeypatch.setattr("rayrec.serve.app._ANNOUNCEMENT_S", 60.0)
    announced = threading.Timer(0.1, models.set_desired, [DesiredState(1, A)])
    announced.start()
    assert ask(app, "GET", "/readyz").status == 200
    announced.join()
    app.close()


def test_loaded_model_answers_after_switch() -> None:
    models, _ = _host()
    assert not models.load(DesiredState(1, B))
    assert models.model is MODELS["a"]
    models.drop(DesiredState(1, B))
    assert models.status().model == A


def test_started_replica_checks_schema() -> None:
    models = ReplicaModels(load, Counters())
    schema = MODELS["a"].preprocessor.schema
    assert "schemas differ in" in _switch(
        models, DesiredState(2, ModelSource(1, "other columns"), schema=schema)
    )
    assert not models.ready
    assert "schemas differ in" in _switch(
        models, DesiredState(3, A, schema=schema, shadow=ModelSource(3, "other columns"))
    )
    assert models.model is MODELS["a"]


def test_failed_model_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    result = dict(MODELS)
    models, _ = _host(load=lambda path: result[path])
    model = result.pop("b")
    assert _switch(models, DesiredState(1, B)) == "'b'"
    assert models.model is MODELS["a"]
    assert not models.incomplete  # for some seconds
    monkeypatch.setattr(replica_models, "RETRY_S", -1.0)
    assert models.incomplete
    result["b"] = model
    assert not models.switch()
    assert models.model is MODELS["b"]
    assert not models.incomplete
    assert models.status().failed is None


def test_older_state_does_not_replace_model() -> None:
    models, _ = _host()
    assert not _switch(models, DesiredState(2, ModelSource(2, "c"), previous=B))
    assert not _switch(models, DesiredState(1, B, previous=A))
    assert models.model is MODELS["c"]


def test_rollback_needs_no_loading() -> None:
    opened: list[str] = []
    models, _ = _host(load=lambda path: opened.append(path) or load(path))
    for serial, (model, previous) in enumerate(((B, A), (A, B), (B, A)), start=1):
        _switch(models, DesiredState(serial, model, previous=previous))
    assert models.model is MODELS["b"]
    assert opened == ["a", "b"]
    # wished for again: the folder may hold something else now
    _switch(models, DesiredState(4, ModelSource(4, "b")))
    assert opened == ["a", "b", "b"]


def test_rollbacks_and_failures_are_not_counted_as_swaps() -> None:
    models, counters = _host()
    desired = swap_model(DesiredState(0, A), "b")
    assert not _switch(models, desired)
    desired = revert_model(desired)
    assert not _switch(models, desired)
    desired = change_shadow(desired, None)
    assert not _switch(models, desired)  # The same model
    desired = swap_model(desired, "c")
    assert not _switch(models, desired)
    assert _switch(models, swap_model(desired, "gone"))
    counted = sample_values(counters.snapshot())
    outcomes = {
        labels[0][1]: value
        for (name, labels), value in counted.items()
        if name == "rayrec_serve_swaps_total"
    }
    assert outcomes == {"done": 2, "rolled_back": 1, "failed": 1}


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        pytest.param(RuntimeError("index out of range"), True, id="bug"),
        pytest.param(InputError("gone: damaged"), False, id="input"),
    ],
)
def test_bug_in_loading_leaves_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    models, _ = _host(load=lambda path: raising(error)() if path == "b" else load(path))
    assert _switch(models, DesiredState(1, B)) == str(error)
    records = [record for record in caplog.records if record.name == replica_models.__name__]
    assert [record.exc_info is not None and record.exc_info[1] is error for record in records] == [
        True
    ] * is_logged
    assert models.model is MODELS["a"]


def test_shadow_counts_score_differences() -> None:
    models, counters = _host()
    app = ScoringApp(models, counters, config=ServeConfig())
    plain = post(app, TEXT).json()
    _switch(models, DesiredState(1, A, shadow=B))
    assert post(app, TEXT).json() == plain
    for _ in range(3):
        post(app, TEXT)
    version = MODELS["b"].version
    name = "rayrec_serve_shadow_score_difference"
    until(lambda: sample_values(counters.snapshot())[f"{name}_count", ()] == 80)  # The last one
    counted = sample_values(counters.snapshot())
    scores = [1 / (1 + np.exp(-logits_of(MODELS[name], TEXT).astype(np.float64))) for name in "ab"]
    differences = np.tile(np.abs(scores[0] - scores[1]), 4)
    assert counted[f"{name}_sum", ()] == pytest.approx(differences.sum(), rel=1e-3)
    assert counted["rayrec_serve_shadow_rows_total", (("model", version),)] == 80
    assert counted[f"{name}_bucket", (("le", "0.01"),)] == np.count_nonzero(differences <= 0.01)
    assert (
        f'rayrec_serve_shadow_rows_total{{model="{version}"}} 80'
        in ask(app, "GET", "/metrics").body.decode()
    )
    _switch(models, DesiredState(2, A))
    assert models.status().shadow is None
    app.close()


def test_slow_shadow_drops_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    models, counters = _host()
    go_on = threading.Event()
    monkeypatch.setattr("rayrec.serve.replica_models.BatchScorer.score", lambda *_: go_on.wait(30))
    _switch(models, DesiredState(1, A, shadow=B))
    app = ScoringApp(models, counters, config=ServeConfig())
    for _ in range(20):
        assert post(app, TEXT).status == 200
    dropped = sample_values(counters.snapshot())["rayrec_serve_shadow_dropped_rows_total", ()]
    assert dropped in (20 * 11, 20 * 12)  # 8 wait, and one may be at work
    go_on.set()
    app.close()


def test_waiting_shadow_rows_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_models, "_SHADOW_BYTES", 100)
    go_on = threading.Event()
    counters = Counters()
    scorer: Any = SimpleNamespace(
        model=SimpleNamespace(version="b"), score=lambda raw: go_on.wait(60) and np.zeros(2)
    )
    loaded = replica_models.LoadedModel(ModelSource(1, "b"), scorer.model, scorer)
    shadow = replica_models.Shadow(loaded, counters)
    raw: Any = SimpleNamespace(nbytes=40)
    shadow.offer(raw, np.zeros(2))
    until(lambda: not shadow._waiting_bytes)  # being scored
    for _ in range(5):
        shadow.offer(raw, np.zeros(2))
    assert sample_values(counters.snapshot())["rayrec_serve_shadow_dropped_rows_total", ()] == 3 * 2
    go_on.set()
    shadow.close()


# -- Side tables that belong to the version of a model
ROWS = {"rows": [{"user": n % 3, "item": n} for n in range(6)]}


class Shop:
    """Model `shop` with a table of items, as trained and in other files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained = write_items(folder / "items.csv", 1)
        self.newer = write_items(folder / "newer.csv", 2)
        monkeypatch.setitem(MODELS, "shop", shop_model(self.trained))
        monkeypatch.setitem(MODELS, "next shop", shop_model(self.newer, seed=8))
        monkeypatch.setattr(control, "stored_schema", self.schema)
        monkeypatch.setattr(
            control, "_reached", lambda address: contextlib.nullcontext(Control("rayrec"))
        )

    def schema(self, path: str) -> Schema:
        return MODELS[path].preprocessor.schema

    def pinned(self, path: str) -> tuple[NamedTable, ...]:
        return swapped_tables(self.schema("shop"), {"items": path})

    def logits(self, table: str, *, seed: int = 7) -> np.ndarray:
        """Return what a model answers that was trained with a table."""
        scorer = BatchScorer(shop_model(table, seed=seed), Counters())
        return scorer.score(scorer.read([RequestBody("json", 6, 0, rows=ROWS["rows"])]))

    def swap(self, path: str) -> dict[str, Any]:
        return control.swap_table_files({"items": path}, address=None)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    return Shop(tmp_path, monkeypatch)


def check_answers(replica: deployment._Replica, expected: np.ndarray) -> None:
    answer = score(replica._scoring, ROWS)
    np.testing.assert_array_equal(np.array(answer["logits"], np.float32), expected)


def test_tables_are_swapped_under_load(shop: Shop, replicas: Replicas) -> None:
    both = [replicas.start("first", model="shop"), replicas.start("second", model="shop")]
    version = MODELS["shop"].version
    first = shop.logits(shop.trained)
    second = shop.logits(shop.newer)
    assert np.abs(first - second).max() > 0.01
    swapped = f"{version}-items-{shop.pinned(shop.newer)[0].short_content}"
    done = threading.Event()
    versions: list[str] = []

    def change() -> None:
        try:
            for _ in range(3):
                versions.append(shop.swap(shop.newer)["version"])
                versions.append(control.roll_back(address=None)["version"])
        finally:
            done.set()

    answers: list[dict[str, Any]] = []

    async def load_both() -> None:
        async def client(replica: deployment._Replica) -> None:
            while not done.is_set():
                reply = await post_async(replica._scoring, ROWS)
                assert reply.status == 200
                answers.append(reply.json())

        threading.Thread(target=change).start()
        await asyncio.gather(*(client(replica) for replica in both * 4))

    asyncio.run(load_both())
    assert versions == [swapped, version] * 3
    expected = {version: first, swapped: second}
    assert {answer["model"] for answer in answers} == set(expected)
    for answer in answers:
        logits = np.array(answer["logits"], np.float32)
        np.testing.assert_allclose(logits, expected[answer["model"]], atol=1e-6)
    assert {answer["preprocessor"] for answer in answers} == {MODELS["shop"].preprocessor_hash}
    assert replicas.loading == ["shop", "shop"]  # Once by each


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item,category\n1,a\n", "column price not found"),
        ("id,category,price\n1,a,3\n", "column item not found"),
        ("item,category,price\n1,a,3\n1,b,4\n", "repeat a key"),
        ("item,category,price\n", "has no rows"),
    ],
)
def test_table_without_looked_up_column_is_rejected(
    shop: Shop, replicas: Replicas, tmp_path: Path, text: str, message: str
) -> None:
    replica = replicas.start("first", model="shop")
    (tmp_path / "bad.csv").write_text(text)
    rejects(rf"tables: .*bad\.csv: .*{message}", shop.swap, str(tmp_path / "bad.csv"))
    assert replicas.cluster.versions() == [MODELS["shop"].version]
    assert replicas.cluster.timeouts_s == []  # No replica was asked to load it
    check_answers(replica, shop.logits(shop.trained))


def test_unknown_and_missing_tables_are_rejected(shop: Shop, replicas: Replicas) -> None:
    replicas.start("first", model="shop")
    swap = partial(control.swap_table_files, address=None)
    rejects(r"no table item; did you mean 'items'", swap, {"item": shop.newer})
    rejects(r"gone\.csv", shop.swap, "gone.csv")
    assert replicas.cluster.versions() == [MODELS["shop"].version]


def test_types_of_table_are_checked_before_swap(shop: Shop, tmp_path: Path) -> None:
    lists = pa.table({"item": [1, 2], "category": [["a"], ["b"]], "price": [1, 2]})
    pq.write_table(lists, tmp_path / "lists.parquet")
    rejects(
        "tables: items: column category is of type .*list", shop.pinned, f"{tmp_path}/lists.parquet"
    )


def test_failed_load_in_one_replica_rejects_table(shop: Shop, replicas: Replicas) -> None:
    first = replicas.start("first", model="shop")
    replicas.start("second", model="shop")
    fine = replicas.cluster.calls["second"]
    replicas.cluster.calls["second"] = lambda method, desired: (
        ("second", "no space left") if method == "load" else fine(method, desired)
    )
    rejects(r"^no space left \(the current model stays\)$", shop.swap, shop.newer)
    assert replicas.cluster.versions() == [MODELS["shop"].version] * 2
    assert first._models._standby is None
    check_answers(first, shop.logits(shop.trained))


def test_restarted_replica_has_swapped_table(shop: Shop, replicas: Replicas) -> None:
    replicas.start("first", model="shop")
    swapped = shop.logits(shop.newer)
    version = shop.swap(shop.newer)["version"]
    # Both files become others, as if the next ones were being prepared
    for path in (shop.trained, shop.newer):
        write_items(Path(path), 3)
    lookups._opened.cache_clear()  # As in another process
    check_answers(replicas.start("second", model="shop"), swapped)
    assert replicas.cluster.versions() == [version] * 2


def test_rollback_finds_table_of_edited_file(shop: Shop, replicas: Replicas) -> None:
    first = replicas.start("first", model="shop")
    trained = shop.logits(shop.trained)
    write_items(Path(shop.trained), 2)
    swapped = shop.swap(shop.trained)  # The same path
    assert swapped["tables"] == {"items": shop.pinned(shop.newer)[0].short_content}
    check_answers(first, shop.logits(shop.newer))
    rejects("damaged", replicas.swap, "gone")  # Frees the previous model
    lookups._opened.cache_clear()
    assert control.roll_back(address=None)["version"] == MODELS["shop"].version
    check_answers(first, trained)


def test_edited_table_needs_swap_at_start(shop: Shop, replicas: Replicas) -> None:
    pinned = shop.pinned(shop.newer)
    write_items(Path(shop.trained), 3)
    models = ReplicaModels(load, Counters())
    cause = _switch(models, DesiredState(0, ModelSource(0, "shop")))
    assert "items.csv: changed since the model was trained" in cause
    assert "--swap-table" in cause
    assert not models.ready
    assert not _switch(models, DesiredState(0, ModelSource(0, "shop", pinned)))
    assert models.model.version.startswith(f"{MODELS['shop'].version}-items-")
    rejects("changed since", replicas.start, "first", model="shop")
    expected = shop.logits(shop.trained)
    check_answers(replicas.start("next", model="shop", tables={"items": shop.trained}), expected)


def test_swapped_model_has_trained_tables(shop: Shop, replicas: Replicas) -> None:
    first = replicas.start("first", model="shop")
    shop.swap(shop.newer)
    assert control.swap("next shop", address=None)["version"] == MODELS["next shop"].version
    check_answers(first, shop.logits(shop.newer, seed=8))
    both = control.swap("next shop", tables={"items": shop.trained}, address=None)
    assert both["version"] == f"{MODELS['next shop'].version}-items-{both['tables']['items']}"
    check_answers(first, shop.logits(shop.trained, seed=8))
    write_items(Path(shop.newer), 3)
    rejects("newer.csv: changed since", control.swap, "next shop", address=None)
    check_answers(first, shop.logits(shop.trained, seed=8))


def test_second_table_swap_keeps_first(shop: Shop) -> None:
    (items,) = shop.pinned(shop.newer)
    users = items.replace(name="users", path="users.csv")
    desired = swap_tables(DesiredState(4, ModelSource(3, "shop", (users,))), [items])
    assert desired.model == ModelSource(desired.serial, "shop", (users, items), origin=3)
    again = swap_tables(desired, [items.replace(path="again.csv")])
    assert [table.path for table in again.model.tables] == ["users.csv", "again.csv"]
    assert again.model.weights == (3, "shop")


def test_followed_run_keeps_swapped_table(shop: Shop) -> None:
    pinned = shop.pinned(shop.newer)
    desired = DesiredState(4, ModelSource(3, "/runs/a/checkpoints/step_1", pinned))
    assert follow_model(desired, "/runs/a/checkpoints/step_2").model.tables == pinned
    assert follow_model(desired, "/runs/b/checkpoints/step_2").model.tables == ()


def test_configured_tables_are_swapped(shop: Shop, replicas: Replicas) -> None:
    configured = {"model": "shop", "shadow": None, "tables": {"items": shop.newer}}
    replica = replicas.start("first", model="shop")
    asyncio.run(replica.reconfigure(configured))

    def logits() -> list[float]:
        asyncio.run(replica.check_health())
        return score(replica._scoring, ROWS)["logits"]

    newer = shop.logits(shop.newer)
    trained = shop.logits(shop.trained)
    until(lambda: np.array_equal(np.array(logits(), np.float32), newer))
    # What was accepted, not what the file has become
    write_items(Path(shop.newer), 3)
    late = replicas.start("second", model="shop", tables={"items": shop.newer})
    check_answers(late, newer)
    for each in (replica, late):
        asyncio.run(each.reconfigure({"model": "shop"}))
    until(lambda: np.array_equal(np.array(logits(), np.float32), trained))


def test_shadow_keeps_trained_table(shop: Shop) -> None:
    counters = Counters()
    models = ReplicaModels(load, counters)
    shadow = ModelSource(0, "shop", shop.pinned(shop.newer))
    assert not _switch(models, DesiredState(0, ModelSource(0, "shop"), shadow=shadow))
    app = ScoringApp(models, counters, config=ServeConfig())
    score(app, ROWS)
    difference = "rayrec_serve_shadow_score_difference"
    until(lambda: sample_values(counters.snapshot())[f"{difference}_count", ()] == 6)
    samples = sample_values(counters.snapshot())
    assert sum(samples[key] for key in samples if key[0] == "rayrec_serve_shadow_rows_total") == 6
    found = samples[f"{difference}_sum", ()]
    first = sigmoid(shop.logits(shop.trained))
    second = sigmoid(shop.logits(shop.newer))
    assert found == pytest.approx(np.abs(first - second).sum(), rel=1e-6)
    app.close()


def test_state_and_metrics_show_tables(shop: Shop, replicas: Replicas) -> None:
    replica = replicas.start("first", model="shop")
    for path in (shop.trained, shop.newer):
        shop.swap(path)
        content = shop.pinned(path)[0].short_content
        state = ask(replica._scoring, "GET", "/readyz").json()
        assert state["tables"] == {"items": content}
        samples = sample_values(replica._scoring.snapshot())
        gauges = {
            labels: value
            for (name, labels), value in samples.items()
            if name == "rayrec_serve_tables"
        }
        assert gauges == {(("table", "items"), ("content", content)): 1.0}
