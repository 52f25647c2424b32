"""The torchx component: the torchrun command of its AppDef."""

import runpy
from pathlib import Path

import pytest

COMPONENT = Path(__file__).parents[3] / "deploy" / "torchx" / "component.py"


def test_component_starts_torchrun() -> None:
    pytest.importorskip("torchx", reason="torchx is not a dependency")
    rayrec = runpy.run_path(str(COMPONENT))["rayrec"]
    for trainers, hosts, shape in ((2, 1, "--nnodes 1 --nproc_per_node 2"), (16, 2, "--nnodes 2 --nproc_per_node 8")):
        (role,) = rayrec("train", "criteo_demo", "--data", "a b", num_trainers=trainers).roles
        assert role.num_replicas == hosts
        assert f" {shape} " in role.args[1]
        assert role.args[1].endswith("-m rayrec train criteo_demo --data 'a b'")
    with pytest.raises(ValueError, match="a multiple"):
        rayrec("train", num_trainers=12)
