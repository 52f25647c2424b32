"""The files for spot machines: Ray's launcher accepts the cluster, rayrec the command, and a notice
reaches Ray.
"""

import http.server
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.aws.config import _configure_subnets_and_groups_from_network_interfaces
from ray.autoscaler._private.util import prepare_config, validate_config

from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS

FOLDER = Path(__file__).parents[3] / "deploy"
AWS = FOLDER / "aws"
NOTICE = FOLDER / "spot_notice.py"


@pytest.fixture
def cluster() -> Any:
    return yaml.safe_load((AWS / "cluster.yaml").read_text())


def test_ray_accepts_cluster_with_on_demand_head(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config({**cluster, "max_worker": 3}))
    for name, kind in cluster["available_node_types"].items():
        is_spot = kind["node_config"].get("InstanceMarketOptions") == {"MarketType": "spot"}
        is_head = name == cluster["head_node_type"]
        assert is_spot != is_head
        assert kind["node_config"]["IamInstanceProfile"]["Name"] == (
            "rayrec-head" if is_head else "rayrec-worker"
        )
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"] == 0
    assert (AWS / cluster["file_mounts"]["/home/ubuntu/spot_notice.py"]).exists()


def test_aws_accepts_machines_and_efa_has_every_card() -> None:
    """Validates requests with EC2's own description. The launcher copies subnets and groups from
    the interfaces.
    """
    shape = (
        botocore.session.get_session()
        .get_service_model("ec2")
        .operation_model("RunInstances")
        .input_shape
    )
    for name in ("cluster.yaml", "cluster-efa.yaml"):
        config = yaml.safe_load((AWS / name).read_text())
        validate_config(prepare_config(config))
        for kind in config["available_node_types"].values():
            request = {
                key: value for key, value in kind["node_config"].items() if key != "SubnetIds"
            }
            report = ParamValidator().validate({**request, "MinCount": 1, "MaxCount": 1}, shape)
            assert not report.has_errors(), report.generate_report()
    gpu = config["available_node_types"]["gpu"]["node_config"]
    resolved = _configure_subnets_and_groups_from_network_interfaces(gpu)
    assert (resolved["SubnetIds"], resolved["SecurityGroupIds"]) == (
        ["subnet-PLACEHOLDER"] * 4,
        ["sg-PLACEHOLDER"] * 4,
    )
    cards = [
        (card["NetworkCardIndex"], card["DeviceIndex"], card["InterfaceType"])
        for card in gpu["NetworkInterfaces"]
    ]
    assert cards == [
        (0, 0, "efa"),
        (1, 1, "efa"),
        (2, 1, "efa"),
        (3, 1, "efa"),
    ]
    assert (
        f"placement-group/{gpu['Placement']['GroupName']}" in (AWS / "head-policy.json").read_text()
    )
    assert "InstanceMarketOptions" not in gpu
    assert "FI_PROVIDER=efa" in config["worker_start_ray_commands"][1]


@pytest.mark.parametrize("name", ["head", "worker"])
def test_policies_name_allowed_traffic(name: str) -> None:
    for statement in json.loads((AWS / f"{name}-policy.json").read_text())["Statement"]:
        actions = statement["Action"]
        for action in [actions] if isinstance(actions, str) else actions:
            assert "*" not in action
            # AWS limits what reads to no resource.
            assert action.startswith("ec2:Describe") or statement["Resource"] != "*", action


def test_skypilot_command_is_valid() -> None:
    task = yaml.safe_load((FOLDER / "skypilot" / "train.yaml").read_text())
    words = shlex.split(task["run"].replace("$(head -n1 <<<", "$(").replace("\\\n", " "))
    words = [word.replace("$DATE", "2026-05-04") for word in words]
    (config,) = parse(COMMANDS["train"], words[words.index("rayrec") + 2 :]).arguments
    assert config.name == "nightly-2026-05-04"
    assert config.storage_path.startswith("s3://")
    assert set(task["envs"]) == {"BUCKET", "DATE"}


def at(left_s: float, form: str) -> str:
    return time.strftime(form, time.gmtime(time.time() + left_s))


