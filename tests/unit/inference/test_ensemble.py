"""Several checkpoints as one model, which scores their mean and works like any checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.click_models import ANY, SMALL, Saved, hashed_preprocessor, save_clicks
from builders.faults import flip, rejects

import rayrec
from rayrec import checkpoint as checkpoints
from rayrec import recipes
from rayrec.checkpoint.writer import TargetSlice, join
from rayrec.cli import run
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.inference.model import open_served
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking import widedeep
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import Feature
from rayrec.workloads.recsys.distillation import Teacher, load_targets

FINAL = FinalNetConfig(embedding_dim=4, first_tower=(8,), second_tower=(6,), embedding_penalty=0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    folder = tmp_path_factory.mktemp("models")
    kinds = (SMALL, FINAL, DeepFMConfig(embedding_dim=8, mlp=(8,)))  # whose table rows are wider than its embeddings
    return [save_clicks(folder / str(seed), model=model, seed=seed, scale=3.0) for seed, model in enumerate(kinds)]


@pytest.fixture(scope="module")
def together(models: list[Saved], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("together") / "model")
    result = rayrec.ensemble([str(models[0].run), str(models[1].checkpoint), str(models[2].run)], out=out)
    assert result["models"] == ["DLRM", "FinalNet", "DeepFM"]
    assert result["checkpoints"] == [str(model.checkpoint) for model in models]
    return out


def _check_mean(together: str | Path, models: Sequence[str | Path], rows: EncodedRows) -> list[np.ndarray]:
    """Check that the ensemble scores the mean of models, whose logits are returned."""
    alone = [open_served(str(model)).score(rows) for model in models]
    np.testing.assert_allclose(open_served(str(together)).score(rows), np.mean(alone, axis=0), atol=1e-6)
    return alone


def test_ensemble_logit_is_mean(models: list[Saved], together: str) -> None:
    alone = _check_mean(together, [model.run for model in models], models[0].rows(200))
    served = open_served(together)
    assert served.scorer.weight_bytes == sum(open_served(str(model.run)).scorer.weight_bytes for model in models)
    assert np.abs(alone[0] - alone[1]).max() > 0.1
    targets = load_targets(Teacher((together,), 1.0), models[0].preprocessor)
    labelled = models[0].rows(200, labelled=True)
    np.testing.assert_allclose(targets(labelled), 1 / (1 + np.exp(-served.score(labelled))), atol=1e-6)


def test_ensemble_is_nested_and_exported(
    models: list[Saved], together: str, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    twice, out = str(tmp_path / "twice"), tmp_path / "export"
    assert run(["ensemble", together, str(models[1].run), "--out", twice]) == 0
    rows = models[0].rows(50)
    alone = _check_mean(twice, [together, models[1].run], rows)
    report = rayrec.export(together, out=str(out), quantize="int8", parity_path=str(click_log / "train.txt"))
    assert report["parity"]["failure"] is None
    assert json.loads((out / "manifest.json").read_text())["model"]["width"] == 8 + 4 + 12
    assert np.abs(open_served(str(out)).score(rows) - alone[0]).max() < 0.2


def test_ensemble_keeps_list_inputs(tmp_path: Path) -> None:
    """The other model's summed table has the name that the ensemble assigns."""
    schema = ANY.replace(sparse=("item", "seen"), lists=("seen",), features=(Feature(name="seen", vocabulary="item"),))
    preprocessor = hashed_preprocessor([30, 30], schema)
    din = DINConfig(embedding_dim=4, attention=(8,), mlp=(8,))
    inputs = ModelInputs.of(preprocessor.inputs)
    assert EnsembleConfig(models=(FINAL.replace(embedding_penalty=0.0), din)).sequences(inputs) == ("seen",)
    kinds: tuple[ClickModelConfig, ...] = (FINAL, din)
    saved = [save_clicks(tmp_path / str(n), model=model, seed=n, preprocessor=preprocessor) for n, model in enumerate(kinds)]
    rayrec.ensemble([str(model.run) for model in saved], out=str(tmp_path / "both"))
    _check_mean(tmp_path / "both", [model.run for model in saved], saved[0].rows(40))


def test_incompatible_models_are_rejected(models: list[Saved], tmp_path: Path) -> None:
    first, out = str(models[0].run), str(tmp_path / "out")
    elsewhere = save_clicks(tmp_path / "elsewhere", preprocessor=hashed_preprocessor(range(11, 11 + 3 * 26, 3)))
    rejected: list[tuple[list[Path], str]] = [
        ([], "at least two checkpoints"),
        ([elsewhere.run], "Preprocessor does not match"),
        ([save_clicks(tmp_path / "rounded", precision="bf16").run], "precision bf16 does not match fp32 of"),
        ([tmp_path], "contains no complete checkpoint"),
    ]
    for others, message in rejected:
        rejects(message, rayrec.ensemble, [first, *map(str, others)], out=out)
    rejects("exists already", rayrec.ensemble, [first, first], out=str(tmp_path))
    (data,) = elsewhere.checkpoint.glob("data_*.safetensors")
    flip(data)
    rejects("damaged, the checksum of", rayrec.ensemble, [str(elsewhere.run)] * 2, out=out)
    assert not Path(out).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "rounded"]


