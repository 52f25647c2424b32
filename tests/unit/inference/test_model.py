"""Served model of every kind, which must score like the trained network and needs no training code."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.click_models import (
    SMALL,
    bucketed_preprocessor,
    hashed_preprocessor,
    lists_preprocessor,
    multi_hot_preprocessor,
    save_clicks,
)
from builders.faults import rejects

from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.inference.model import open_served


def _wide_ids() -> Preprocessor:
    """Use 64-bit ids without a table of 8 GiB."""
    preprocessor = hashed_preprocessor([40] * 26)
    preprocessor.__dict__["id_dtype"] = np.dtype(np.int64)
    return preprocessor


MAKES: dict[str, dict[str, Any]] = {
    "dot": {},
    "cross": {"model": SMALL.replace(interaction="cross")},
    "projection": {"model": SMALL.replace(interaction="projection")},
    "bf16": {"model": SMALL.replace(interaction="cross"), "precision": "bf16"},
    "multi-hot": {"preprocessor": multi_hot_preprocessor()},
    "bags": {"preprocessor": lists_preprocessor()},
    "no dense columns": {"preprocessor": bucketed_preprocessor()},
    "64-bit ids": {"preprocessor": _wide_ids()},
}


@pytest.mark.parametrize("make", MAKES)
def test_logits_match_network(make: str, tmp_path: Path) -> None:
    saved = save_clicks(tmp_path, **MAKES[make])
    served = open_served(str(tmp_path))
    assert (served.kind, served.scorer.quantization, served.source) == ("checkpoint", "fp32", str(saved.checkpoint))
    assert served.preprocessor_hash == saved.preprocessor.hash()
    assert served.scorer.weight_bytes == sum(parameter.nbytes for parameter in saved.model.parameters())
    for count in (200, 1, 0):
        rows = saved.rows(count)
        logits = served.score(rows)
        assert (logits.dtype, logits.shape) == (np.float32, (count,))
        np.testing.assert_allclose(logits, saved.logits(rows), rtol=0, atol=1e-6)


def test_version_depends_on_weights(tmp_path: Path) -> None:
    runs = [save_clicks(tmp_path / folder, seed=seed).run for folder, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, same, other = (open_served(str(run)).version for run in runs)
    assert one == same != other
    assert re.fullmatch("step_00000007-[0-9a-f]{12}-fp32", one)


def test_concurrent_threads_score_equally(tmp_path: Path) -> None:
    saved = save_clicks(tmp_path)
    served = open_served(str(tmp_path))
    batches = [saved.rows(64, seed=seed) for seed in range(20)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(served.score, batches))
    np.testing.assert_allclose(together, [served.score(batch) for batch in batches], rtol=0, atol=1e-6)


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    rejects("contains no complete checkpoint", open_served, str(tmp_path))
    saved = save_clicks(tmp_path)
    (saved.checkpoint / "config.yaml").write_text("recipe: mnist_resnet18\n")
    rejects(r"config.yaml: damaged", open_served, str(tmp_path))
    shutil.rmtree(saved.checkpoint / "preprocessor")
    rejects(r"preprocessor/ not found.*Only click models can be served", open_served, str(tmp_path))
