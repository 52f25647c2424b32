"""Runs of `rayrec train` as processes that can be killed for real, in part or whole: for tests, the
chaos run and benchmarks.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
from builders.faults import until
from builders.runs import events_of
from hosts.ports import free_ports

from rayrec import storage
from rayrec.checkpoint import committed
from rayrec.config import InputError
from rayrec.workloads.base import TrainConfig

ROLES = {
    "train worker": "ray::RayTrainWorker",
    "data task": "ray::Read",  # Ray Data titles the process of a read task so while it runs one
    "controller": "ray::TrainController",
    "idle": "ray::IDLE",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs/gcs_server ",
    "replica": "ray::ServeReplica",
}
"""What the command line of a process holds by what it does."""
POLL_S = 0.02
RAYREC = (sys.executable, "-m", "rayrec")
# Ray notices a node that is gone in 2 s rather than 15.
FREQUENT_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
NO_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
"""Without it a node starts a worker per CPU for its first driver, which no run with a runtime
environment can use.
"""

_CLUSTER = """
import json, sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

memory = {"object_store_memory": 200_000_000}
head = {"num_cpus": 0, "include_dashboard": False, **memory}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = []
for line in sys.stdin:
    asked = json.loads(line)
    if "drain_s" in asked:
        deadline_ms = int((time.time() + asked["drain_s"]) * 1000)
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        gcs = GcsClient(address=cluster.address)
        node_id = nodes[asked["node"]].node_id
        print(gcs.drain_node(node_id, reason, "it will go", deadline_ms), flush=True)
    else:
        nodes.append(cluster.add_node(**asked, **memory))
        print(cluster.address, nodes[-1].all_processes["raylet"][0].process.pid, flush=True)
"""


def _is_standby(pid: int) -> bool:
    """Whether a process has loaded TorchRec's kernels, and waits: it takes no CPU."""
    try:
        loaded = "fbgemm_gpu" in Path(f"/proc/{pid}/maps").read_text()
        return loaded and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_command(
    *command: object, status: int = 0, timeout_s: float = 400, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which must be with `status`, and return its output as text."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        **options,
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}{done.stderr[-4000:]}"
    return done


def pids(fits: Callable[[int], object]) -> list[int]:
    """Return the processes that fit, lowest pid first, without those that end meanwhile."""
    found = []
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        with contextlib.suppress(OSError):
            if fits(pid):
                found.append(pid)
    return found


def kill_all(find: Callable[[], list[int]], *, timeout_s: float = 120) -> None:
    def none_left() -> bool:
        for pid in (left := find()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    until(
        none_left,
        timeout_s=timeout_s,
        pause_s=POLL_S,
        reported=find,
    )


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    command: str


def read_process(pid: int) -> Process | None:
    """None where there is none, or nothing of it but its exit status."""
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else Process(pid, int(parent), state, command)


class EndsOnExit:
    """What ends when a `with` block is left."""

    def end(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Session(EndsOnExit):
    """A command and all that it starts: Ray's processes leave the command's group, but carry its
    session.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Path,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Standard output and error go to the files `output`.out and `output`.err."""
        self._output = output
        options: dict[str, Any] = {
            "env": dict(environment),
            "stdin": stdin,
            "start_new_session": True,
        }
        with open(f"{output}.out", "wb") as out, open(f"{output}.err", "wb") as err:
            self.process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=err,
                **options,
            )

    @property
    def out(self) -> str:
        return Path(f"{self._output}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return Path(f"{self._output}.err").read_text(errors="replace")

    @property
    def status(self) -> int:
        return self.process.returncode

    def wait(self, *, timeout_s: float = 240) -> Self:
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout_s} s: {self._last_lines()}"
            ) from None
        return self

    def until(
        self, condition: Callable[[], Any], *, timeout_s: float = 240, pause_s: float = POLL_S
    ) -> Any:
        """Wait for a condition, which must come before the command ends, and return what it comes
        to.
        """

        def found() -> Any:
            ended = self.process.poll() is not None
            value = condition()
            assert value or not ended, (
                f"the command ended with {self.status}:\n{self._last_lines()}"
            )
            return value

        return until(
            found,
            timeout_s=timeout_s,
            pause_s=pause_s,
            reported=self._last_lines,
        )

    def _last_lines(self) -> str:
        return f"{self.out[-2000:]}\n{self.err[-4000:]}"

    def processes(self) -> list[Process]:
        found = pids(lambda pid: os.getsid(pid) == self.process.pid)
        return [process for pid in found if (process := read_process(pid))]

    def find(self, role: str) -> list[Process]:
        found = {
            process.pid: process for process in self.processes() if ROLES[role] in process.command
        }
        # A process that the raylet is about to start shows the raylet's own command line.
        return [process for pid, process in sorted(found.items()) if process.parent not in found]

    def kill(self, role: str) -> None:
        """SIGKILLs the first process of a role, as soon as there is one."""
        found = until(
            lambda: self.find(role), timeout_s=180, pause_s=POLL_S, reported=lambda: f"a {role}"
        )
        os.kill(found[0].pid, signal.SIGKILL)

    def wait_for_standby(self, num_processes: int) -> None:
        """Waits until so many idle processes of Ray have imported what a train worker needs."""

        def is_ready() -> bool:
            return sum(_is_standby(process.pid) for process in self.find("idle")) >= num_processes

        until(
            is_ready,
            timeout_s=180,
            pause_s=0.5,
            reported=lambda: f"{num_processes} processes in standby",
        )

    def kill_data_task(self, *, timeout_s: float = 180) -> None:
        """SIGKILLs a process in the midst of a data task. Tasks are short, so it is stopped
        first.
        """

        def stopped() -> int | None:
            return next(
                (each.pid for each in self.find("data task") if self._stopped_in_task(each.pid)),
                None,
            )

        os.kill(
            until(
                stopped,
                timeout_s=timeout_s,
                pause_s=0,
                reported=lambda: "a data task",
            ),
            signal.SIGKILL,
        )

    def _stopped_in_task(self, pid: int) -> bool:
        """Stops a process; goes on with it, and False, where the task was over before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            while (process := read_process(pid)) and process.state != "T":
                time.sleep(0)
            if process and ROLES["data task"] in process.command:
                return True
            os.kill(pid, signal.SIGCONT)
        return False

    def end(self) -> None:
        kill_all(lambda: [process.pid for process in self.processes()])
        self.process.wait()


def environment_for(cache: Path, **more: str) -> dict[str, str]:
    """This process's environment, less the Ray it may be connected to."""
    return {
        **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        "RAYREC_CACHE": str(cache),
        **more,
    }


