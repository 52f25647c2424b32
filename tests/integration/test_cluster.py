"""A mixed cluster: several Ray nodes on this machine, one of them with something that stands in for an accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = """
import sys
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 200_000_000,
                                                        "include_dashboard": False})
cluster.add_node(num_cpus=1, object_store_memory=200_000_000)
cluster.add_node(num_cpus=1, resources={"accelerator": 2}, object_store_memory=200_000_000)
cluster.wait_for_nodes()

from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.ray_tasks import tasks_dataset
from rayrec.launch import cluster as launch
from rayrec.training.trainer import train

config = recipes.criteo_demo(sys.argv[1]).replace(
    storage_path=sys.argv[2], steps=4, batch_size=64, evaluate_every=4, cluster={"address": cluster.address},
    scaling={"num_workers": 2, "cpus_per_worker": 0.5, "resources_per_worker": {"accelerator": 1.0}},
)
result = train(config)
assert result.summary["steps"] == 4

nodes = launch.alive_nodes()
shares = launch.layout(nodes, num_workers=2, use_gpu=False, cpus_per_worker=0.5,
                       resources_per_worker={"accelerator": 1.0}, data_nodes="auto")


def where(item):
    return pa.table({"node": [ray.get_runtime_context().get_node_id()]})


found = {row["node"] for row in tasks_dataset("where", where, list(range(6)), placement=shares.per_worker).take_all()}
accelerated = {node.node_id for node in nodes if node.resources.get("accelerator")}
plain = {node.node_id for node in nodes if node.resources.get("CPU") and not node.resources.get("accelerator")}
assert found == plain, (found, plain, accelerated)
try:
    train(config.replace(name="many", scaling={"num_workers": 5}))
except InputError as error:
    assert "accelerator" in str(error), error
else:
    raise AssertionError("five workers were accepted")
print("mixed cluster: ok", flush=True)  # at its end the process may lose its raylet first
"""


def test_training_and_data_tasks_go_to_their_nodes(click_log: Path, tmp_path: Path) -> None:
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(click_log / "train.txt"), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert "mixed cluster: ok" in done.stdout, (done.returncode, done.stdout[-3000:] + done.stderr[-3000:])
