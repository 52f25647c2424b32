"""Who owns a run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from rayrec.checkpoint import acquire_lease
from rayrec.config import InputError


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_latest_claim_owns_the_run(tmp_path: Path, scheme: str) -> None:
    run = f"{scheme}{tmp_path}"
    first = acquire_lease(run)
    assert first.valid()
    assert first.name.startswith("000001-")
    second = acquire_lease(run)
    assert (first.valid(), second.valid()) == (False, True)
    assert pickle.loads(pickle.dumps(second)).valid()
    second.check()
    with pytest.raises(InputError, match="another process has taken over this run"):
        first.check()


def test_of_two_claims_at_once_one_owns_the_run(tmp_path: Path) -> None:
    mine = acquire_lease(str(tmp_path))
    (tmp_path / "claims" / ("000001-" + "f" * 32)).touch()
    assert not mine.valid()


def test_other_files_are_no_claims(tmp_path: Path) -> None:
    mine = acquire_lease(str(tmp_path))
    for name in ("zzz", "000009-" + "f" * 32 + ".abc.partial", "9-x"):
        (tmp_path / "claims" / name).touch()
    assert mine.valid()
    assert acquire_lease(str(tmp_path)).name.startswith("000002-")


def test_old_claims_go_and_numbers_go_on(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / ("999999-" + "f" * 32)).touch()
    names = [acquire_lease(str(tmp_path)).name for _ in range(12)]
    assert [name.split("-")[0] for name in names] == [str(1_000_000 + number) for number in range(12)]
    assert sorted(os.listdir(tmp_path / "claims")) == names[-5:]