class RayCluster(Session):
    """A Ray of several nodes on this machine; the head has no CPUs, so that any task needs
    another.
    """

    def __init__(self, folder: Path, *, cache: Path) -> None:
        command = [sys.executable, "-u", "-c", _CLUSTER]
        environment = environment_for(cache, **FREQUENT_CHECKS, **NO_PRESTART)
        super().__init__(
            command, environment=environment, output=folder / "cluster", stdin=subprocess.PIPE
        )
        self._raylets: list[int] = []

    def add_node(self, **node: Any) -> str:
        """Return the cluster's address after `ray.cluster_utils.Cluster.add_node`. Lost nodes keep
        their numbers, from 0.
        """
        address, raylet = self._ask(node).split()
        self._raylets.append(int(raylet))
        return address

    def drain_node(self, seconds: float, *, node: int) -> None:
        answer = self._ask({"drain_s": seconds, "node": node})
        assert answer.startswith("(True"), answer

    def kill_node(self, node: int) -> None:
        """SIGKILLs all that runs on a node, like the loss of a machine; what has ended before is
        left.
        """
        raylet = self._raylets[node]
        for process in (raylet, *(each.pid for each in self.processes() if each.parent == raylet)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _ask(self, request: dict[str, Any]) -> str:
        before = len(self.out.splitlines())
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.until(lambda: self.out.splitlines()[before:])[-1]

    def kill_node_of(self, process: Process) -> None:
        """SIGKILLs the raylet that a worker is connected to."""
        sockets = subprocess.run(
            ["ss", "-xpH"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        peers = {line.split()[7] for line in sockets if f"pid={process.pid}," in line}
        (raylet,) = (
            raylet.pid
            for raylet in self.find("raylet")
            if any(f"pid={raylet.pid}," in line and line.split()[5] in peers for line in sockets)
        )
        os.kill(raylet, signal.SIGKILL)


def ray_start(*options: object) -> list[str]:
    """The command that starts Ray's processes of a node and stays with them; `wait_for_ray` waits
    for them.
    """
    return [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        "--disable-usage-stats",
        *map(str, options),
    ]


def wait_for_ray(node: Session) -> None:
    """Wait until the Ray node of the command takes work."""
    node.until(lambda: "Ray runtime started" in node.out + node.err)


class RayHead(Session):
    """A Ray of one node that `ray start --head` started, on ports of its own."""

    def __init__(self, folder: Path, *, cache: Path, num_cpus: int) -> None:
        """`folder`: its path is short, since Ray's sockets are below it."""
        port = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        ports = (
            "--port",
            port,
            "--ray-client-server-port",
            port + 1,
            "--dashboard-agent-listen-port",
            port + 2,
        )
        others = (
            "--num-cpus",
            num_cpus,
            "--include-dashboard",
            "false",
            "--temp-dir",
            folder / "ray",
        )
        environment = environment_for(cache, OMP_NUM_THREADS="1", **NO_PRESTART)
        super().__init__(
            ray_start("--head", *ports, *others), environment=environment, output=folder / "head"
        )


def events_so_far(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of a run, which may not have begun."""
    try:
        return events_of(run, *kinds)
    except InputError as error:
        if "event file not found" not in str(error):
            raise
        return []


class Run(EndsOnExit):
    """One run of `rayrec train`, through as many commands as it takes; ends what is left of them
    when it is left.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        cache: Path,
        recipe: str | None = None,
        **environment: str,
    ) -> None:
        """`folder` is for the configuration and the commands' output. `recipe`: FILE.py:FUNCTION of
        a custom configuration.
        """
        assert config.name is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.path = storage.join(config.storage_path, config.name)
        self._folder = folder
        self._recipe = (recipe,) if recipe is not None else ()
        self._environment = environment_for(cache, **environment)
        self._sessions: list[Session] = []
        (folder / "config.yaml").write_text(config.to_yaml())

    @property
    def session(self) -> Session:
        return self._sessions[-1]

    @property
    def num_commands(self) -> int:
        return len(self._sessions)

    def start(self) -> Self:
        """Runs the command, the same each time."""
        return self._start("train", *self._recipe, "--config", str(self._folder / "config.yaml"))

    def _start(self, *arguments: str) -> Self:
        output = self._folder / f"command_{self.num_commands + 1}"
        self._sessions.append(
            Session([*RAYREC, *arguments], environment=self._environment, output=output)
        )
        return self

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return events_so_far(self.path, *kinds)

    def wait_for(
        self, kind: str, *, step: int = 0, since: float = 0.0, timeout_s: float = 180
    ) -> dict[str, Any]:
        """Wait for an event of a kind of `step` or later, written after Unix time `since`. The
        command must not end before.
        """

        def first() -> dict[str, Any] | None:
            found = (
                event
                for event in self.events(kind)
                if event["time"] > since and event.get("step", step) >= step
            )
            return next(found, None)

        return self.session.until(first, timeout_s=timeout_s)

    def wait_for_step(
        self, step: int, *, since: float = 0.0, timeout_s: float = 180
    ) -> dict[str, Any]:
        return self.wait_for(
            "step",
            step=step,
            since=since,
            timeout_s=timeout_s,
        )

    def wait_for_save(self, step: int = 0, *, timeout_s: float = 180) -> int:
        """Wait for a checkpoint of a step or later. Returns the newest one's step."""
        self.wait_for("checkpoint", step=step, timeout_s=timeout_s)
        return max(event["step"] for event in self.events("checkpoint"))

    def exit_status(self, *, timeout_s: float = 180) -> int:
        return self.session.wait(timeout_s=timeout_s).status

    def summary(self, *, timeout_s: float = 600) -> dict[str, Any]:
        status = self.exit_status(timeout_s=timeout_s)
        assert status == 0, f"exit status {status}:\n{self.session.err[-6000:]}"
        return storage.read_json(storage.join(self.path, "summary.json"))

    def kill_driver(self) -> None:
        """SIGKILLs the command's own process alone; Ray follows by itself."""
        self.session.process.kill()
        self.session.process.wait()

    def end(self) -> None:
        for session in self._sessions:
            session.end()


def finished(config: TrainConfig, folder: Path, *, cache: Path) -> dict[str, Any]:
    with Run(config, folder, cache=cache).start() as run:
        return run.summary()


def torchrun(folder: Path, name: str, config: str | Path, *, kill: bool = False) -> dict[str, Any]:
    """Train FOLDER/NAME by two processes of torchrun; `kill` ends the second one after the first
    checkpoint.
    """
    options = (
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.1",
        *RAYREC[1:],
        "train",
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--config",
        str(config),
        "--storage-path",
        str(folder),
        "--name",
        name,
    ]
    with Session(
        command, environment=dict(os.environ), output=folder / f"{name}-command"
    ) as session:
        try:
            if kill:
                session.until(lambda: committed(str(folder / name)))
                ranks = {
                    child.environ().get("RANK"): child
                    for child in psutil.Process(session.process.pid).children()
                }
                ranks["1"].kill()
            assert session.wait().status == 0, session.err[-3000:]
        finally:
            session.process.terminate()  # which ends its workers, whose sessions are their own
            session.process.wait(timeout=60)
        return json.loads(session.out)
