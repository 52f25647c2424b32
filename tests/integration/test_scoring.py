"""Rows of a custom workload, in this process and on Ray: evaluated, predicted, and rejected in one line."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders.scored_rows import rows_file, scored, trained

import rayrec
from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError
from rayrec.observe.console import Console

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUIET = Console(quiet=True)


def test_rows_are_evaluated_and_predicted(local_ray: None, tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path / "run")
    path = rows_file(tmp_path, 333)
    arrays = np.load(path)
    with torch.no_grad():
        logits = model(torch.from_numpy(arrays["x"]))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(arrays["label"]), reduction="none")
    here = {"recipe": scored, "cluster_address": "none", "console": QUIET}
    told = rayrec.evaluate(str(tmp_path / "run"), path, **here)
    assert told.pop("loss") == pytest.approx(losses.double().mean().item(), rel=1e-6)
    assert told.pop("perplexity") == pytest.approx(np.exp(losses.double().mean().item()), rel=1e-6)
    assert told == {"bits": 32.0, "rows": 333, "checkpoint": checkpoint}

    out = tmp_path / "out"
    told = rayrec.predict(checkpoint, path, out=str(out), batch_rows=7, **here)
    assert (told["rows"], told["out"], told["checkpoint"]) == (333, str(out), checkpoint)
    table = pq.read_table(out)
    assert table.column_names == ["row", "logits", "best", "named"]
    assert table.column("row").to_pylist() == list(range(333))
    np.testing.assert_allclose(np.array(table.column("logits").to_pylist()), logits.numpy(), atol=1e-6)
    rows = rayrec.predict(checkpoint, path, recipe=scored, console=QUIET).take_all()
    assert [row["best"] for row in rows] == table.column("best").to_pylist()


def test_trouble_is_told_in_one_line(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path / "run")
    unlabelled, out = rows_file(tmp_path, 20, labelled=False), tmp_path / "out"
    labelled = rows_file(tmp_path, 20)
    with pytest.raises(InputError, match="has no labels"):
        rayrec.evaluate(checkpoint, unlabelled, recipe=scored, console=QUIET)
    with pytest.raises(InputError, match="no recipe 'scored'"):
        rayrec.evaluate(checkpoint, unlabelled, console=QUIET)
    with pytest.raises(InputError, match="no such field; did you mean 'batch_rows'"):
        rayrec.evaluate(checkpoint, unlabelled, recipe=scored, batch_row=3)
    with pytest.raises(InputError, match="batch_rows: must be at least 1, got 0"):
        rayrec.evaluate(checkpoint, unlabelled, recipe=scored, batch_rows=0, console=QUIET)
    with pytest.raises(InputError, match="does not predict clicks, which slice_by and confidence need"):
        rayrec.evaluate(checkpoint, labelled, recipe=scored, slice_by=("day",), confidence=0.9, console=QUIET)
    with pytest.raises(InputError, match="GPU for cuda not found"):
        rayrec.predict(checkpoint, unlabelled, out=str(out), recipe=scored, device="cuda", console=QUIET)
    data = next(Path(checkpoint).glob("data_*.safetensors"))
    chunk = Checkpoint(checkpoint).manifest()["tensors"]["model.inner.weight"]["chunks"][0]
    content = bytearray(data.read_bytes())
    content[chunk["start"]] ^= 1
    data.write_bytes(content)
    with pytest.raises(InputError, match="damaged, the checksum"):
        rayrec.predict(checkpoint, unlabelled, out=str(out), recipe=scored, console=QUIET)
    assert not list(tmp_path.glob("out*"))
