"""Several checkpoints as one model, which scores their mean and works like any checkpoint."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import own_click_model
from builders.click_models import ANY, SMALL, Saved, hashed_preprocessor, save_clicks
from builders.faults import flip, rejects

import rayrec
from rayrec import checkpoint as checkpoints
from rayrec import recipes
from rayrec.checkpoint.writer import TargetSlice, join
from rayrec.cli import run
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.logs.text_parser import parse
from rayrec.inference.config import ComparisonGates
from rayrec.inference.evaluate import ScoredRows, scored_rows
from rayrec.inference.evaluate import compare as compare_checkpoints
from rayrec.inference.model import open_served
from rayrec.inference.scoring import ScoringJob
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.significance import Resampling, compare
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.cost import network_multiply_adds
from rayrec.models.ranking import widedeep
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.observe.console import Console
from rayrec.schema import Feature, Schema
from rayrec.workloads.recsys.baselines import Baselines, one_hot, open_baselines
from rayrec.workloads.recsys.distillation import Teacher, load_targets

pytestmark = pytest.mark.usefixtures("own_cache")
FINAL = FinalNetConfig(
    embedding_dim=4,
    first_tower=(8,),
    second_tower=(6,),
    embedding_penalty=0.1,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    folder = tmp_path_factory.mktemp("models")
    # whose table rows are wider than its embeddings
    kinds = (SMALL, FINAL, DeepFMConfig(embedding_dim=8, mlp=(8,)))
    return [
        save_clicks(
            folder / str(seed),
            model=model,
            seed=seed,
            scale=3.0,
        )
        for seed, model in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def together(models: list[Saved], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("together") / "model")
    result = rayrec.ensemble(
        [
            str(models[0].run),
            str(models[1].checkpoint),
            str(models[2].run),
        ],
        out=out,
    )
    assert result["models"] == ["DLRM", "FinalNet", "DeepFM"]
    assert result["checkpoints"] == [str(model.checkpoint) for model in models]
    return out


def _check_mean(
    together: str | Path,
    models: Sequence[str | Path],
    rows: EncodedRows,
) -> list[np.ndarray]:
    """Check that the ensemble scores the mean of models, whose logits are returned."""
    alone = [open_served(str(model)).score(rows) for model in models]
    np.testing.assert_allclose(
        open_served(str(together)).score(rows),
        np.mean(alone, axis=0),
        atol=1e-6,
    )
    return alone


def test_ensemble_logit_is_mean(models: list[Saved], together: str) -> None:
    alone = _check_mean(together, [model.run for model in models], models[0].rows(200))
    served = open_served(together)
    assert served.scorer.weight_bytes == sum(
        open_served(str(model.run)).scorer.weight_bytes for model in models
    )
    assert np.abs(alone[0] - alone[1]).max() > 0.1
    targets = load_targets(Teacher(together, 1.0), models[0].preprocessor)
    labelled = models[0].rows(200, labelled=True)
    np.testing.assert_allclose(
        targets(labelled),
        1 / (1 + np.exp(-served.score(labelled))),
        atol=1e-6,
    )


def test_ensemble_is_nested_and_exported(
    models: Any,
    together: str,
    click_log: Path,
    tmp_path: Path,
) -> None:
    twice = str(tmp_path / "twice")
    out = tmp_path / "export"
    assert run(["ensemble", together, str(models[1].run), "--out", twice]) == 0
    rows = models[0].rows(50)
    alone = _check_mean(twice, [together, models[1].run], rows)
    report = rayrec.export(
        together,
        out=str(out),
        quantize="int8",
        parity_path=str(click_log / "train.txt"),
    )
    assert report["parity"]["failure"] is None
    assert json.loads((out / "manifest.json").read_text())["model"]["width"] == 8 + 4 + 12
    assert np.abs(open_served(str(out)).score(rows) - alone[0]).max() < 0.2


def test_ensemble_keeps_list_inputs(tmp_path: Path) -> None:
    schema = ANY.replace(
        sparse=("item", "seen"),
        lists=("seen",),
        features=(Feature(name="seen", vocabulary="item"),),
    )
    preprocessor = hashed_preprocessor([30, 30], schema)
    din = DINConfig(embedding_dim=4, attention=(8,), mlp=(8,))
    inputs = ModelInputs.from_schema(preprocessor.inputs)
    assert EnsembleConfig(models=(FINAL.replace(embedding_penalty=0.0), din)).sequences(inputs) == (
        "seen",
    )
    kinds: tuple[ClickModelConfig, ...] = (FINAL, din)
    saved = [
        save_clicks(
            tmp_path / str(n),
            model=model,
            seed=n,
            preprocessor=preprocessor,
        )
        for n, model in enumerate(kinds)
    ]
    rayrec.ensemble([str(model.run) for model in saved], out=str(tmp_path / "both"))
    _check_mean(tmp_path / "both", [model.run for model in saved], saved[0].rows(40))


def test_incompatible_models_are_rejected(models: list[Saved], tmp_path: Path) -> None:
    first = str(models[0].run)
    out = str(tmp_path / "out")
    elsewhere = save_clicks(
        tmp_path / "elsewhere",
        preprocessor=hashed_preprocessor(range(11, 11 + 3 * 26, 3)),
    )
    rejected: list[tuple[list[Path], str]] = [
        ([], "at least two checkpoints"),
        ([elsewhere.run], "Preprocessor does not match"),
        (
            [save_clicks(tmp_path / "rounded", precision="bf16").run],
            "precision bf16 does not match fp32 of",
        ),
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


def test_mixed_checkpoint_is_rejected_before_writing(models: list[Saved], tmp_path: Path) -> None:
    """The folder has the weights of one model and the settings of another."""
    mixed = tmp_path / "mixed"
    shutil.copytree(models[0].checkpoint, mixed)
    shutil.copy(models[1].checkpoint / "config.yaml", mixed / "config.yaml")
    with_other = [str(models[0].checkpoint), str(mixed)]
    rejects(
        "Its files are from different checkpoints",
        rayrec.ensemble,
        with_other,
        out=str(tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()


def test_chunk_offsets_are_preserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors in several chunks and blocks, next to unused ones of the same checkpoint."""
    for module in ("writer", "format"):
        monkeypatch.setattr(f"rayrec.checkpoint.{module}.BLOCK_BYTES", 64)
    table = torch.arange(120.0).reshape(20, 6)
    bias = torch.ones(3)
    number = torch.tensor(7.0)
    checkpoints.save(
        str(tmp_path / "a"),
        {
            "t": table,
            "bias": bias,
            "number": number,
            "none": table,
        },
        state={},
    )
    checkpoints.save(str(tmp_path / "b"), {"u": table[:, :2] * 2}, state={})
    source = [checkpoints.Checkpoint(str(tmp_path / name)) for name in "ab"]
    (tmp_path / "out").mkdir()
    second = {"u": TargetSlice("table", (20, 8), 6)}
    folders = [
        {
            "t": TargetSlice("table", (20, 8)),
            "bias": TargetSlice("b", (3,)),
            "number": TargetSlice("n", ()),
        },
        second,
    ]
    join(
        str(tmp_path / "out"),
        list(zip(source, folders, strict=True)),
        state={"x": 1},
        extra_files=lambda folder: None,
    )
    joined = checkpoints.Checkpoint(str(tmp_path / "out"))
    result = dict(checkpoints.full_tensors(joined))
    assert result.keys() == {"table", "b", "n"}
    for name, expected in (
        ("table", torch.cat([table, table[:, :2] * 2], dim=1)),
        ("b", bias),
        ("n", number),
    ):
        assert torch.equal(result[name], expected)
    checkpoints.verify(joined)
    incomplete = [(source[0], folders[0])]
    rejects(
        "of its 160 elements",
        join,
        str(tmp_path / "out"),
        incomplete,
        state={},
        extra_files=lambda folder: None,
    )


