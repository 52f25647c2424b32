"""Start of a server, its URL, the run that it follows, and Ray Serve's builder."""

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from builders.faults import raising, rejects
from hosts.ports import free_ports

from rayrec.checkpoint import step_folder
from rayrec.checkpoint.format import MANIFEST, VERSION, seal
from rayrec.commands.serving import serve
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.serve import build, control, server
from rayrec.serve.config import ServeConfig, ServerConfig
from rayrec.serve.control import DesiredState, ModelSource
from rayrec.serve.listener import bind, lock_port
from rayrec.serve.server import ServeInstance, choose, first_answering, settle, urls
from rayrec.storage import write_json


def _instance(*applications: str, with_proxies: bool = True) -> ServeInstance:
    return ServeInstance(
        with_proxies, "0.0.0.0", 9000, ("10.0.0.1",), ("10.0.0.2", "10.0.0.3"), applications
    )


@pytest.mark.parametrize(
    ("asked", "instance", "private_ray", "ingress", "port"),
    [
        pytest.param("auto", None, True, "direct", 8000, id="auto"),
        pytest.param("auto", None, False, "serve", 8000, id="auto-None"),
        pytest.param("auto", _instance("other"), False, "serve", 9000, id="auto-_instance-other"),
        pytest.param(
            "auto",
            _instance("other", with_proxies=False),
            False,
            "direct",
            8000,
            id="auto-_instance-other-with_proxies",
        ),
        pytest.param(
            "auto",
            _instance(with_proxies=False),
            False,
            "serve",
            8000,
            id="auto-_instance-with_proxies-False",
        ),
        pytest.param("serve", _instance(with_proxies=False), False, "serve", 8000, id="serve"),
        pytest.param("direct", _instance("other"), False, "direct", 8000, id="direct"),
    ],
)
def test_ingress_is_resolved_for_cluster(
    asked: str, instance: Any, private_ray: bool, ingress: str, port: int
) -> None:
    settled = settle(ServeConfig(ingress=asked), instance, private_ray=private_ray)
    assert (settled.ingress, settled.port) == (ingress, port)


def test_ingress_conflicts_are_rejected_and_urls_returned() -> None:
    with pytest.raises(InputError, match="without HTTP proxies, for other"):
        settle(
            ServeConfig(ingress="serve"), _instance("other", with_proxies=False), private_ray=False
        )
    rejects(
        "proxies listen at 9000",
        settle,
        ServeConfig(ingress="direct", port=9000),
        _instance("other"),
        private_ray=False,
    )
    assert urls(ServeConfig(ingress="serve", host="::1"), _instance()) == ["http://[::1]:8000"]
    assert urls(ServeConfig(ingress="serve", host="0.0.0.0"), _instance()) == [
        "http://10.0.0.1:8000"
    ]
    direct = ServeConfig(ingress="direct", host="::", port=7000)
    assert urls(direct, _instance()) == ["http://10.0.0.2:7000", "http://10.0.0.3:7000"]


def test_first_answering_url_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    (tmp_path / "healthz").write_text('{"status": "alive", "model": "v1"}')
    with HTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    ) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert first_answering(["http://127.0.0.1:1", url], versions=["v1"]) == url
        rejects("something else answers", first_answering, [url], versions=["v2"], timeout_s=0)
        server.shutdown()
    with pytest.raises(
        InputError, match=r"does not answer at http://127.0.0.1:1 .*refused.*--host 0.0.0.0"
    ):
        first_answering(["http://127.0.0.1:1"], versions=["v1"], timeout_s=0)
    rejects("no replica or proxy has an address", first_answering, [], versions=["v1"], timeout_s=0)


