"""Machines for tests: Linux namespaces with an address, a host name, processes, /dev/shm and
folders of their own each.

Ray nodes on one machine share its address, its files and its memory, which hides faults of
clusters. Here each node is a set of namespaces (network, mount, UTS, IPC, PID) on a bridge that
only they reach. Needs Linux, root, and the commands `ip` (package iproute2), `unshare`, `nsenter`,
`setpriv` and `mount` (package util-linux); `missing()` says what this machine lacks.
"""

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts.processes import (
    FREQUENT_CHECKS,
    NO_PRESTART,
    RAYREC,
    EndsOnExit,
    Session,
    pids,
    ray_start,
    wait_for_ray,
)

_SUBNET = "10.77.0"
_PORT = 6379
_SHM_BYTES = 1 << 30
_STORE_BYTES = 500_000_000
_ALL = (
    "--mount",
    "--uts",
    "--ipc",
    "--net",
    "--pid",
)
_INIT = """
import os, time
print("ready", flush=True)
while True:
    try:
        os.wait()  # as an init does for orphans
    except ChildProcessError:
        time.sleep(0.1)
"""


@functools.cache
def missing() -> str | None:
    """What this machine lacks for namespaces of nodes, and how to get it; None if nothing."""
    for command in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(command) is None:
            return f"needs the command `{command}`: apt-get install iproute2 util-linux"
    trial = (
        "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && ip link add name va type "
        "veth peer name vb"
    )
    trial += " && ip link add name br type bridge && ip link set va master br"
    isolated = ["unshare", *_ALL, "--fork", "--mount-proc", "sh", "-c", trial]
    done = subprocess.run(
        isolated,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (
        "needs root, and a kernel with namespaces, veth and bridge "
        f"({done.stderr.strip().splitlines()[-1:]})"
    )


@functools.cache
def _missing_qdisc(kind: str, settings: str) -> str | None:
    """Why links cannot be given a queue of this kind here; None if they can."""
    trial = (
        f"ip link add name va type veth peer name vb && tc qdisc add dev va root {kind} {settings}"
    )
    if (
        subprocess.run(
            ["unshare", "--net", "sh", "-c", trial], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return None
    return (
        f"needs a kernel with the qdisc {kind} (module sch_{kind}) and the command `tc` (package "
        "iproute2)"
    )


missing_netem = functools.partial(_missing_qdisc, "netem", "delay 1ms")  # of delay and loss
# of speed
missing_tbf = functools.partial(_missing_qdisc, "tbf", "rate 1gbit burst 512kb latency 20ms")


class _Space:
    """A set of namespaces, which lasts as long as the process that holds it."""

    def __init__(self, setup: str, *, kinds: Sequence[str], environment: Mapping[str, str]) -> None:
        flags = [*kinds, "--fork", "--kill-child"] + (["--mount-proc"] if "--pid" in kinds else [])
        script = f"set -e\n{setup}\nexec {sys.executable} -c '{_INIT}'"
        # Ends with the test's process, however that ends.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "sh", "-c", script]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"no namespaces: {self._holder.stderr.read()}")
        children = (
            Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        )
        self.pid = int(children[0])
        self._enter = ["nsenter", "--target", str(self.pid), *kinds, "--"]

    def command(self, command: Sequence[str]) -> list[str]:
        return [*self._enter, *command]

    def call(self, command: str) -> None:
        subprocess.run(self.command(command.split()), check=True, capture_output=True)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.communicate()


class Node:
    """One machine of a network, and the Ray node on it if one was started."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.name = name
        self.address = f"{_SUBNET}.{number}"
        self._network = network
        self._link = f"v{number}"
        self._commands = 0
        self.folder = network.folder / name
        """What the node sees as `network.local`."""
        for inner in ("home", "storage"):
            (self.folder / inner).mkdir(parents=True)
        mounts = [(self.folder, network.local), (network.hosts, Path("/etc/hosts"))]
        mounts += [(self.folder / "storage", place) for place in network.unshared]
        setup = [
            "mount --make-rprivate /",
            f"hostname {name}",
            f"mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm",
            *(f"mount --bind {source} {target}" for source, target in mounts),
            "ip link set lo up",
        ]
        own = {
            "HOME": str(network.local / "home"),
            "RAYREC_CACHE": str(network.local / "cache"),
            "PYTHONUNBUFFERED": "1",
        }
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "AWS_"))
        }
        self.environment = {**kept, **FREQUENT_CHECKS, **NO_PRESTART, **own}
        """Of every command here; changes count for those that start later."""
        self._space = _Space("\n".join(setup), kinds=_ALL, environment=self.environment)
        network.switch.call(
            f"ip link add {self._link} type veth peer name p netns {self._space.pid}"
        )
        network.switch.call(f"ip link set {self._link} master bridge up")
        for command in (
            "link set p name eth0",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
        ):
            self._space.call(f"ip {command}")

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs `command` in here."""
        return self._space.command(command)

    def start(self, *command: str, **environment: str) -> Session:
        self._commands += 1
        output = self._network.folder / f"{self.name}-{self._commands}"
        return Session(
            self.enter(*command), environment={**self.environment, **environment}, output=output
        )

    def run(self, *command: str, **environment: str) -> Session:
        return self.start(*command, **environment).wait()

    def rayrec(self, *arguments: str, timeout_s: float = 240, **environment: str) -> Session:
        return self.start_rayrec(*arguments, **environment).wait(timeout_s=timeout_s)

    def start_rayrec(self, *arguments: str, **environment: str) -> Session:
        return self.start(
            *RAYREC, *arguments, **{"RAY_ADDRESS": self._network.head_address, **environment}
        )

    def start_ray(self, has: Mapping[str, float], *, head: bool, **environment: str) -> Session:
        """Start Ray's processes of this node, with `cpus` and other resources; `wait_for_ray` waits
        for them.
        """
        place = ("--head", "--port", _PORT) if head else ("--address", self._network.head_address)
        local = (
            ("--include-dashboard", "false", "--temp-dir", self._network.local / "ray")
            if head
            else ()
        )
        resources = json.dumps({name: amount for name, amount in has.items() if name != "cpus"})
        command = ray_start(
            *place,
            "--node-ip-address",
            self.address,
            "--num-cpus",
            has["cpus"],
            "--resources",
            resources,
            "--object-store-memory",
            _STORE_BYTES,
            *local,
        )
        return self.start(*command, **environment)

    def processes(self, holding: str) -> list[int]:
        """Pids, as this test sees them, of this node's processes whose command line holds a text;
        lowest first.
        """
        space = os.stat(f"/proc/{self._space.pid}/ns/pid").st_ino

        def fits(pid: int) -> bool:
            line = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            return os.stat(f"/proc/{pid}/ns/pid").st_ino == space and holding in line

        return pids(fits)

    def started_processes(self) -> list[int]:
        """Pids of all processes on this node but its init, which came with the node."""
        return [pid for pid in self.processes("") if pid != self._space.pid]

    def unplug(self) -> None:
        """Cuts the node off the others; its processes do not see it."""
        self._network.switch.call(f"ip link set {self._link} down")

    def disturb(self, *, delay_ms: float, loss_percent: float) -> None:
        """Delays and drops what the node sends; see `missing_netem`."""
        self._queue(f"netem delay {delay_ms}ms loss {loss_percent}%")

    def limit(self, *, gbit_per_s: float) -> None:
        """At most so much leaves the node; see `missing_tbf`."""
        # 0.4 ms; the kernel cuts its packets of 64 KiB where it is less
        burst = max(128 << 10, int(gbit_per_s * 50_000))
        self._queue(f"tbf rate {gbit_per_s}gbit burst {burst}b latency 20ms")

    def _queue(self, settings: str) -> None:
        self._space.call(f"tc qdisc replace dev eth0 root {settings}")

    def sent_bytes(self) -> int:
        lines = self.run("cat", "/proc/net/dev").out.splitlines()
        (eth0,) = (line.split(":", 1)[1] for line in lines if line.strip().startswith("eth0:"))
        return int(eth0.split()[8])

    def end(self) -> None:
        self._space.end()


class Network(EndsOnExit):
    """Machines that reach each other and nothing else."""

    def __init__(self, *, unshared: Sequence[Path] = ()) -> None:
        """Each node has its own files at the folders `unshared`; all others are the test's own,
        shared by all nodes.
        """
        # short: Ray's sockets are below it
        self.folder = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))
        self.local = self.folder / "m"
        """Each node's own folder, at the same path on all."""
        self.local.mkdir()
        self.unshared = tuple(unshared)
        self.hosts = self.folder / "hosts"
        self.hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{_SUBNET}.{n} node{n}\n" for n in range(1, 9))
        )
        self.head_address = f"{_SUBNET}.1:{_PORT}"
        self.nodes: list[Node] = []
        setup = [
            "ip link add bridge type bridge",
            f"ip address add {_SUBNET}.254/24 dev bridge",
            "ip link set bridge up",
        ]
        self.switch = _Space("\n".join(setup), kinds=("--net",), environment=os.environ)

    def add(self) -> Node:
        number = len(self.nodes) + 1
        self.nodes.append(Node(self, f"node{number}", number))
        return self.nodes[-1]

    def ssh(self) -> Path:
        """Write a stand-in for ssh, which takes the name of a machine and a shell command."""
        cases = []
        for node in self.nodes:
            names = ("HOME", "RAYREC_CACHE", "PYTHONUNBUFFERED", *FREQUENT_CHECKS)
            variables = [f"{name}={node.environment[name]}" for name in names]
            cases.append(
                f'{node.name}) exec {shlex.join(node.enter("env", *variables, "sh", "-c"))} "$2" ;;'
            )
        script = self.folder / "ssh"
        script.write_text(
            "\n".join(["#!/bin/bash", 'case "$1" in', *cases, "esac", "exit 255", ""])
        )
        script.chmod(0o755)
        return script

    def cluster(self, *nodes: Mapping[str, float], token: str | None = None) -> list[Node]:
        """Starts a Ray cluster on new machines, the first of them its head, and returns them. A
        mapping names a node's `cpus` and its further resources. With a `token` the cluster demands
        it; the first machine's user has it, at ~/.ray/auth_token.
        """
        machines = [self.add() for _ in nodes]
        security = (
            {"RAY_AUTH_MODE": "disabled"}
            if token is None
            else {"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"}
        )
        started: list[Session] = []
        for machine, has in zip(machines, nodes, strict=True):
            started.append(machine.start_ray(has, head=not started, **security))
            # The head first, then two at once: Ray gives up on a node after 30 s.
            wait_for_ray(started[-2:][0])
        wait_for_ray(started[-1])
        if token is not None:
            path = machines[0].folder / "home" / ".ray" / "auth_token"
            path.parent.mkdir()
            path.write_text(token)
        return machines

    def end(self) -> None:
        for node in self.nodes:
            node.end()
        self.switch.end()
        shutil.rmtree(self.folder, ignore_errors=True)