def test_chunk_offsets_are_preserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors in several chunks and blocks, next to unused ones of the same checkpoint."""
    for module in ("writer", "format"):
        monkeypatch.setattr(f"rayrec.checkpoint.{module}.BLOCK_BYTES", 64)
    table, bias, number = torch.arange(120.0).reshape(20, 6), torch.ones(3), torch.tensor(7.0)
    checkpoints.save(str(tmp_path / "a"), {"t": table, "bias": bias, "number": number, "none": table}, state={})
    checkpoints.save(str(tmp_path / "b"), {"u": table[:, :2] * 2}, state={})
    source = [checkpoints.Checkpoint(str(tmp_path / name)) for name in "ab"]
    (tmp_path / "out").mkdir()
    folders = [
        {"t": TargetSlice("table", (20, 8)), "bias": TargetSlice("b", (3,)), "number": TargetSlice("n", ())},
        {"u": TargetSlice("table", (20, 8), 6)},
    ]
    join(str(tmp_path / "out"), list(zip(source, folders, strict=True)), state={"x": 1}, extra_files=lambda folder: None)
    joined = checkpoints.Checkpoint(str(tmp_path / "out"))
    result = dict(checkpoints.full_tensors(joined))
    assert result.keys() == {"table", "b", "n"}
    for name, expected in (("table", torch.cat([table, table[:, :2] * 2], dim=1)), ("b", bias), ("n", number)):
        assert torch.equal(result[name], expected)
    checkpoints.verify(joined)
    with pytest.raises(InputError, match="of its 160 elements"):
        join(str(tmp_path / "out"), [(source[0], folders[0])], state={}, extra_files=lambda folder: None)


def test_ensemble_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipes.criteo_demo()
    several = recipe.replace(workload={"model": {"class": "ensemble"}})
    model: Any = several.workload.model  # type: ignore[attr-defined]
    assert model.models == (
        recipe.workload.model.replace(embedding_penalty=0.0),  # type: ignore[attr-defined]
        FinalNetConfig(embedding_dim=16),
    )
    assert model.embedding_penalty == recipe.workload.model.embedding_penalty  # type: ignore[attr-defined]
    changed = {"class": "ensemble", "models": [{"class": "deepfm", "mlp": [8]}, FINAL.to_dict() | {"embedding_penalty": 0}]}
    model = recipe.replace(workload={"model": changed}).workload.model  # type: ignore[attr-defined]
    assert model.models == (DeepFMConfig(mlp=(8,)), FINAL.replace(embedding_penalty=0.0))
    assert recipes.load_config(recipe.replace(workload={"model": model}).to_yaml()).workload.model == model  # type: ignore[attr-defined]
    assert type(DLRMConfig.replacing(model)).__name__ == "DLRMConfig"
    assert run(["config", "criteo_demo", "--model", "finalnet+dcnv2", "--workload.model.models.0.first-tower", "8"]) == 0
    model = recipes.load_config(capsys.readouterr().out).workload.model  # type: ignore[attr-defined]
    assert [type(one).__name__ for one in model.models] == ["FinalNetConfig", "DCNv2Config"]
    assert model.models[0].first_tower == (8,)
    rejected: list[tuple[dict[str, Any], str]] = [
        ({"models": [{"class": "dlrm"}]}, "models: must have 2 or more values, got"),
        ({"models": [{"class": "dlrm"}, {"mlp": [8]}]}, r"models\[1\].class: must name a model, got none\. rayrec's are .*dlrm"),
        ({"models": [{"class": "dlrm"}, {"class": "os.system"}]}, r"models\[1\].class: model os.system not found"),
        ({"models": [{"class": "dlrm"}, {"class": "deepfm", "mpl": [8]}]}, r"models\[1\].mpl: .* did you mean 'mlp'"),
        ({"models": [{"class": "dlrm"}, FINAL.to_dict()]}, r"models\[1\].embedding_penalty: must be 0, got 0.1"),
        ({"embedding_dim": 8}, "embedding_dim: must be at least 0 and at most 0, got 8"),
    ]
    for options, message in rejected:
        rejects(message, several.replace, workload={"model": options})
    assert run(["config", "criteo_demo", "--model", "finalnet+dnc"]) == 2
    assert "model: unknown model dnc" in capsys.readouterr().err


def test_older_widedeep_keeps_second_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was trained then and is constant now: in a checkpoint, an export and an ensemble."""

    class Earlier(widedeep.WideDeep):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            del self.fields.linear.bias
            self.fields.linear.bias = torch.nn.Parameter(torch.full((1,), 0.75))

    model = widedeep.WideDeepConfig(embedding_dim=4, mlp=(8,))
    monkeypatch.setattr(widedeep, "WideDeep", Earlier)
    saved = save_clicks(tmp_path / "old", model=model)
    monkeypatch.undo()
    rows = saved.rows(50)
    expected = saved.logits(rows)
    assert np.abs(expected - save_clicks(tmp_path / "new", model=model).logits(rows)).min() > 0.7
    rayrec.export(str(saved.run), out=str(tmp_path / "export"), ignore_parity=True)
    rayrec.ensemble([str(saved.run), str(saved.run)], out=str(tmp_path / "ensemble"))
    for path in (saved.run, tmp_path / "export", tmp_path / "ensemble"):
        np.testing.assert_allclose(open_served(str(path)).score(rows), expected, atol=1e-5)