def test_ray_serve_application_is_built() -> None:
    autoscaling = {"min_replicas": 1, "max_replicas": 3}
    deployment = build(
        {"model": "s3://m/a", "autoscaling": autoscaling, "max_rows": 9}
    )._bound_deployment
    assert deployment.user_config == {"model": "s3://m/a", "shadow": None, "tables": {}}
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    default = ServeConfig(ingress="serve", host="0.0.0.0")
    assert deployment.init_args[0] == default.replace(max_rows=9)
    from_text = build(
        {
            "model": "7",
            "replicas": "2",
            "cpus_per_replica": "0.5",
            "token_env": "PATH",
        }
    )._bound_deployment
    assert from_text.num_replicas == 2
    assert from_text.init_args[0] == default.replace(
        replicas=2, cpus_per_replica=0.5, token_env="PATH"
    )
    assert len(from_text.init_args[1]) == 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param({}, "model must be the path", id="model-must-be-the-path"),
        pytest.param(
            {"model": "a", "replica": 2}, "did you mean 'replicas'", id="model-a-replica-2"
        ),
        pytest.param({"model": "a", "replicas": "many"}, "replicas", id="model-a-replicas-many"),
        pytest.param({"model": "a", "port": 80}, "http_options", id="model-a-port-80"),
        pytest.param(
            {"model": "a", "autoscaling": "yes"}, "must be a mapping", id="model-a-autoscaling-yes"
        ),
        pytest.param(
            {"model": "a", "autoscaling": {}, "replicas": 2},
            "must not be set together with replicas",
            id="model-a-autoscaling-replicas-2",
        ),
        pytest.param(
            {"model": "a", "autoscaling": {}, "ingress": "direct"},
            "does not see the requests",
            id="model-a-autoscaling-ingress",
        ),
        pytest.param({"model": "a", "shadow": 3}, "shadow must be", id="model-a-shadow-3"),
    ],
)
def test_invalid_application_is_rejected(args: dict[str, Any], message: str) -> None:
    rejects(message, build, args)


def test_port_has_one_server_until_process_ends() -> None:
    """Replicas of the owner share the port. A second server, or one next to another program, cannot
    use it.
    """
    port = free_ports(1)
    owner = rf"by process {os.getpid()} \(.+\)\. Choose another --port"
    with lock_port("127.0.0.1", port):
        for _ in range(2):
            rejects(f"127.0.0.1:{port}: .*{owner}", lock_port("127.0.0.1", port).__enter__)
        with (
            bind("127.0.0.1", port, shared=True) as one,
            bind("127.0.0.1", port, shared=True) as other,
        ):
            one.listen()
            other.listen()
    with lock_port("127.0.0.1", port):
        pass
    for shared in (False, True):  # a replica that outlived its server, or another program
        with bind("0.0.0.0", port, shared=shared) as other:
            other.listen()
            rejects(owner, lock_port("127.0.0.1", port).__enter__)
    port = free_ports(1)
    child = os.fork()
    if not child:
        with lock_port("127.0.0.1", port):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with lock_port("127.0.0.1", port):
        pass


def test_cluster_with_server_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ray.is_initialized",
        "rayrec.serve.server.resolve_source",
        "rayrec.serve.server.silence_serve_logs",
    ):
        monkeypatch.setattr(name, lambda *_: "run")
    monkeypatch.setattr("rayrec.cluster.connection.connect", lambda *_, **__: "10.0.0.1:6379")
    monkeypatch.setattr(server, "find_instance", _instance)
    context = server.serving(
        "run",
        config=ServeConfig(),
        address=None,
        console=Console(quiet=True),
    )
    rejects(
        "^10.0.0.1:6379: .* already runs .*--swap.*--stop.* --cluster.address 10.0.0.1:6379",
        context.__enter__,
    )


