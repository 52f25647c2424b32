"""Slurm cluster on this machine: the real daemons of a controller and two nodes of one CPU, which
need root.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from builders.faults import until
from hosts.ports import free_ports
from hosts.processes import environment_for

COMMANDS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "scontrol",
    "squeue",
    "scancel",
)
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,\
preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
ReturnToService=2
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=90 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
"""`cred_expire`: how long a requeued job waits before it may start; Slurm's default is 120 s."""


def missing() -> str | None:
    """What this machine lacks for a Slurm cluster, and how to get it; None if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [command for command in COMMANDS if shutil.which(command) is None]
    return (
        f"lacks {lacking[0]}: apt-get install slurmctld slurmd slurm-client munge"
        if lacking
        else None
    )


class SlurmCluster:
    """`folder` is for its files, and for what jobs print."""

    def __init__(self, folder: Path, *, cache: Path) -> None:
        self.folder = folder
        self._pid_files = [
            folder / name
            for name in ("slurmd.n0.pid", "slurmd.n1.pid", "slurmctld.pid", "munge.pid")
        ]
        python = str(Path(sys.executable).parent)
        path = f"{python}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._environment = environment_for(cache, SLURM_CONF=str(folder / "slurm.conf"), PATH=path)
        (folder / "state").mkdir()
        first = free_ports(3)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, ports=range(first, first + 3))
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        folder.chmod(0o755)
        try:
            self._start()
        except BaseException:
            self._end_daemons()
            raise

    def _start(self) -> None:
        folder = self.folder
        places = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self.call(
            "munged", "--force", *(f"--{flag}={folder}/munge.{end}" for flag, end in places.items())
        )
        self.call("slurmctld", "-c")
        for node in ("n0", "n1"):
            self.call("slurmd", "-N", node)

    def call(self, *command: str) -> str:
        """What the command prints. Fails unless it succeeds."""
        out = self.folder / "call"  # a file: daemons keep what they are given open
        with open(out, "w") as file:
            done = subprocess.run(
                command,
                check=False,
                stdout=file,
                stderr=file,
                env=self._environment,
                cwd=self.folder,
                timeout=60,
            )
        assert done.returncode == 0, (command, out.read_text()[-2000:])
        return out.read_text().strip()

    def submit(self, *arguments: str) -> str:
        return self.call("sbatch", "--parsable", "--cpus-per-task=1", *arguments)

    def field(self, job: str, name: str) -> str:
        return dict(
            word.split("=", 1)
            for word in self.call("scontrol", "show", "job", job).split()
            if "=" in word
        )[name]

    def wait_for(self, job: str, state: str, *, restarts: int) -> None:
        """Until the job has been requeued at least so often, and is in this state."""

        def is_there() -> bool:
            requeued = int(self.field(job, "Restarts")) >= restarts
            return requeued and self.field(job, "JobState") == state

        def reported() -> str:
            return self.call("scontrol", "show", "job", job) + self.log(job)

        until(
            is_there,
            timeout_s=240,
            pause_s=0.2,
            reported=reported,
        )

    def log(self, job: str) -> str:
        return "".join(log.read_text() for log in self.folder.glob(f"*-{job}.log"))

    def end(self) -> None:
        """Ends all jobs, then the daemons."""
        self.call("scancel", "--user=root")
        try:
            until(lambda: not self.call("squeue", "--noheader"), timeout_s=60, pause_s=0.2)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for file in self._pid_files:
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)
