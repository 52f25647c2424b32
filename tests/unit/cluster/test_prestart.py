"""Prestarted processes: imported modules, and runtime environments of workers and tasks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from hosts.ports import free_ports

from rayrec.cluster import prestart


def test_hook_imports_available_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_when_imported.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "imported_ahead.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    variables = prestart.importing(["breaks_when_imported", "no_such_module", "imported_ahead"])
    assert variables[prestart.HOOK] == "rayrec.cluster.prestart.import_modules"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prestart.import_modules()
    assert sys.modules.pop("imported_ahead").__file__ == str(tmp_path / "imported_ahead.py")
    assert "breaks_when_imported" not in sys.modules


def test_preloads_modules_depends_on_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestart, "train_environment", dict)
    monkeypatch.setattr(prestart, "_of_job", lambda: {"py_executable": "python"})
    of_workers = prestart.of_train_workers({"GLOO_SOCKET_IFNAME": "eth1", **prestart.importing(["torch"])})
    variables = json.loads(of_workers)["env_vars"]
    assert json.loads(of_workers)["py_executable"] == "python"
    assert prestart.preloads_modules(variables)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth1"
    # What a worker's tasks inherit is overridden.
    assert not prestart.preloads_modules({**variables, **prestart.for_tasks_of(variables)})
    assert not prestart.preloads_modules({})
    assert prestart.for_tasks_of({prestart.HOOK: "the job's own"}) == {}


def test_prestart_returns_false_without_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": free_ports(1)}
    assert not prestart.prestart(node, "{}", num_processes=1, keep_s=1.0)
