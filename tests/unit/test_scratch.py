"""Temporary folders of killed processes: which are removed, and which stay."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import rayrec
from rayrec.storage import scratch
from rayrec.storage.scratch import Scratch

OWNER = """
import sys
from rayrec.storage.scratch import Scratch
print(Scratch("attempt", parent=sys.argv[1]).path, flush=True)
sys.stdin.read()
"""


def sweep(folder: Path) -> list[str]:
    """Clean up like a new process, and return the remaining folders."""
    scratch._remove_abandoned.cache_clear()
    with Scratch("later", parent=str(folder)) as own:
        return [str(path) for path in folder.iterdir() if str(path) != own]


def test_folders_of_killed_process_are_removed(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("rayrec-attempt-1fwd5mbt", "rayrec-00000000-attempt-of_another_machine")]
    for other in others:
        other.mkdir()
    kept = sorted(map(str, others))
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = owner.stdout.readline().strip()
    (Path(folder) / "file").touch()
    assert sorted(sweep(tmp_path)) == sorted([*kept, folder]), "a live process's stays"
    owner.kill()
    owner.communicate()
    assert sorted(sweep(tmp_path)) == kept


def test_folder_removed_as_abandoned_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed by another process between its creation and its lock."""
    make, made = tempfile.mkdtemp, []

    def mkdtemp(prefix: str, dir: str) -> str:
        made.append(make(prefix=prefix, dir=dir))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with Scratch("attempt", parent=str(tmp_path)) as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [folder] == made[1:]
    assert not list(tmp_path.iterdir())


def test_all_temporary_folders_use_scratch() -> None:
    source = Path(rayrec.__file__).parent
    own = [path for path in source.rglob("*.py") if re.search(r"TemporaryDirectory|mkdtemp", path.read_text())]
    assert own == [source / "storage" / "scratch.py"]