@pytest.mark.parametrize(
    ("value", "host", "allowed", "own"),
    [
        pytest.param("localhost:8000", "127.0.0.1", (), True, id="localhost-8000"),
        pytest.param("LOCALHOST.", "10.0.0.1", (), True, id="LOCALHOST"),
        pytest.param("127.0.0.2:1", "127.0.0.1", (), True, id="127.0.0.2-1"),
        pytest.param("[::1]:8000", "127.0.0.1", (), True, id="1-8000"),
        pytest.param("10.0.0.1:8000", "10.0.0.1", (), True, id="10.0.0.1-8000"),
        pytest.param("10.0.0.2:8000", "10.0.0.1", (), False, id="10.0.0.2-8000"),
        pytest.param("10.0.0.2", "0.0.0.0", (), True, id="10.0.0.2"),
        pytest.param("[fd00::1]:80", "::", (), True, id="fd00-1-80"),
        pytest.param("evil.example", "0.0.0.0", (), False, id="evil.example"),
        pytest.param("evil.example:8000", "127.0.0.1", (), False, id="evil.example-8000"),
        pytest.param("localhost.evil.example", "127.0.0.1", (), False, id="localhost.evil.example"),
        pytest.param("127.0.0.1.evil.example", "0.0.0.0", (), False, id="127.0.0.1.evil.example"),
        pytest.param("localhost@evil.example", "127.0.0.1", (), False, id="localhost-evil.example"),
        pytest.param(
            "localhost, evil.example", "127.0.0.1", (), False, id="localhost-evil.example-127.0.0.1"
        ),
        pytest.param("localhost:8000:1", "127.0.0.1", (), False, id="localhost-8000-1"),
        pytest.param("", "127.0.0.1", ("*",), False, id="127.0.0.1"),
        pytest.param(
            "api.example.org:443", "0.0.0.0", ("API.example.org",), True, id="api.example.org-443"
        ),
        pytest.param("b.example.org", "0.0.0.0", ("*.example.org",), True, id="b.example.org"),
        pytest.param("example.org", "0.0.0.0", ("*.example.org",), False, id="example.org"),
        pytest.param("evilexample.org", "0.0.0.0", ("*.example.org",), False, id="evilexample.org"),
        pytest.param("anything", "127.0.0.1", ("*",), True, id="anything"),
    ],
)
def test_host_header_matches_server_names(
    value: str, host: str, allowed: tuple[Any, ...], own: bool
) -> None:
    assert ServeConfig(host=host, allowed_hosts=allowed).is_allowed_host(value) is own


def test_ray_inherits_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http://a", "a:80", "a/b", "*a", ""):
        rejects("allowed_hosts", ServeConfig, allowed_hosts=(name,))
    ServeConfig(allowed_hosts=("fd00::1", "a", "*", "*.b-c.d"))

    def connect(*_: object, **__: object) -> None:
        raise InputError(f"inherited: {set(os.environ.values())}")

    monkeypatch.setattr(server, "resolve_source", lambda path: path)
    monkeypatch.setattr(server, "silence_serve_logs", lambda: None)
    monkeypatch.setattr("rayrec.cluster.connection.connect", connect)
    monkeypatch.setenv("SERVE_TOKEN", "open sesame")
    config = ServerConfig(token_env="SERVE_TOKEN")
    run = partial(
        server.serve_forever,
        "run",
        config=config,
        address=None,
        console=Console(quiet=True),
        started=print,
    )
    assert "open sesame" not in rejects("inherited: ", run)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        # passed unchanged
        *((address, f"asked for {address}") for address in ("auto", "ray://127.0.0.1:10001")),
        # of a new Ray, which has none
        *((address, r"cluster\.address: needed") for address in (None, "local")),
        *(
            (f"{host}:70000", "no Ray cluster answers there")
            for host in ("127.0.0.1", "localhost", "[::1]")
        ),
        *(
            (f"{host}:PORT", "no Ray cluster answers there")
            for host in ("127.0.0.1", "localhost", "[::1]")
        ),
    ],
)
def test_address_must_be_of_running_cluster(
    monkeypatch: pytest.MonkeyPatch, address: str | None, message: str
) -> None:
    def connect(given: str, **_: object) -> None:
        raise InputError(f"asked for {given}")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it is set by who finds a token
    if message.startswith("asked for"):
        monkeypatch.setattr(control, "silence_serve_logs", lambda: None)
        monkeypatch.setattr("rayrec.cluster.connection.connect", connect)
    rejects(
        message, control.roll_back, address=address and address.replace("PORT", str(free_ports(1)))
    )


