"""Access of cluster nodes to stores, and their credentials."""

import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from builders.faults import rejects

from rayrec.cluster import node_storage
from rayrec.cluster.node_storage import first_error, refusal, require_reachable, runtime_env

SECRET = "swordfish-4711"
S3 = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": "http://10.0.0.9:9000"}


def test_credentials_are_sent_on_request_and_only_in_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_env(S3) is None
    assert runtime_env({**S3, "RAYREC_SEND_CREDENTIALS": "0"}) is None
    # Ray pickles the hook and keeps it with the job's functions, but logs and shows the rest of a runtime environment.
    sent = runtime_env({**S3, "PATH": "/bin", "AWS_CA_BUNDLE": "/here.pem", "RAYREC_SEND_CREDENTIALS": "1"})
    assert list(sent) == ["worker_process_setup_hook"]
    assert SECRET not in repr(sent)
    for name in (*S3, "AWS_CA_BUNDLE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    pickled = ray.cloudpickle.dumps(sent["worker_process_setup_hook"])
    monkeypatch.setitem(sys.modules, "rayrec.cluster.node_storage", None)  # a node need not have it
    ray.cloudpickle.loads(pickled)()
    assert {name: os.environ.get(name) for name in (*S3, "AWS_CA_BUNDLE")} == {**S3, "AWS_CA_BUNDLE": None}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**S3, "RAYREC_SEND_CREDENTIALS": "yes"}, "must be 1, to send the store settings to the cluster, or 0, got 'yes'"),
        ({"RAYREC_SEND_CREDENTIALS": "1"}, "no store settings found in the environment. Set AWS_ACCESS_KEY_ID"),
    ],
)
def test_runtime_env_rejects_invalid_request(environment: dict[str, str], message: str) -> None:
    rejects(message, runtime_env, environment)


def test_refusal_contains_node_and_settings_without_values() -> None:
    line = refusal("10.0.0.2", "s3://logs: access denied (HTTP status 403); set AWS_PROFILE", S3)
    assert line == (
        "node 10.0.0.2 does not reach the store, which this machine does: s3://logs: access denied (HTTP status 403); set "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL as here when you start Ray there, or have this command send "
        "them: RAYREC_SEND_CREDENTIALS=1"
    )
    assert "give the nodes credentials" in refusal("10.0.0.2", "denied", {})
    assert "RAYREC_SEND" not in refusal("10.0.0.2", "denied", {**S3, "RAYREC_SEND_CREDENTIALS": "1"})


def answering(monkeypatch: pytest.MonkeyPatch, *answers: tuple[str, str | None], here: str | None = None) -> Mock:
    """Replace the check of the nodes by their answers, and of this machine by `here`."""
    monkeypatch.setattr(node_storage, "_check_nodes", check := Mock(return_value=list(answers)))
    monkeypatch.setattr(node_storage, "first_error", lambda urls, patience_s: here)
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: False))
    return check


def test_require_reachable_rejects_only_nodes_without_store(monkeypatch: pytest.MonkeyPatch) -> None:
    check = answering(monkeypatch, ("10.0.0.1", None), ("10.0.0.2", "s3://b: access denied"))
    paths = ("s3://b/log/day_*/x.tsv?region=eu", None, "/local", "s3://a/runs/")
    rejects(r"node 10\.0\.0\.2 does not reach the store", require_reachable, paths)
    check.assert_called_once_with(["s3://a/runs/", "s3://b/log?region=eu"])
    check = answering(monkeypatch, ("10.0.0.2", "s3://b: access denied"))
    require_reachable(("/local", None))
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: True))
    require_reachable(("s3://b/log",))  # Ray's processes inherit the environment
    check.assert_not_called()
    check = answering(monkeypatch, ("10.0.0.2", "the store was out"), here="the store was out")
    require_reachable(("s3://b/log",))
    check.assert_not_called()


def test_first_error_describes_unreachable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    trouble = first_error(["s3://b/log"], patience_s=0.0)
    assert "127.0.0.1:9" in trouble
    assert SECRET not in trouble
