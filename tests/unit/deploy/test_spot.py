"""The files for spot machines: Ray's launcher accepts the cluster, rayrec the command, and a notice reaches Ray."""

import http.server
import json
import os
import re
import shlex
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS

FOLDER = Path(__file__).parents[3] / "deploy"
AWS = FOLDER / "aws"


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
        assert kind["node_config"]["IamInstanceProfile"]["Name"] == ("rayrec-head" if is_head else "rayrec-worker")
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"] == 0
    assert (AWS / cluster["file_mounts"]["/home/ubuntu/spot-notice.sh"]).exists()


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


class Metadata(http.server.BaseHTTPRequestHandler):
    """What AWS's metadata service (version 2) answers: no notice to the first two questions, then one."""

    asked = 0

    def do_PUT(self, status: int = 200, text: str = "a-token") -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token"] == "a-token"
        type(self).asked += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        self.do_PUT(*((404, "") if self.asked < 3 else (200, json.dumps({"action": "terminate", "time": at}))))


def test_aws_notice_reaches_ray(tmp_path: Path) -> None:
    """`ray` is a stand-in, which fails the first time."""
    (tmp_path / "ray").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >called\n[ -e once ] || { touch once; exit 1; }\n')
    (tmp_path / "ray").chmod(0o755)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RAYREC_NOTICE_EVERY_S": "0.05"}
        variables["RAYREC_METADATA_URL"] = f"http://127.0.0.1:{server.server_port}"
        script = ["bash", AWS / "spot-notice.sh"]
        subprocess.run(script, cwd=tmp_path, env={**os.environ, **variables}, timeout=60, check=True)
        server.shutdown()
    assert Metadata.asked == 4
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:3] == ["drain-node", "--address=auto", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
    assert 100 < int(called[-1].removeprefix("--deadline-remaining-seconds=")) <= 120


def test_scheduled_runs_have_dated_names() -> None:
    """With one name for every night, the second night trains nothing."""
    root, named = FOLDER.parent, []
    for path in [*FOLDER.rglob("*"), *(root / "docs").rglob("*.md"), root / "README.md"]:
        if path.is_file():
            named += [(path.name, name) for name in re.findall(r"--name[ =]\"?(nightly[^\s\"`]*)", path.read_text())]
    assert len(named) >= 5
    assert {name for _, name in named} <= {"nightly-$(date", "nightly-DATE", "nightly-$DATE"}