@pytest.mark.parametrize(
    ("model", "given", "unused"),
    [
        pytest.param("a", {"swap": True, "shadow": "b"}, "swap: .* Omit shadow", id="a"),
        pytest.param(
            "a",
            {"swap": True, "follow": "best"},
            "swap: .* Omit follow",
            id="a-swap-True-follow-best",
        ),
        pytest.param(
            None, {"rollback": True, "shadow": "b"}, "rollback: .* Omit shadow", id="None"
        ),
        pytest.param(
            None,
            {"no_shadow": True, "shadow": "b"},
            "no_shadow: .* Omit shadow",
            id="None-no_shadow-True-shadow-b",
        ),
        pytest.param(
            None,
            {"stop": True, "port": 81, "replicas": 2},
            "stop: .* Omit port, replicas",
            id="None-stop-True-port-81-replicas-2",
        ),
        pytest.param(
            None,
            {"shadow": "b", "follow": "newest"},
            "shadow: .* Omit follow",
            id="None-shadow-b-follow-newest",
        ),
        pytest.param(
            None,
            {"rollback": True, "stop": True},
            "one at a time, got rollback and stop",
            id="None-rollback-True-stop-True",
        ),
        pytest.param(
            None,
            {"shadow": "b", "swap_table": ("items=b",)},
            "one at a time, got shadow and swap_table",
            id="None-shadow-b-swap_table-items",
        ),
        pytest.param(
            None,
            {"swap_table": ("items=b",), "port": 81},
            "swap_table: .* Omit port",
            id="None-swap_table-items-port-81",
        ),
        pytest.param(
            None,
            {"rollback": True, "swap_table": ("items=b",)},
            "rollback: .* Omit swap_table",
            id="None-rollback-True-swap_table-items",
        ),
        pytest.param(
            None,
            {"swap_table": ("items",)},
            "swap_table: must be NAME=PATH, .* got 'items'",
            id="None-swap_table-without-path",
        ),
        pytest.param(
            "a",
            {"swap_table": ("items=b", "items=c")},
            "one file for each table, got two for items",
            id="a-swap_table-twice",
        ),
        pytest.param("a", {"rollback": True}, "take no model", id="a-rollback-True"),
        pytest.param(None, {"swap": True}, "missing model", id="None-swap-True"),
    ],
)
def test_options_for_running_server_are_rejected(
    model: str | None, given: dict[str, Any], unused: str
) -> None:
    rejects(unused, serve, model, **given)


SOUND: dict[str, Any] = {
    "version": VERSION,
    "files": {},
    "tensors": {},
    "state": {},
    "block_bytes": 1,
    "score": 0.9,
}


def _save(run: Path, step: int, score: float | None, *, without: str = "", **changes: Any) -> str:
    folder = step_folder(str(run), step)
    manifest = {**SOUND, "score": score, **changes}
    write_json(
        f"{folder}/{MANIFEST}",
        seal({name: value for name, value in manifest.items() if name != without}),
    )
    return folder


def test_followed_checkpoint_is_newest_or_best(tmp_path: Path) -> None:
    assert choose(str(tmp_path), "newest") is None
    assert _save(tmp_path, 10, None) == choose(str(tmp_path), "newest")
    assert choose(str(tmp_path), "best") is None
    best = [
        _save(tmp_path, 20, 0.75),
        _save(tmp_path, 30, 0.8),
        _save(tmp_path, 40, 0.8),
    ][-1]
    newest = _save(tmp_path, 50, 0.7)
    assert (choose(str(tmp_path), "best"), choose(str(tmp_path), "newest")) == (best, newest)
    (Path(newest) / "manifest.json").write_text("{")
    assert (choose(str(tmp_path), "newest"), choose(os.path.relpath(tmp_path), "best")) == (
        best,
        best,
    )


def test_following_skips_damaged_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    good = _save(tmp_path, 10, 0.5)
    for step, name in enumerate(("score", "files"), start=20):
        _save(tmp_path, step, 0.9, without=name)
    for step, (name, value) in enumerate(
        (
            ("files", None),
            ("score", "0.9"),
            ("version", 9),
        ),
        start=22,
    ):
        _save(tmp_path, step, **{"score": 0.9, name: value})
    (Path(step_folder(str(tmp_path), 30)) / MANIFEST).mkdir(parents=True)
    watched = Watched("the first", monkeypatch)
    for which in ("newest", "best"):
        assert choose(str(tmp_path), which) == good  # type: ignore[arg-type]
        watched.follow(tmp_path, which)
    assert watched.changes == [good]
    assert capsys.readouterr().err.count("Skipping a checkpoint: ") == 6


