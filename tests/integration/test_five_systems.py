"""Commands of e2eAIOK and torchrec_dlrm, changed only as the tables of docs/from-*.md say, and
run.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from builders.scripts import ROOT
from hosts.processes import run_command

from rayrec import cli

SMALL = (
    "--num_embeddings 100 --embedding_dim 8 --dense_arch_layer_sizes 16,8 --over_arch_layer_sizes "
    "8,1 --limit_train_batches 4"
)
TORCHRUN = (
    "--nnodes 1 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost --rdzv_id 543 "
    "--role trainer dlrm_main.py"
)
TORCHX = "run -s local_cwd dist.ddp -j 1x2 --script dlrm_main.py --"


def changes(page: str) -> list[tuple[str, str]]:
    return re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE
    )


def test_data_process_train_and_inference_of_e2eaiok(
    click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [new.split()[1:] for old, new in changes("from-e2eaiok") if old.startswith("run_")]
    monkeypatch.chdir(tmp_path)
    Path("criteo").symlink_to(click_log)
    for command in commands:
        small = (
            [
                "--scaling.num-workers",
                "1",
                "--batch-size",
                "64",
                "--steps",
                "4",
            ]
            if command[0] == "train"
            else []
        )
        assert cli.run([*command, *small, "-q"]) == 0
    assert [command[0] for command in commands] == ["preprocess", "train", "evaluate"]


@pytest.mark.slow
@pytest.mark.extended
def test_lines_of_torchrec_dlrm(tmp_path: Path) -> None:
    _check_line("torch.distributed.run", TORCHRUN, tmp_path)


@pytest.mark.slow
@pytest.mark.extended
def test_torchx_line_of_torchrec_dlrm(tmp_path: Path) -> None:
    pytest.importorskip("torchx", reason="torchx is not a dependency")
    _check_line("torchx.cli.main", TORCHX, tmp_path)


def _check_line(module: str, line: str, tmp_path: Path) -> None:
    for old, new in changes("from-torchrec-dlrm"):
        line = line.replace(old, new)
    run_command(sys.executable, "-m", module, *shlex.split(f"{line} {SMALL}"), cwd=tmp_path)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["rows_of_sets"]["train"] == 4 * 32 * 2
