"""Reads a Dockerfile and carries it out without Docker: each stage is a folder, each RUN a chroot
(as root on Linux).
"""

import json
import os
import re
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_INSIDE = """
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$ROOT/dev/shm"
while read -r from to; do mount --bind "$from" "$ROOT$to"; done < "$BINDS"
exec chroot --userspec="$USERSPEC" "$ROOT" env -i --chdir="$FOLDER" "$@"
"""
"""As Docker sets a container up: /proc, /dev, 64 MiB of /dev/shm, an environment of the image's
alone.
"""


class Instruction(NamedTuple):
    """Word in capitals, and the rest as one line."""

    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """Of a Dockerfile; comments left out, continued lines joined."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    found = (re.fullmatch(r"([A-Za-z]+)\s+(.*)", line.strip()) for line in joined.splitlines())
    return [Instruction(each[1].upper(), each[2]) for each in found if each]


def ignored(path: str, rules: str) -> bool:
    """Whether a .dockerignore of these rules leaves out `path`; the last rule that fits it or a
    folder above it decides.
    """
    out = False
    above = [
        path,
        *(parent.as_posix() for parent in Path(path).parents if parent.as_posix() != "."),
    ]
    for rule in [
        rule for line in rules.splitlines() if (rule := line.strip()) and not rule.startswith("#")
    ]:
        pattern = (
            re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        )
        if any(re.fullmatch(pattern, each) for each in above):
            out = not rule.startswith("!")
    return out


@dataclass
class Stage:
    """A root file system as it grows, and what the instructions set."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"
    command: list[str] = field(default_factory=list)

    def enter(self, word: str, argument: str) -> None:
        """Carry out USER or WORKDIR."""
        if word == "USER":
            self.user = argument
        else:
            self.folder = argument
            (self.root / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def run(
        self, *command: str, binds: Mapping[Path, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        listed = self.root.with_suffix(".binds")
        listed.write_text("".join(f"{source} {target}\n" for source, target in binds.items()))
        homes = {
            line.split(":")[2]: line.split(":")[5]
            for line in (self.root / "etc/passwd").read_text().splitlines()
        }
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        inner = {
            "PATH": path,
            "HOME": homes[self.user],
            **self.arguments,
            **self.environment,
        }
        environment = {
            "ROOT": str(self.root),
            "BINDS": str(listed),
            "FOLDER": self.folder,
            "PATH": path,
            "USERSPEC": f"{self.user}:{self.user}",
        }
        # In a separate mount namespace: what is mounted is gone when it ends.
        isolated = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-ec",
        ]
        line = [
            *isolated,
            _INSIDE,
            "sh",
            *(f"{name}={value}" for name, value in inner.items()),
            *command,
        ]
        return subprocess.run(
            line,
            timeout=timeout_s,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


def build(
    dockerfile: Path,
    context: Path,
    work: Path,
    *,
    base: Stage,
    arguments: Mapping[str, str],
    binds: Mapping[Path, str],
) -> Stage:
    """Carries out all stages in `work`; `base` stands for the image of the first FROM."""
    stages: dict[str, Stage] = {}
    stage = base
    defaults: dict[str, str] = {}
    rules = (context / ".dockerignore").read_text()
    for number, (word, rest) in enumerate(instructions(dockerfile.read_text())):
        if word not in ("RUN", "CMD", "ARG"):
            rest = string.Template(rest).substitute(
                {**defaults, **stage.arguments, **stage.environment}
            )
        if word == "FROM":
            origin, _, name = rest.partition(" AS ")
            parent = stages.get(origin, base)
            root = work / (name or "final")
            subprocess.run(
                [
                    "cp",
                    "-a",
                    "--reflink=auto",
                    str(parent.root),
                    str(root),
                ],
                check=True,
            )
            stage = stages[name or "final"] = Stage(root, environment=dict(parent.environment))
        elif word == "ARG":
            name, _, default = rest.partition("=")
            target = stage.arguments if stages else defaults
            target[name] = arguments.get(name, default)
        elif word == "ENV":
            stage.environment |= dict(part.split("=", 1) for part in rest.split())
        elif word in ("USER", "WORKDIR"):
            stage.enter(word, rest)
        elif word == "COPY":
            _copy(rest.split(), stage, stages, context, rules)
        elif word == "RUN":
            done = stage.run("/bin/sh", "-c", rest, binds=binds, timeout_s=3000)
            assert done.returncode == 0, (
                f"instruction {number}: {rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        elif word == "CMD":
            stage.command = json.loads(rest)
        else:
            raise AssertionError(f"{word} is not known here")
    return stage


def _copy(
    words: list[str], stage: Stage, stages: Mapping[str, Stage], context: Path, rules: str
) -> None:
    """COPY, of files and folders; a folder's contents go into the folder named last, as in
    Docker.
    """
    origin = (
        stages[words.pop(0).removeprefix("--from=")].root
        if words[0].startswith("--from=")
        else None
    )
    *sources, last = words
    target = stage.root / os.path.join(stage.folder, last).lstrip("/")

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if ignored((Path(folder) / name).relative_to(context).as_posix(), rules)
        }

    for source in sources:
        path = (origin or context) / source.lstrip("/")
        assert path.exists(), f"COPY: there is no {source}"
        assert origin is not None or not ignored(source, rules), (
            f"COPY: .dockerignore leaves out {source}"
        )
        if path.is_dir():
            shutil.copytree(
                path, target, symlinks=True, dirs_exist_ok=True, ignore=None if origin else left_out
            )
        else:
            shutil.copy(path, target / path.name if last.endswith("/") else target)