class Watched:
    """Fake control of a server, with replicas that load the requested models."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "_RETRY_S", 0.0)
        self.desired = DesiredState(1, ModelSource(1, path))
        self.changes = list[str]()
        self.failures = dict[str, str]()
        self.trouble = list[Exception]()
        self.go_on = threading.Event()
        self.go_on.set()
        watched = server.Server("http://x", self, "x:1")  # type: ignore[arg-type]
        self.watch = server._Watch(watched, Console())

    def call_register(self, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert method == "describe"
        if self.trouble:
            raise self.trouble.pop(0)
        replica = {"model": os.path.basename(self.desired.model.path), "shadow": None}
        return {
            "model": self.desired.model.path,
            "replicas": {"one": replica},
            "failures": dict(self.failures),
        }

    def change(self, changed: Callable[[DesiredState], DesiredState]) -> None:
        assert self.go_on.wait(60)
        new = changed(self.desired)
        self.changes.append(new.model.path)
        if self.trouble:
            error = self.trouble.pop(0)
            if isinstance(error, InputError):
                self.failures[str(new.serial)] = str(error)
            raise error
        self.desired = new

    def follow(
        self, run: str | Path, which: Any = "newest", trouble: tuple[Exception, ...] = ()
    ) -> None:
        """Follow until the change is complete and reported. `trouble` is for the change alone."""
        self.trouble += trouble
        self.watch.follow(str(run), which)
        if self.watch._change is not None:
            self.watch._change[1].exception(60)
        self.trouble = [error for error in self.trouble if error not in trouble]
        assert self.watch.poll()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(_save(tmp_path, 10, None), monkeypatch)


def test_following_switches_to_new_checkpoints(watched: Watched, tmp_path: Path) -> None:
    watch = watched.watch
    first = watched.desired.model.path
    run = os.path.relpath(tmp_path)
    watched.follow(run)
    assert watched.changes == []  # it serves that already, by whatever name
    newest = _save(tmp_path, 20, None)
    watched.go_on.clear()
    for _ in range(3):  # loading takes a while
        watch.follow(run, "newest")
        assert watch.poll()
    watched.go_on.set()
    watched.follow(run)
    assert watched.changes == [newest]
    watched.follow(run)
    watched.desired = control.revert_model(watched.desired)
    assert watch.poll()
    watched.follow(run)  # after a rollback that is what the user wants
    assert (watched.changes, watched.desired.model.path) == ([newest], first)


def test_server_follows_run_until_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 10, None)
    stop = SimpleNamespace(requested=threading.Event(), begin_serving=lambda: None)
    followed: list[tuple[str, str]] = []

    def follow(run: str, which: str) -> None:
        followed.append((run, which))
        stop.requested.set()

    serving = SimpleNamespace(describe=dict, control=None)
    watch = SimpleNamespace(poll=lambda: True, follow=follow)
    monkeypatch.setattr(server, "serving", lambda *_, **__: contextlib.nullcontext(serving))
    monkeypatch.setattr(server, "_stop_request", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(server, "_announced", lambda control: True)
    monkeypatch.setattr(server, "_Watch", lambda *_: watch)
    monkeypatch.setattr(server, "_POLL_EVERY_S", 0.001)
    config = ServerConfig(follow="best")
    server.serve_forever(
        str(tmp_path),
        config=config,
        address=None,
        console=Console(quiet=True),
        started=lambda described: None,
    )
    assert followed == [(str(tmp_path), "best")]


def test_failed_checkpoint_is_retried(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = _save(tmp_path, 20, None)
    for _ in range(10):
        watched.follow(tmp_path, trouble=(InputError("the store was out"),))
    assert watched.changes == [newest] * 4
    assert capsys.readouterr().err.count("Keeping the model: the store was out") == 4


def test_following_survives_outages(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    watch = watched.watch
    for error in (
        OSError("the store was out for 5 s"),
        InputError("access denied"),
        None,
    ):
        monkeypatch.setattr(server, "choose", raising(error) if error else choose)
        for _ in range(3):
            watched.follow(tmp_path)
    newest = _save(tmp_path, 20, None)
    for _ in range(5):
        watched.trouble = [
            ray.exceptions.ActorUnavailableError("it starts again", b"\0" * 16) for _ in range(2)
        ]
        watched.follow(tmp_path)
        watch.follow(str(tmp_path), "newest")  # sees the failure
    watched.trouble = []
    watched.follow(tmp_path)
    assert watched.desired.model.path == newest
    printed = capsys.readouterr().err
    for cause in ("the store was out for 5 s", "access denied"):
        assert printed.count(f"Keeping the model: {cause}") == 1
    watched.trouble = [InputError("describe: the server was stopped")]
    assert not watch.poll()
