"""The files for Slurm, under a real Slurm: a job interrupted twice is requeued, resumes, and ends
with the same weights.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.faults import until
from builders.runs import check_same_run, small_run
from hosts import slurm_cluster
from hosts.processes import events_so_far
from hosts.slurm_cluster import SlurmCluster

from rayrec import storage

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=f"Slurm: {slurm_cluster.missing()}"
    ),
]

FILES = Path(__file__).parents[2] / "deploy" / "slurm"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    (tmp_path / "slurm").mkdir()
    cluster = SlurmCluster(tmp_path / "slurm", cache=tmp_path / "cache")
    yield cluster
    cluster.end()


@pytest.mark.parametrize("file", ["srun.sbatch", "ray.sbatch"])
def test_job_survives_two_slurm_interruptions(
    file: str, slurm: SlurmCluster, click_log: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    config = small_run(
        click_log,
        tmp_path,
        steps=undisturbed["steps"],
        cluster={},
        name=None,
    ).replace(checkpoint={"every": 10_000})  # what the notice saves, or nothing
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    job = slurm.submit(str(FILES / file), "--config", str(tmp_path / "config.yaml"))
    run = tmp_path / f"rayrec-{job}"

    def wait_for_step(step: int) -> None:
        def reached() -> bool:
            return any(event["step"] >= step for event in events_so_far(run, "step"))

        until(
            reached,
            timeout_s=180,
            pause_s=0.1,
            reported=lambda: slurm.log(job),
        )

    wait_for_step(60)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(job, "RUNNING", restarts=1)
    wait_for_step(200)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--wrap", "sleep 3")
    slurm.wait_for(urgent, "COMPLETED", restarts=0)
    slurm.wait_for(job, "COMPLETED", restarts=2)

    summary = storage.read_json(f"{run}/summary.json")
    check_same_run(summary, undisturbed)
    assert (summary["steps_redone"], slurm.log(job).count("saved, stopping (SIGTERM)")) == (0, 2)
    # Slurm's SIGTERM at a preemption reaches the tasks alone; Ray's first task passes it on to the
    # script.
    assert slurm.log(job).count("notice from Slurm") == (2 if file == "ray.sbatch" else 1)