def test_ensemble_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipes.criteo_demo()
    several = recipe.replace(workload={"model": {"class": "ensemble"}})
    own, model = (
        config.workload.model  # type: ignore[attr-defined]
        for config in (recipe, several)
    )
    assert model.models == (own.replace(embedding_penalty=0.0), FinalNetConfig(embedding_dim=16))
    assert model.embedding_penalty == own.embedding_penalty
    changed = {
        "class": "ensemble",
        "models": [{"class": "deepfm", "mlp": [8]}, FINAL.to_dict() | {"embedding_penalty": 0}],
    }
    model = recipe.replace(workload={"model": changed}).workload.model  # type: ignore[attr-defined]
    assert model.models == (DeepFMConfig(mlp=(8,)), FINAL.replace(embedding_penalty=0.0))
    again = recipes.load_config(recipe.replace(workload={"model": model}).to_yaml())
    assert again.workload.model == model  # type: ignore[attr-defined]
    assert type(DLRMConfig.replacing(model)).__name__ == "DLRMConfig"
    assert (
        run(
            [
                "config",
                "criteo_demo",
                "--model",
                "finalnet+dcnv2",
                "--workload.model.models.0.first-tower",
                "8",
            ]
        )
        == 0
    )
    shown = recipes.load_config(capsys.readouterr().out)
    model = shown.workload.model  # type: ignore[attr-defined]
    assert [type(one).__name__ for one in model.models] == ["FinalNetConfig", "DCNv2Config"]
    assert model.models[0].first_tower == (8,)
    rejected: list[tuple[dict[str, Any], str]] = [
        ({"models": [{"class": "dlrm"}]}, "models: must have 2 or more values, got"),
        (
            {"models": [{"class": "dlrm"}, {"mlp": [8]}]},
            r"models\[1\].class: must name a model, got none\. rayrec's are .*dlrm",
        ),
        (
            {"models": [{"class": "dlrm"}, {"class": "os.system"}]},
            r"models\[1\].class: model os.system not found",
        ),
        (
            {"models": [{"class": "dlrm"}, {"class": "deepfm", "mpl": [8]}]},
            r"models\[1\].mpl: .* did you mean 'mlp'",
        ),
        (
            {"models": [{"class": "dlrm"}, FINAL.to_dict()]},
            r"models\[1\].embedding_penalty: must be 0, got 0.1",
        ),
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


# -- Comparison of checkpoints on the same rows: metrics, differences and gates
ROWS = 2_000
QUIET: dict[str, Any] = {"cluster_address": "none", "console": Console(quiet=True), "resamples": 50}


@pytest.fixture(scope="module")
def log(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "train.txt"
    path.write_bytes(
        b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS])
    )
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """Train two seeds, and a larger model with a separate Preprocessor."""
    folder = tmp_path_factory.mktemp("models")
    first = save_clicks(folder / "a", seed=1, scale=3.0)
    custom = hashed_preprocessor(range(11, 11 + 3 * 26, 3))
    wide = SMALL.replace(bottom_mlp=(64, 8), top_mlp=(64, 1))
    return [
        first,
        save_clicks(folder / "b", seed=2, scale=3.0),
        save_clicks(folder / "c", model=wide, preprocessor=custom),
    ]


