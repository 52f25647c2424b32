"""Runs of `rayrec train` as processes that can be killed for real, in part or whole: for tests, the chaos run and benchmarks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hosts.ports import free_ports

from rayrec import recipes, storage
from rayrec.config import InputError
from rayrec.observe.events import read_events
from rayrec.workloads.base import TrainConfig

ROLES = {
    "train worker": "ray::RayTrainWorker",
    "data task": "ray::Read",  # Ray Data titles the process of a read task so while it runs one
    "controller": "ray::TrainController",
    "idle": "ray::IDLE",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs/gcs_server ",
}
"""What the command line of a process holds by what it does."""
POLL_S = 0.02

_CLUSTER = """
import json, sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

memory = {"object_store_memory": 200_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
nodes = []
for line in sys.stdin:
    asked = json.loads(line)
    if "drain_s" in asked:
        deadline_ms = int((time.time() + asked["drain_s"]) * 1000)
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        gcs = GcsClient(address=cluster.address)
        print(gcs.drain_node(nodes[asked["node"]].node_id, reason, "it will go", deadline_ms), flush=True)
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


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    parent: int
    state: str
    command: str


def read_process(pid: int) -> Process | None:
    """None where there is none, or nothing of it but its exit status."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else Process(pid, int(parent), state, command)


class Session:
    """A command and all that it starts: Ray's processes leave the command's group, but carry its session."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: Path, stdin: int = subprocess.DEVNULL
    ) -> None:
        """Standard output and error go to the files `output`.out and `output`.err."""
        self._output = output
        with open(f"{output}.out", "wb") as out, open(f"{output}.err", "wb") as err:
            self.process = subprocess.Popen(
                list(command), env=dict(environment), stdin=stdin, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def out(self) -> str:
        return Path(f"{self._output}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return Path(f"{self._output}.err").read_text(errors="replace")

    def processes(self) -> list[Process]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(name)) == self.process.pid and (process := read_process(int(name))):
                    found.append(process)
        return found

    def find(self, role: str) -> list[Process]:
        """Those of a role, lowest pid first."""
        found = {process.pid: process for process in self.processes() if ROLES[role] in process.command}
        # A process that the raylet is about to start shows the raylet's own command line.
        return [process for pid, process in sorted(found.items()) if process.parent not in found]

    def kill(self, role: str, *, timeout_s: float = 180) -> int:
        """SIGKILLs the first process of a role, as soon as there is one, and returns its pid."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := self.find(role)):
            assert time.monotonic() < deadline_s, f"no {role} in {timeout_s} s"
            time.sleep(POLL_S)
        os.kill(found[0].pid, signal.SIGKILL)
        return found[0].pid

    def wait_for_standby(self, num_processes: int, *, timeout_s: float = 180) -> None:
        """Waits until so many idle processes of Ray have imported what a train worker needs."""
        deadline_s = time.monotonic() + timeout_s
        while sum(_is_standby(process.pid) for process in self.find("idle")) < num_processes:
            assert time.monotonic() < deadline_s, f"fewer than {num_processes} processes in standby after {timeout_s} s"
            time.sleep(0.5)

    def kill_data_task(self, *, timeout_s: float = 180) -> int:
        """SIGKILLs a process in the midst of a data task, and returns its pid. Tasks are short, so it is stopped first."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for process in self.find("data task"):
                if self._stopped_in_task(process.pid):
                    os.kill(process.pid, signal.SIGKILL)
                    return process.pid
        raise AssertionError(f"no data task in {timeout_s} s")

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
        """SIGKILLs whatever is left of the session."""
        deadline_s = time.monotonic() + 120
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            assert time.monotonic() < deadline_s, left
            time.sleep(POLL_S)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end()


def environment_for(cache: Path, **more: str) -> dict[str, str]:
    """This process's environment, less the Ray it may be connected to."""
    return {**{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}, "RAYREC_CACHE": str(cache), **more}


class RayCluster(Session):
    """A Ray of several nodes on this machine; the head has no CPUs, so that any task needs another."""

    def __init__(self, folder: Path, *, cache: Path) -> None:
        # A node that is gone is noticed in 2 s rather than 15.
        health = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
        super().__init__(
            [sys.executable, "-u", "-c", _CLUSTER],
            environment=environment_for(cache, RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2", **health),
            output=folder / "cluster",
            stdin=subprocess.PIPE,
        )
        self._raylets: list[int] = []

    def add_node(self, node: str, *, timeout_s: float = 240) -> str:
        """Adds a node, by the JSON of what `ray.cluster_utils.Cluster.add_node` takes; returns the cluster's address. Nodes are
        counted from 0 in the order in which they were added, those that are gone included."""
        address, raylet = self._ask(node, timeout_s=timeout_s).split()
        self._raylets.append(int(raylet))
        return address

    def drain_node(self, seconds: float, *, node: int = -1, timeout_s: float = 240) -> None:
        """Announces that a node, by default the one added last, will be gone in so many seconds."""
        answer = self._ask(json.dumps({"drain_s": seconds, "node": node}), timeout_s=timeout_s)
        assert answer.startswith("(True"), answer

    def kill_node(self, node: int) -> None:
        """SIGKILLs all that runs on a node, like the loss of a machine; what has ended before is left."""
        raylet = self._raylets[node]
        for process in (raylet, *(each.pid for each in self.processes() if each.parent == raylet)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _ask(self, request: str, *, timeout_s: float) -> str:
        before = len(self.out.splitlines())
        assert self.process.stdin is not None
        self.process.stdin.write(request.encode() + b"\n")
        self.process.stdin.flush()
        deadline_s = time.monotonic() + timeout_s
        while len(lines := self.out.splitlines()) == before:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline_s, self.err
            time.sleep(POLL_S)
        return lines[-1]

    def kill_node_of(self, process: Process) -> None:
        """SIGKILLs the raylet of a worker: a forked one is no child of it, but connected to its socket."""
        sockets = subprocess.run(["ss", "-xpH"], capture_output=True, text=True, check=True).stdout.splitlines()
        peers = {line.split()[7] for line in sockets if f"pid={process.pid}," in line}
        (raylet,) = (
            raylet.pid
            for raylet in self.find("raylet")
            if any(f"pid={raylet.pid}," in line and line.split()[5] in peers for line in sockets)
        )
        os.kill(raylet, signal.SIGKILL)


class RayNode(Session):
    """A node that `ray start --block` started."""

    def wait(self, *, timeout_s: float = 180) -> None:
        """Until it takes work."""
        deadline_s = time.monotonic() + timeout_s
        while "Ray runtime started" not in self.out + self.err:
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline_s, self.out + self.err
            time.sleep(POLL_S)


class RayPod(RayNode):
    """A node of a Ray on this machine as KubeRay starts it: `ray start --block` is the process that gets SIGTERM first."""

    def __init__(self, folder: Path, *, cache: Path, address: str, num_cpus: int, resources: str, grace_s: float) -> None:
        """`grace_s`: what its manifest gives Ray from the SIGTERM to the end."""
        options = ("--num-cpus", str(num_cpus), "--resources", resources, "--object-store-memory", "200000000")
        ports = ("--dashboard-agent-listen-port", str(free_ports(1)))
        ray = str(Path(sys.executable).parent / "ray")
        super().__init__(
            [ray, "start", "--block", "--disable-usage-stats", "--address", address, *options, *ports],
            environment=environment_for(cache, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(grace_s)),
            output=folder / "pod",
        )


class RayHead(RayNode):
    """A Ray of one node that `ray start --head` started, on ports of its own."""

    def __init__(self, folder: Path, *, cache: Path, num_cpus: int) -> None:
        """`folder`: its path is short, since Ray's sockets are below it."""
        port = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        ports = ("--port", port, "--ray-client-server-port", port + 1, "--dashboard-agent-listen-port", port + 2)
        quiet = ("--block", "--disable-usage-stats", "--include-dashboard", "false", "--temp-dir", str(folder / "ray"))
        ray = str(Path(sys.executable).parent / "ray")
        super().__init__(
            [ray, "start", "--head", "--num-cpus", str(num_cpus), *map(str, ports), *quiet],
            environment=environment_for(cache, OMP_NUM_THREADS="1"),
            output=folder / "head",
        )


class Run:
    """One run of `rayrec train`, through as many commands as it takes; ends what is left of them when it is left."""

    def __init__(self, config: TrainConfig, folder: Path, *, cache: Path, recipe: str | None = None, **environment: str) -> None:
        """`folder` is for the configuration and the commands' output; the run itself is where `config` says. `recipe`: the
        FILE.py:FUNCTION of a configuration that is of no recipe of rayrec's."""
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
        """Of the latest command."""
        return self._sessions[-1]

    @property
    def num_commands(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        """Runs the command, the same each time."""
        settings = ("--config", str(self._folder / "config.yaml"))
        command = [sys.executable, "-m", "rayrec", "train", *self._recipe, *settings]
        output = self._folder / f"command_{len(self._sessions) + 1}"
        self._sessions.append(Session(command, environment=self._environment, output=output))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """So far, in the order written."""
        try:
            return read_events(storage.join(self.path, "events.jsonl"), kinds=kinds or None)
        except InputError as error:
            if "event file not found" in str(error):
                return []
            raise

    def wait_for(
        self,
        kind: str,
        fits: Callable[[dict[str, Any]], bool] = lambda event: True,
        *,
        since: float = 0.0,
        timeout_s: float = 180,
    ) -> dict[str, Any]:
        """The first event of a kind that fits, written after the time `since` (Unix). Fails where the command ends before."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self.session.process.poll() is not None
            for event in self.events(kind):
                if event["time"] > since and fits(event):
                    return event
            assert not ended, f"the command ended with {self.session.process.returncode}:\n{self.session.err[-4000:]}"
            assert time.monotonic() < deadline_s, f"no such {kind} in {timeout_s} s:\n{self.session.err[-4000:]}"
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, *, since: float = 0.0, timeout_s: float = 180) -> dict[str, Any]:
        return self.wait_for("step", lambda event: event["step"] >= step, since=since, timeout_s=timeout_s)

    def exit_status(self, *, timeout_s: float = 180) -> int:
        try:
            return self.session.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            last = "\n".join(str(event)[:300] for event in self.events()[-5:])
            raise AssertionError(f"still at it after {timeout_s} s:\n{last}\n{self.session.err[-4000:]}") from None

    def summary(self, *, timeout_s: float = 240) -> dict[str, Any]:
        """Of the run that the latest command finishes."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end()


def small_run(log: Path, storage_path: str, **changes: Any) -> TrainConfig:
    """A run of a small log in 2 workers, saved every 40 steps. One thread each, on any node, so that sums are the same."""
    fields: dict[str, Any] = {
        "storage_path": storage_path,
        "name": "run",
        "batch_size": 64,
        "evaluate_every": 160,
        "log_every": 4,
        "checkpoint": {"every": 40, "num_to_keep": 5},
        "early_stopping": {"patience": 0},
        "scaling": {"num_workers": 2, "threads_per_worker": 1},
        "train_data": {"block_bytes": 1 << 17, "segments_per_block": 4},
        "cluster": {"num_cpus": 2},
    }
    return recipes.criteo_demo(str(log / "train.txt")).replace(**{**fields, **changes})
