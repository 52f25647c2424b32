"""Small click model and its exports, created once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.click_models import Saved, save_clicks
from builders.exports import ROWS, export_of, write_criteo_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rayrec.inference.export.parity._SPEED_S", 0.01)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("run")
    return save_clicks(folder, scale=3.0, train_data={"path": write_criteo_rows(folder / "log.tsv", ROWS)})


@pytest.fixture(scope="session")
def exported(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the export with a quantization, created on first use."""

    @functools.cache
    def make(quantization: str) -> Path:
        out = tmp_path_factory.mktemp("exports") / quantization
        export_of(saved, out, quantize=None if quantization == "fp32" else quantization, max_auroc_loss=0.05)
        return out

    return make