class Metadata(http.server.BaseHTTPRequestHandler):
    """Metadata services of three clouds, with a notice from the third question on."""

    protocol_version = "HTTP/1.1"
    questions = 0
    left_s = 120.0

    def do_PUT(self, status: int = 200, text: str = "a-token", tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path.startswith("/metadata/instance/"):
            self.do_PUT(text="this")
            return
        type(self).questions += 1
        comes = self.questions >= 3
        if self.path.startswith("/latest/"):
            assert self.headers["X-aws-ec2-metadata-token"] == "a-token"
            notice = {"action": "terminate", "time": at(self.left_s, "%Y-%m-%dT%H:%M:%SZ")}
            self.do_PUT(*((200, json.dumps(notice)) if comes else (404, "")))
            return
        if self.path.startswith("/metadata/scheduledevents"):
            assert self.headers["Metadata"] == "true"
            events = [
                {"EventType": "Preempt", "Resources": [name], "NotBefore": "soon"}
                for name in ("neighbor", "this")
            ]
            events[1]["NotBefore"] = at(self.left_s, "%a, %d %b %Y %H:%M:%S GMT")
            self.do_PUT(text=json.dumps({"Events": events[: 1 + comes]}))
            return
        assert self.headers["Metadata-Flavor"] == "Google"
        waits = "?wait_for_change=true&timeout_sec=60&last_etag=" if self.questions > 1 else ""
        assert (
            self.path
            == f"/computeMetadata/v1/instance/preempted{waits}{self.questions - 1 if waits else ''}"
        )
        self.do_PUT(text="TRUE" if comes else "FALSE", tag=str(self.questions))


@pytest.fixture
def metadata() -> Iterator[dict[str, str]]:
    """The environment with a metadata service."""
    Metadata.questions = 0
    Metadata.left_s = 120.0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield {**os.environ, "RAYREC_METADATA_URL": url, "RAYREC_NOTICE_EVERY_S": "0.05"}
        server.shutdown()


@pytest.mark.parametrize(
    ("cloud", "left_s"),
    [
        ("aws", 120),
        ("google", 30),
        ("azure", 120),
    ],
)
def test_notice_reaches_ray(
    cloud: str, left_s: int, metadata: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "ray").write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" >called\n[ -e once ] || { touch once; exit 1; }\n'
    )
    (tmp_path / "ray").chmod(0o755)
    subprocess.run(
        [sys.executable, NOTICE, cloud],
        cwd=tmp_path,
        env={
            **metadata,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "RAY_ADDRESS": "head:6379",
        },
        timeout=60,
        check=True,
    )
    assert Metadata.questions == 4
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:3] == [
        "drain-node",
        "--address=head:6379",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
    ]
    assert left_s - 20 < int(called[-1].removeprefix("--deadline-remaining-seconds=")) <= left_s


def test_notice_stops_command_until_machine_ends(metadata: dict[str, str]) -> None:
    Metadata.left_s = -57  # The machine is waited for a minute longer.
    command = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        "signal.pause()"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, NOTICE, "aws", sys.executable, "-c", command],
        env=metadata,
        timeout=60,
        check=False,
    )
    assert (done.returncode, Metadata.questions) == (143, 3)
    assert time.monotonic() - begin > 1
    Metadata.questions = -1000
    assert (
        subprocess.run(
            [sys.executable, NOTICE, "azure", "false"], env=metadata, timeout=60, check=False
        ).returncode
        == 1
    )


def test_scheduled_runs_have_dated_names() -> None:
    root = FOLDER.parent
    named = []
    for path in [*FOLDER.rglob("*"), *(root / "docs").rglob("*.md"), root / "README.md"]:
        if path.is_file() and path.suffix != ".pyc":
            named += [
                (path.name, name)
                for name in re.findall(r"--name[ =]\"?(nightly[^\s\"`]*)", path.read_text())
            ]
    assert len(named) >= 5
    assert {name for _, name in named} <= {"nightly-$(date", "nightly-DATE", "nightly-$DATE"}


# -- The torchx component
COMPONENT = Path(__file__).parents[3] / "deploy" / "torchx" / "component.py"


def test_component_starts_torchrun() -> None:
    pytest.importorskip("torchx", reason="torchx is not a dependency")
    rayrec = runpy.run_path(str(COMPONENT))["rayrec"]
    for trainers, hosts, shape in (
        (2, 1, "--nnodes 1 --nproc_per_node 2"),
        (16, 2, "--nnodes 2 --nproc_per_node 8"),
    ):
        (role,) = rayrec("train", "criteo_demo", "--data", "a b", num_trainers=trainers).roles
        assert role.num_replicas == hosts
        assert f" {shape} " in role.args[1]
        assert role.args[1].endswith("-m rayrec train criteo_demo --data 'a b'")
    with pytest.raises(ValueError, match="a multiple"):
        rayrec("train", num_trainers=12)
