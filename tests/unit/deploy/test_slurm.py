"""The files for Slurm decide rightly what to do when a run ends; its commands are stand-ins
(integration/test_slurm.py: real).
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.faults import until
from hosts.ports import free_ports

from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS

FOLDER = Path(__file__).parents[3] / "deploy" / "slurm"
FILES = [FOLDER / "ray.sbatch", FOLDER / "srun.sbatch"]
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "rayrec",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
}
COMMAND_TEXTS = {
    "squeue": "echo RUNNING",
    "scontrol": 'echo "$*" >>scontrol.called',
    "scancel": 'echo "$*" >>scancel.called; kill -TERM "$(cat begun)"',
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_are_bash_and_begin_with_command(file: Path) -> None:
    subprocess.run(["bash", "-n", file], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, file], check=True)
    comment = "".join(re.findall(r"^#   (.*\n)", file.read_text(), re.MULTILINE)).replace(
        "\\\n", " "
    )
    words = shlex.split(comment)
    (config,) = parse(COMMANDS["train"], words[words.index(file.name) + 1 :]).arguments
    assert config.scaling.use_gpu


def test_both_handle_notices_and_ends_alike() -> None:
    one, other = (file.read_text() for file in FILES)
    for begin, end in (
        ("# A requeued job", "\n\n"),
        ("say() {", "\n}\n\n"),
        ("# 0: done;", 'exit "$status"\n'),
    ):
        part = one[one.index(begin) :]
        part = part[: part.index(end) + len(end)] if begin != "# 0: done;" else part
        assert part in other


class Started:
    """A batch script with stand-ins for Slurm's commands, which write down how they are called."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        commands: dict[str, str],
        file: Path = FILES[1],
        **variables: str,
    ) -> None:
        for name, text in {**COMMAND_TEXTS, **commands}.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        self._folder = folder
        self.process = subprocess.Popen(
            ["bash", file, "criteo_demo", *arguments],
            cwd=folder,
            env={
                **os.environ,
                **JOB,
                "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                **variables,
            },
        )

    def read(self, name: str) -> str:
        file = self._folder / name
        return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        *((status, "", "RUNNING", status in (143, 1)) for status in (0, 2, 130, 143, 1)),
        *((137, "19", "RUNNING", True), (1, "20", "RUNNING", False)),
        (143, "", "COMPLETING", False),  # cancelled, or preempted: Slurm requeues it
    ],
)
def test_what_is_requeued(
    status: int, restarts: str, state: str, requeued: bool, tmp_path: Path
) -> None:
    started = Started(
        tmp_path,
        commands={"srun": f"exit {status}", "squeue": f"echo {state}"},
        **({"SLURM_RESTART_COUNT": restarts} if restarts else {}),
    )
    assert started.process.wait(timeout=60) == status
    assert started.read("scontrol.called") == ("requeue 7\n" if requeued else "")


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_notice_saves_and_requeues(sent: signal.Signals, tmp_path: Path) -> None:
    srun = 'trap "sleep 0.3; exit 143" TERM; echo $$ >begun; while :; do sleep 0.05; done'
    started = Started(tmp_path, commands={"srun": srun})
    until(lambda: started.read("begun"))
    started.process.send_signal(sent)
    time.sleep(0.1)
    started.process.send_signal(sent)
    assert started.process.wait(timeout=60) == 143
    assert set(started.read("scancel.called").splitlines()) == {"--signal=TERM 7.0"}
    assert started.read("scontrol.called") == "requeue 7\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), "--name rayrec-7"),
        (("--name", "x"), "--name x"),
        (("--name=x",), "--name=x"),
    ],
)
def test_run_keeps_name(given: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    started = Started(tmp_path, *given, commands={"srun": 'echo "$*" >srun.called'})
    assert started.process.wait(timeout=60) == 0
    assert started.read("srun.called").endswith(f"rayrec criteo_demo {expected}\n")


_ON_RAY = {
    # One node: its task, and what becomes of it.
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >task; SLURM_PROCID=0 exec "$@"',
    "ray": f"exec {sys.executable} -c 'import os, socket, time\n"
    'port = socket.create_server(("127.0.0.1", int(os.environ["RAY_PORT"])))\n'
    'open("ray.pid", "w").write(str(os.getpid()))\n'
    "time.sleep(300)'",
    "python": f"""case "$*" in
  *get_node_ip_address*) echo 127.0.0.1 ;;
  *ray.nodes*) ;;
  *"-m rayrec train"*)
    trap 'kill -0 "$(cat ray.pid)" && echo with Ray >saved; exit 143' TERM
    echo begun >begun
    while :; do sleep 0.05; done ;;
  *) exec {sys.executable} "$@" ;;
esac""",
    "scancel": """echo "$*" >>scancel.called
case "$1" in
  --batch) kill -USR1 "$(cat script)" ;;
  --signal=KILL) kill -KILL "$(cat ray.pid)" ;;
esac""",
}


def test_preemption_of_ray_saves_and_requeues(tmp_path: Path) -> None:
    job = str(free_ports(1) - 20_000)
    started = Started(
        tmp_path,
        commands=_ON_RAY,
        file=FILES[0],
        SLURM_JOB_ID=job,
    )
    with started.process as script:
        (tmp_path / "script").write_text(str(script.pid))
        until(lambda: started.read("begun") or script.poll() is not None)
        for name in ("task", "ray.pid"):  # all processes of the tasks
            os.kill(int(started.read(name)), signal.SIGTERM)
        assert script.wait(timeout=60) == 143
    assert (tmp_path / "saved").exists()
    assert started.read("scancel.called").split("\n")[:2] == [
        f"--batch --signal=USR1 {job}",
        f"--signal=KILL {job}.0",
    ]
    assert started.read("scontrol.called") == f"requeue {job}\n"
