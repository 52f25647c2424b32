"""Tests of extra checkpoint files of click models."""

from pathlib import Path
from types import SimpleNamespace

from builders.click_models import hashed_preprocessor

from rayrec import recipes, storage
from rayrec.checkpoint.format import sha256_of
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.data.encoding.preprocessor import Preprocessor


def test_checkpoint_files_include_preprocessor(tmp_path: Path) -> None:
    config = recipes.criteo_demo("none")
    made = hashed_preprocessor([7] * 26, config.workload.schema)  # type: ignore[attr-defined]
    made.save(str(tmp_path / "cache" / "abc"))
    sources = config.workload.checkpoint_files(SimpleNamespace(folder=str(tmp_path / "cache" / "abc")))
    assert sources == {f"preprocessor/{name}": f"{tmp_path}/cache/abc/{name}" for name in ("preprocessor.json", "tokens.npy")}
    place = str(tmp_path / "step_00000001")
    described = ExtraFiles({**sources, "config.yaml": b"a: 1"}).write(place)
    assert Preprocessor.load(storage.join(place, "preprocessor")).hash() == made.hash()
    for name, file in described.items():
        assert file == {"bytes": len(Path(place, name).read_bytes()), "sha256": sha256_of(storage.join(place, name))}
