"""Where a server can be reached on a cluster, which it says only after something answered there; and Ray Serve's builder."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from hosts.ports import free_ports

from rayrec.config import InputError
from rayrec.serve import build
from rayrec.serve.config import ServeConfig
from rayrec.serve.ingress import ServeInstance, bind, first_answering, held_port, is_own_host, settle, urls


def _instance(*applications: str, with_proxies: bool = True) -> ServeInstance:
    return ServeInstance(with_proxies, "0.0.0.0", 9000, ("10.0.0.1",), ("10.0.0.2", "10.0.0.3"), applications)


@pytest.mark.parametrize(
    ("asked", "instance", "own_ray", "ingress", "port"),
    [
        ("auto", None, True, "direct", 8000),
        ("auto", None, False, "serve", 8000),
        ("auto", _instance("other"), False, "serve", 9000),
        ("auto", _instance("other", with_proxies=False), False, "direct", 8000),
        ("auto", _instance(with_proxies=False), False, "serve", 8000),
        ("serve", _instance(with_proxies=False), False, "serve", 8000),
        ("direct", _instance("other"), False, "direct", 8000),
    ],
)
def test_an_ingress_that_the_cluster_can_have(
    asked: Any, instance: ServeInstance | None, own_ray: bool, ingress: str, port: int
) -> None:
    settled = settle(ServeConfig(ingress=asked), instance, own_ray=own_ray)
    assert (settled.ingress, settled.port) == (ingress, port)


def test_an_ingress_that_it_cannot_have() -> None:
    with pytest.raises(InputError, match="without HTTP proxies, for other"):
        settle(ServeConfig(ingress="serve"), _instance("other", with_proxies=False), own_ray=False)
    with pytest.raises(InputError, match="proxies listen at 9000"):
        settle(ServeConfig(ingress="direct", port=9000), _instance("other"), own_ray=False)


def test_urls() -> None:
    assert urls(ServeConfig(ingress="serve", host="::1"), _instance()) == ["http://[::1]:8000"]
    assert urls(ServeConfig(ingress="serve", host="0.0.0.0"), _instance()) == ["http://10.0.0.1:8000"]
    of_replicas = urls(ServeConfig(ingress="direct", host="::", port=7000), _instance())
    assert of_replicas == ["http://10.0.0.2:7000", "http://10.0.0.3:7000"]


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"status": "ready", "model": "v1"}' if self.path == "/readyz" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_only_what_answers_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), _Ready) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert first_answering(["http://127.0.0.1:1", url], versions=["v1"]) == url
        with pytest.raises(InputError, match="something else answers"):
            first_answering([url], versions=["v2"], timeout_s=0)
        server.shutdown()
    with pytest.raises(InputError, match=r"does not answer at http://127.0.0.1:1 .*refused.*--host 0.0.0.0"):
        first_answering(["http://127.0.0.1:1"], versions=["v1"], timeout_s=0)
    with pytest.raises(InputError, match="no replica or proxy has an address"):
        first_answering([], versions=["v1"], timeout_s=0)


def test_an_application_of_ray_serve() -> None:
    autoscaling = {"min_replicas": 1, "max_replicas": 3}
    deployment = build({"model": "s3://m/a", "autoscaling": autoscaling, "max_rows": 9})._bound_deployment
    assert deployment.user_config == {"model": "s3://m/a", "shadow": None}
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert deployment.init_args[0] == ServeConfig(ingress="serve", max_rows=9, host="0.0.0.0")
    from_text = build({"model": "7", "replicas": "2", "cpus_per_replica": "0.5", "token_env": "PATH"})._bound_deployment
    assert from_text.num_replicas == 2
    assert from_text.init_args[0] == ServeConfig(
        ingress="serve", replicas=2, cpus_per_replica=0.5, token_env="PATH", host="0.0.0.0"
    )
    assert len(from_text.init_args[1]) == 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model must be the path"),
        ({"model": "a", "replica": 2}, "did you mean 'replicas'"),
        ({"model": "a", "replicas": "many"}, "replicas"),
        ({"model": "a", "port": 80}, "http_options"),
        ({"model": "a", "autoscaling": "yes"}, "must be a mapping"),
        ({"model": "a", "autoscaling": {}, "replicas": 2}, "excludes replicas"),
        ({"model": "a", "autoscaling": {}, "ingress": "direct"}, "does not see the requests"),
        ({"model": "a", "shadow": 3}, "shadow must be"),
    ],
)
def test_an_application_that_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(args)


def test_port_has_one_server() -> None:
    """Replicas of the owner share the port, a second server does not get it, nor one beside another program."""
    port, owner = free_ports(1), rf"by process {os.getpid()} \(.+\); choose another --port"
    with held_port("127.0.0.1", port):
        for _ in range(2):
            with pytest.raises(InputError, match=f"127.0.0.1:{port}: .*{owner}"), held_port("127.0.0.1", port):
                pass
        with bind("127.0.0.1", port, shared=True) as one, bind("127.0.0.1", port, shared=True) as other:
            one.listen()
            other.listen()
    with held_port("127.0.0.1", port):
        pass
    for shared in (False, True):  # a replica that outlived its server, or another program
        with bind("0.0.0.0", port, shared=shared) as other:
            other.listen()
            with pytest.raises(InputError, match=owner), held_port("127.0.0.1", port):
                pass


def test_port_lock_ends_with_its_process() -> None:
    port = free_ports(1)
    child = os.fork()
    if not child:
        with held_port("127.0.0.1", port):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with held_port("127.0.0.1", port):
        pass


@pytest.mark.parametrize(
    ("value", "host", "allowed", "own"),
    [
        ("localhost:8000", "127.0.0.1", (), True),
        ("LOCALHOST.", "10.0.0.1", (), True),
        ("127.0.0.2:1", "127.0.0.1", (), True),
        ("[::1]:8000", "127.0.0.1", (), True),
        ("10.0.0.1:8000", "10.0.0.1", (), True),
        ("10.0.0.2:8000", "10.0.0.1", (), False),
        ("10.0.0.2", "0.0.0.0", (), True),
        ("[fd00::1]:80", "::", (), True),
        ("evil.example", "0.0.0.0", (), False),
        ("evil.example:8000", "127.0.0.1", (), False),
        ("localhost.evil.example", "127.0.0.1", (), False),
        ("127.0.0.1.evil.example", "0.0.0.0", (), False),
        ("localhost@evil.example", "127.0.0.1", (), False),
        ("localhost, evil.example", "127.0.0.1", (), False),
        ("localhost:8000:1", "127.0.0.1", (), False),
        ("", "127.0.0.1", ("*",), False),
        ("api.example.org:443", "0.0.0.0", ("API.example.org",), True),
        ("b.example.org", "0.0.0.0", ("*.example.org",), True),
        ("example.org", "0.0.0.0", ("*.example.org",), False),
        ("evilexample.org", "0.0.0.0", ("*.example.org",), False),
        ("anything", "127.0.0.1", ("*",), True),
    ],
)
def test_host_header_names_the_server(value: str, host: str, allowed: tuple[str, ...], own: bool) -> None:
    assert is_own_host(value, ServeConfig(host=host, allowed_hosts=allowed)) is own


def test_allowed_hosts_are_names() -> None:
    for name in ("http://a", "a:80", "a/b", "*a", ""):
        with pytest.raises(InputError, match="allowed_hosts"):
            ServeConfig(allowed_hosts=(name,))
    ServeConfig(allowed_hosts=("fd00::1", "a", "*", "*.b-c.d"))
