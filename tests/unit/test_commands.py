"""Every verb has its command, and loads what it needs alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rayrec.commands import MODULES, command
from rayrec.verbs import VERBS


def test_every_verb_has_one_command() -> None:
    verbs = [verb for verbs in MODULES.values() for verb in verbs]
    assert sorted(verbs) == sorted(verb for verb in VERBS if verb != "doctor")  # which must run where imports fail
    for verb in verbs:
        assert callable(command(verb))


@pytest.mark.parametrize(("verb", "unneeded"), [("top", "rayrec.prepare"), ("validate", "rayrec.serve.online.app")])
def test_a_verb_loads_its_own_module_alone(verb: str, unneeded: str) -> None:
    code = f"import sys; from rayrec.commands import command; command({verb!r}); print({unneeded!r} in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.strip() == "False"