def _labels(log: Path) -> np.ndarray:
    return np.array([int(line[:1]) for line in log.read_bytes().splitlines()], np.uint8)


@pytest.fixture(scope="module")
def comparison(
    compared: list[Saved],
    log: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYREC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return rayrec.compare(
            [str(saved.run) for saved in compared],
            str(log),
            group="cat_5",
            **QUIET,
        )


def _logits(saved: Saved, log: Path) -> np.ndarray:
    rows, _ = parse(saved.preprocessor.schema, log.read_bytes())
    return saved.logits(saved.preprocessor.encode(rows))


def test_comparison_matches_single_evaluations(
    comparison: dict[str, Any],
    compared: list[Saved],
    log: Path,
) -> None:
    labels = _labels(log)
    assert (comparison["rows"], comparison["label_rate"]) == (ROWS, pytest.approx(labels.mean()))
    assert [model["name"] for model in comparison["models"]] == ["a", "b", "c"]
    for report, saved in zip(comparison["models"], compared, strict=True):
        metrics = binary_metrics(_logits(saved, log), labels)
        assert {name: report[name] for name in metrics} == pytest.approx(metrics, abs=1e-4)
        low, high = report["intervals"]["auroc"]
        assert low < report["auroc"] < high
        assert 0 < report["gauc"] < 1
        assert report["rows_per_s"] > 0
    assert comparison["failures"] == []


def test_comparison_differences_match_resampling(
    comparison: dict[str, Any],
    compared: list[Saved],
    log: Path,
) -> None:
    labels = _labels(log)
    logits = [_logits(saved, log) for saved in (compared[2], compared[0])]
    pairs = {(pair["model"], pair["other"]): pair for pair in comparison["differences"]}
    assert len(pairs) == 3
    for name, expected_difference in compare(*logits, labels, Resampling(resamples=50)).items():
        report = pairs["c", "a"][name]
        assert report["method"] == expected_difference.method
        for field in ("difference", "low", "high"):
            assert report[field] == pytest.approx(getattr(expected_difference, field), abs=1e-3)
        assert report["p_value"] == pytest.approx(expected_difference.p_value, abs=0.05)


def test_costs_of_compared_models_match_checkpoints(
    comparison: dict[str, Any],
    compared: list[Saved],
) -> None:
    for saved, report in zip(compared, comparison["models"], strict=True):
        assert report["parameters"] == sum(
            parameter.numel() for parameter in saved.model.parameters()
        )
        model = saved.config.workload.model  # type: ignore[attr-defined]
        inputs = ModelInputs.from_schema(saved.preprocessor.inputs)
        assert report["multiply_adds"] == network_multiply_adds(
            saved.model.head.network,
            inputs,
            model,
        )
        assert report["checkpoint"] == str(saved.checkpoint)
        assert report["preprocessor"] == saved.preprocessor.hash()


def test_model_does_not_differ_from_itself(compared: list[Saved], log: Path) -> None:
    place = str(compared[0].run)
    found = rayrec.compare([place, place], str(log), **QUIET)
    assert [model["name"] for model in found["models"]] == [f"1: {place}", f"2: {place}"]
    assert found["differences"][0]["auroc"]["p_value"] == 1
    assert found["differences"][0]["logloss"]["difference"] == 0


def test_joined_models_are_compared(models: list[Saved], together: str, log: Path) -> None:
    found = rayrec.compare([str(models[0].run), together], str(log), **QUIET)
    alone = rayrec.evaluate(together, str(log), cluster_address="none", console=QUIET["console"])
    assert found["models"][1]["checkpoint"] == together
    assert found["models"][1]["auroc"] == alone["auroc"]


def test_gates_compare_models(compared: list[Saved], log: Path) -> None:
    places = [str(saved.run) for saved in compared[::2]]
    found = rayrec.compare(
        places,
        str(log),
        gates=ComparisonGates(min_auroc_gain=0.5, max_p_value=1e-9),
        **QUIET,
    )
    gain = found["differences"][0]["auroc"]
    assert [line.partition(":")[0] for line in found["failures"]] == [
        "gates.min_auroc_gain",
        "gates.max_p_value",
    ]
    assert f"c gains {gain['difference']:+.5f} AUROC over a, less than 0.5" in found["failures"][0]
    passed = ComparisonGates(min_auroc_gain=gain["difference"] - 1e-9, max_p_value=1.0)
    assert rayrec.compare(places, str(log), gates=passed, **QUIET)["failures"] == []


def test_compare_command_output_and_exit_status(
    compared: list[Saved],
    log: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        "compare",
        *(str(saved.run) for saved in compared[:2]),
        str(log),
        "--resamples",
        "20",
        "--cluster.address",
        "none",
    ]
    assert run(command) == 0
    captured = capsys.readouterr()  # a pipe
    assert json.loads(captured.out)["failures"] == []
    lines = captured.err[captured.err.index("2,000 rows, label") :].splitlines()
    assert lines[0].split()[:6] == ["2,000", "rows,", "label", "rate", lines[0].split()[4], "auroc"]
    assert [line.split()[0] for line in lines[1:3]] == ["a", "b"]
    assert any(line.startswith("b less a") for line in lines)
    assert run([*command, "-q", "--gates.min-auroc-gain", "0.9"]) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [model["name"] for model in report["models"]] == ["a", "b"]
    assert "gauc" not in report["models"][0]
    assert "gates.min_auroc_gain: b gains" in captured.err.splitlines()[-1]


def test_models_of_several_recipes_are_compared(
    compared: list[Saved],
    log: Path,
    tmp_path: Path,
) -> None:
    models = own_click_model.OwnConfig(embedding_dim=8), own_click_model.SlowConfig(embedding_dim=4)
    own = [
        save_clicks(tmp_path / str(number), model=model, recipe="own_model")
        for number, model in enumerate(models)
    ]
    places = [str(each.run) for each in (compared[0], *own)]
    rejects(r"config\.yaml: no recipe 'own_model'", rayrec.compare, places, str(log), **QUIET)
    found = rayrec.compare(
        places,
        str(log),
        recipe=[own_click_model.own_model, own_click_model.own_images],
        **QUIET,
    )
    sizes = [
        sum(parameter.numel() for parameter in each.model.parameters())
        for each in (compared[0], *own)
    ]
    assert [model["parameters"] for model in found["models"]] == sizes
    files = [f"{own_click_model.__file__}:{name}" for name in ("own_images", "own_model")]
    assert (
        run(
            [
                "compare",
                *places,
                str(log),
                "--recipe",
                *files,
                "--resamples",
                "20",
                "--cluster.address",
                "none",
                "-q",
            ]
        )
        == 0
    )


def test_invalid_comparison_is_rejected_first(
    compared: list,
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "rayrec.inference.evaluate.scored_rows",
        lambda *_: pytest.fail("rows are scored"),
    )
    schema = compared[0].preprocessor.schema
    swapped = schema.replace(dense=(schema.dense[1], schema.dense[0], *schema.dense[2:]))
    other = save_clicks(
        tmp_path / "d",
        preprocessor=hashed_preprocessor(range(5, 5 + 7 * 26, 7), swapped),
    )
    for places, match in (
        ([], "^compare: needs at least two checkpoints, or one and --baselines"),
        ([other.run], r"d: schema's 'dense' does not match .*a\. Compare models of one log\."),
        ([tmp_path / "none"], "none: "),
    ):
        rejects(
            match,
            rayrec.compare,
            [str(place) for place in (compared[0].run, *places)],
            str(log),
            **QUIET,
        )
    runs = ["runs/a", "runs/mnist"]
    rejects(
        "runs/mnist: recipe mnist_resnet18 cannot be compared",
        compare_checkpoints,
        runs,
        "log",
        configs=[compared[0].config, recipes.mnist_resnet18()],
    )


def test_different_rows_are_rejected(
    compared: list[Saved],
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = itertools.count()

    def changed(job: ScoringJob, console: Console) -> ScoredRows:
        rows = scored_rows(job, console)
        rows.checksums = (next(numbers), 0)
        return rows

    monkeypatch.setattr("rayrec.inference.evaluate.scored_rows", changed)
    runs = [str(saved.run) for saved in compared[:2]]
    rejects(
        r"b: rows or labels do not match a\. Compare models of one log\.",
        rayrec.compare,
        runs,
        str(log),
        **QUIET,
    )


def test_baselines_train_on_model_rows(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = save_clicks(tmp_path / "run", train_data={"path": str(log)})
    arguments = [
        "--baselines",
        "lightgbm",
        "logistic",
        "--resamples",
        "20",
        "--cluster.address",
        "none",
        "--json",
    ]
    assert (
        run(
            [
                "compare",
                str(saved.run),
                str(log),
                *arguments,
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in found["models"]] == [saved.run.name, "lightgbm", "logistic"]
    labels = _labels(log)
    for model in found["models"][1:]:
        assert (model["trained_rows"], model["checkpoint"]) == (ROWS - ROWS // 7, None)
        assert model["auroc"] > 0.6
        assert model["parameters"] > 10
        assert model["label_rate"] == pytest.approx(labels.mean())
    again = rayrec.compare(
        [str(saved.run)] * 2,
        str(log),
        baselines=("logistic",),
        baseline_rows=500,
        gates=ComparisonGates(min_auroc_gain=0.0),
        **QUIET,
    )
    assert again["models"][-1]["trained_rows"] == 500
    assert again["failures"] == []  # of the second network, not of the baseline
    for flags, message in (
        (["--gates.max-p-value", "0.1"], "gates need at least two checkpoints"),
        (["logistic"], "baselines: values must be unique"),
        (["--baseline-rows", "0"], "baseline_rows: must be at least 1, got 0"),
    ):
        assert run(["compare", str(saved.run), str(log), "--baselines", "logistic", *flags]) == 2
        assert message in capsys.readouterr().err


def test_baseline_features(tmp_path: Path) -> None:
    """Category rates exclude a row's own label, lists are one-hot sums, and untrainable data is
    rejected.
    """
    labels = (np.random.default_rng(0).random(4_000) < 0.3).astype(np.float32)
    # each category once: a rate that knew the label would separate the rows
    unique = np.arange(4_000, dtype=np.int32)
    rows = EncodedRows(np.zeros((4_000, 1), np.float32), [unique], {"label": labels})
    preprocessor = hashed_preprocessor(
        [4_000],
        Schema(tokens="hexadecimal", dense=("a",), sparse=("b",)),
    )
    options = Baselines(preprocessor, rows, rows, "", recipes.criteo_demo())
    assert binary_metrics(options.fit("lightgbm").logits(rows), labels)["auroc"] < 0.6
    lists = JaggedIds(np.array([3, 3, 4]), np.array([2, 1]))
    features = one_hot(EncodedRows(np.array([[0.5], [1.5]], np.float32), [lists, np.array([3, 3])]))
    assert (features.shape, features[0].max(), features.nnz) == ((2, 1 + (1 << 20)), 2, 6)
    assert features.sum(axis=1).tolist() == [[0.5 + 3], [1.5 + 2]]
    only_lists = EncodedRows(
        np.zeros((2, 0), np.float32),
        [lists],
        {"label": np.array([0.0, 1.0], np.float32)},
    )
    list_values = Baselines(preprocessor, only_lists, only_lists, "", recipes.criteo_demo())
    rejects(
        "neither numbers nor columns of one category. Leave out lightgbm",
        list_values.fit,
        "lightgbm",
    )
    checkpoint = str(save_clicks(tmp_path / "run").checkpoint)
    rejects(
        "must name the training log",
        open_baselines,
        recipes.criteo_demo(),
        checkpoint,
        max_rows=1,
        kinds=(),
    )
