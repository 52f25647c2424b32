"""Tests of loading click model checkpoints: matching scores and invalid checkpoints."""

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.click_models import (
    SMALL,
    Saved,
    hashed_preprocessor,
    make_preprocessor,
    row_text,
    save_clicks,
    save_two,
)
from builders.faults import Trap, fails_with, flip, raising, rejects
from builders.own_click_model import WithoutLabelConfig
from builders.runs import QUIET
from torch import nn

from rayrec import checkpoint as checkpoints
from rayrec import recipes, storage
from rayrec.batch import Batch, StepOutput
from rayrec.checkpoint.format import compute_sha256, seal
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.text_parser import parse
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference.config import ScoringConfig
from rayrec.inference.model import open_served
from rayrec.inference.scoring import ScoringRequest, weight_bytes
from rayrec.ingest.batches import BatchSlicer, sparse_features
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import label_heads
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.distillation import (
    RECORD,
    Teacher,
    TeacherConfig,
    load_targets,
    open_teacher,
)
from rayrec.workloads.recsys.evaluation import EvaluationCounts, counted_columns, reliability_bins
from rayrec.workloads.recsys.scorer import PlainModel, _limited_weights, empty_model, make_scorer
from rayrec.workloads.recsys.settings import check_grouped


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Saved]:
    return save_two(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def config(both: tuple[Saved, Saved]) -> TrainConfig:
    return both[0].config


@pytest.fixture
def copied(both: tuple[Saved, Saved], tmp_path: Path) -> Path:
    return Path(shutil.copytree(both[1].checkpoint, tmp_path / "step_00000002"))


def _rows(preprocessor: Preprocessor, rows: int, *, labelled: bool = True) -> EncodedRows:
    lines = (
        (b"%d\t" % (row % 2) if labelled else b"") + row_text(row, known=False)
        for row in range(rows)
    )
    raw, faults = parse(
        preprocessor.schema if labelled else preprocessor.schema.unlabelled(), b"".join(lines)
    )
    assert not faults.total
    return preprocessor.encode(raw)


def test_scores_and_weight_bytes_match_saved_model(
    both: tuple[Saved, Saved], config: TrainConfig
) -> None:
    preprocessor = both[1].preprocessor
    rows = _rows(preprocessor, 100)
    loaded = open_served(str(both[0].run), config=config)  # the newest of the run
    assert loaded.source.endswith("step_00000002")
    assert loaded.preprocessor_hash == preprocessor.hash()
    scores = loaded.score(rows)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, both[1].logits(rows))
    np.testing.assert_array_equal(loaded.score(_rows(preprocessor, 100, labelled=False)), scores)
    np.testing.assert_allclose(loaded.score(_rows(preprocessor, 1)), scores[:1], atol=1e-6)
    assert not np.allclose(open_served(str(both[0].checkpoint), config=config).score(rows), scores)
    expected = sum(parameter.numel() * 4 for parameter in both[1].model.parameters())
    assert weight_bytes(checkpoints.Checkpoint(str(both[1].checkpoint))) == expected


def test_scoring_rejects_damaged_weights(copied: Path, config: TrainConfig) -> None:
    data = copied / "data_00000.safetensors"
    chunk = checkpoints.Checkpoint(str(copied)).manifest()["tensors"][
        "model.top_mlp.layers.0.weight"
    ]["chunks"][0]
    flip(data, chunk["start"])
    rejects("damaged, the checksum", open_served, str(copied), config=config)
    os.truncate(data, chunk["start"] + 4)
    rejects("truncated", open_served, str(copied), config=config)
    data.unlink()
    rejects("missing", open_served, str(copied), config=config)


def test_scoring_rejects_changed_preprocessor(copied: Path, config: TrainConfig) -> None:
    stored = copied / "preprocessor" / "preprocessor.json"
    stored.write_text(stored.read_text().replace('"mean": 0.5', '"mean": 2.0', 1))
    rejects("does not match the stored", open_served, str(copied), config=config)
    shutil.rmtree(copied / "preprocessor")
    rejects(
        "preprocessor/ not found, so not a click model", open_served, str(copied), config=config
    )


def test_scoring_rejects_other_model_or_version(copied: Path, config: TrainConfig) -> None:
    wider = DLRMConfig(
        interaction="dot",
        embedding_dim=8,
        bottom_mlp=(8, 8),
        top_mlp=(8, 1),
    )
    other = config.replace(workload=config.workload.replace(model=wider))
    rejects(
        r"bottom_mlp\.layers\.1\.bias: shape must be \[8\], got \[4\]",
        open_served,
        str(copied),
        config=other,
    )
    deeper = DLRMConfig(
        interaction="dot",
        embedding_dim=4,
        bottom_mlp=(8, 8, 4),
        top_mlp=(8, 1),
    )
    with pytest.raises(InputError, match=r"bottom_mlp.*: shape must be"):
        open_served(
            str(copied), config=config.replace(workload=config.workload.replace(model=deeper))
        )
    manifest = copied / "manifest.json"
    manifest.write_text(json.dumps(seal({**json.loads(manifest.read_text()), "version": 99})))
    rejects("format version must be 3, got 99", open_served, str(copied), config=config)


def test_loading_never_unpickles(
    copied: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = pickle.dumps(Trap())
    for module, function in (
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, function, raising(AssertionError("unpickled")))
    names = (
        "model.pt",
        "data.pkl",
        ".metadata",
        "__0_0.distcp",
        "preprocessor/preprocessor.pkl",
        "weights",
        "data_00000-1.pkl",
    )
    request = ScoringRequest(str(copied), "x.tsv", config, ScoringConfig(), QUIET)
    for name in names:
        (copied / name).write_bytes(trap)
        refused = f"{name}: must not be a pickle, .*\. Remove it"
        rejects(refused, open_served, str(copied), config=config)
        rejects(refused, request.open, evaluating=True, spare_cpus=0)
        (copied / name).unlink()
    torch.save({}, copied / "archive")
    rejects("archive: must not be a pickle", open_served, str(copied), config=config)
    (copied / "archive").unlink()
    # harmless, as is what an attempt left that lost
    (copied / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (copied / "data_00000-1.safetensors.1234.partial").write_bytes(trap)
    open_served(str(copied), config=config)
    np.save(copied / "preprocessor" / "tokens.npy", np.array([Trap()], object), allow_pickle=True)
    fails_with(ValueError, "allow_pickle", open_served, str(copied), config=config)


def test_checkpoint_has_preprocessor_and_config_all_fields(tmp_path: Path) -> None:
    config = recipes.criteo_demo("none")
    made = hashed_preprocessor([7] * 26, config.workload.schema)  # type: ignore[attr-defined]
    made.save(str(tmp_path / "cache" / "abc"))
    sources = config.workload.checkpoint_files(
        SimpleNamespace(folder=str(tmp_path / "cache" / "abc"))
    )
    assert sources == {
        f"preprocessor/{name}": f"{tmp_path}/cache/abc/{name}"
        for name in ("preprocessor.json", "tokens.npy")
    }
    place = str(tmp_path / "step_00000001")
    described = ExtraFiles({**sources, "config.yaml": b"a: 1"}).write(place)
    assert Preprocessor.load(storage.join(place, "preprocessor")).hash() == made.hash()
    for name, file in described.items():
        assert file == {
            "bytes": len(Path(place, name).read_bytes()),
            "sha256": compute_sha256(storage.join(place, name)),
        }
    partial = recipes.load_config(
        "recipe: criteo_demo\nsteps: 7\nworkload:\n  model:\n    top_mlp: [32, 1]\n"
    )
    assert partial == recipes.criteo_demo().replace(
        steps=7, workload={"model": {"top_mlp": (32, 1)}}
    )


# -- The network between plain tensors gives what the trained model gives, as it is and as an
# exported program
INPUTS = ModelInputs(5, ("b", "a", "c"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_exported_program_matches_logits(interaction: str, precision: str) -> None:
    torch.manual_seed(0)
    small = SMALL.replace(interaction=interaction)
    network = small.build(INPUTS, precision=precision)  # type: ignore[arg-type]
    model = PlainModel(network, INPUTS, label_heads(INPUTS.label), width=8).eval()
    dense = torch.randn(50, 5)
    pooled = torch.randn(50, 24)
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(
        model, (dense, pooled), dynamic_shapes=({0: rows}, {0: rows})
    ).module()
    with torch.no_grad():
        expected = model(dense, pooled)
        assert expected.shape == (50,)
        assert expected.dtype == torch.float32
        tolerance = 1e-5 if precision == "fp32" else 0.03
        torch.testing.assert_close(program(dense, pooled), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            program(dense[:1], pooled[:1]), expected[:1], atol=tolerance, rtol=tolerance
        )


def test_empty_model_draws_no_random_numbers_and_keeps_constants() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        network = SMALL.build(INPUTS)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = empty_model(_OwnConfig(), preprocessor=make_preprocessor(), precision="fp32")
    assert torch.equal(torch.get_rng_state(), before)
    model.network.load_state_dict({"weight": torch.tensor([2.0])}, assign=True)
    scorer = make_scorer(model, [], row_format=RowFormat("fp32", 16), device="cpu")
    assert scorer.parts()[0](torch.tensor([[5.0, 7.0]]), torch.zeros(1, 0)).tolist() == [14.0]


class _Own(nn.Module):
    """Network with a constant outside its weights, which the meta device would lose."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.label = inputs.label
        self.weight = nn.Parameter(torch.randn(1))
        self.register_buffer("chosen", torch.tensor([1]), persistent=False)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self.label: dense[:, self.get_buffer("chosen")].squeeze(1) * self.weight}


class _OwnConfig(ClickModelConfig):
    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        return _Own(inputs)


def test_model_without_label_measures_and_predicts(tmp_path: Path) -> None:
    """Its items are ids 3 and 1: the second token and none. Numbers above 1 are measured."""
    schema = Schema(
        label=None,
        dense=("number",),
        sparse=("item",),
        tokens="any",
        delimiter=",",
    )
    tokens = np.array([70, 80, 90], np.uint64)
    items = (SparseColumn(num_embeddings=5, num_tokens=3),)
    preprocessor = Preprocessor(
        preset="rayrec",
        schema=schema,
        dense=(DenseColumn(mean=0.0, scale=1.0, kind="identity"),),
        sparse=items,
        tokens=tokens,
    )
    model = WithoutLabelConfig(embedding_dim=2)
    saved = save_clicks(
        tmp_path, model=model, preprocessor=preprocessor, cluster={"address": "none"}
    )
    log = tmp_path / "log.csv"
    log.write_text("number,item\n0,70\n1,80\n2,70\n5,99\n")
    tables = []
    for evaluating in (True, False):
        request = ScoringRequest(
            str(saved.checkpoint), str(log), saved.config, ScoringConfig(), QUIET
        )
        job = request.open(evaluating=evaluating, spare_cpus=0)
        tables.append(list(job.tables(QUIET)))
        assert not job.scoring.is_clicks
        if evaluating:
            totals = job.scoring.make_totals()
            totals.update(*tables[0])
            assert (totals.compute(), totals.rows) == ({"loss": 2.0, "large": 3.5}, 4)
    (predicted,) = tables[1]
    assert predicted.column_names == ["row", "best", "scores", "user"]
    assert predicted["best"].to_pylist() == [[80, -1]] * 4
    heads = open_served(str(saved.checkpoint), config=saved.config).scorer.heads
    assert heads == model.output_heads(ModelInputs.from_schema(preprocessor.inputs))


# -- Evaluation reports over batches and reserved ids
KEYS = ("colour", "size", "hashed")
ONE_ID = SparseColumn(
    num_embeddings=10,
    num_tokens=9,
    first_id=1,
    unknown_id=0,
    missing_id=0,
)
COLUMNS = (
    SparseColumn(num_embeddings=10, num_tokens=8),
    ONE_ID,
    SparseColumn(num_embeddings=10, num_tokens=None),
)


def batch(ids: np.ndarray) -> Batch:
    rows = ids.shape[1]
    features = sparse_features(KEYS[: len(ids)], list(ids), ids.shape[1])
    return Batch({"dense": torch.zeros(rows, 0)}, 1.0, features, {"label": torch.zeros(rows)})


def evaluated(
    counts: EvaluationCounts, name: str, ids: np.ndarray, logits: np.ndarray, labels: np.ndarray
) -> None:
    metrics = counts.make_metrics()
    for place, one in enumerate(
        counts.counted(name, iter([batch(ids[:, :30]), batch(ids[:, 30:])]))
    ):
        part = slice(0, 30) if place == 0 else slice(30, None)
        assert len(one) == len(labels[part])
        predicted, expected = ({"label": torch.tensor(values[part])} for values in (logits, labels))
        metrics.update(StepOutput(torch.tensor(0.0), predicted, expected))
    assert metrics.compute()["rows"] == len(labels)


def test_counts_show_last_evaluation_only() -> None:
    random = np.random.default_rng(0)
    counts = EvaluationCounts(counted_columns(KEYS, COLUMNS, expanded=False), label_heads("label"))
    assert counts.shown() == []
    for name in ("validation", "test"):
        ids = random.integers(0, 10, (3, 100)).astype(np.int32)
        logits = random.normal(size=100).astype(np.float32)
        labels = (random.random(100) < 0.3).astype(np.float32)
        evaluated(counts, name, ids, logits, labels)
    reliability, categories = counts.shown()
    assert (reliability["kind"], reliability["set"], categories["set"]) == (
        "reliability",
        "test",
        "test",
    )
    rows, observed, predicted = np.array(
        [
            [group[name] for name in ("rows", "observed", "predicted")]
            for group in reliability["bins"]
        ]
    ).T
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert rows.sum() == 100
    assert rows @ observed == pytest.approx(labels.sum())
    assert rows @ predicted == pytest.approx(probabilities.sum())
    assert (np.diff(predicted) >= 0).all()
    reported = {
        column["column"]: (column["unknown"], column["missing"]) for column in categories["columns"]
    }
    assert reported["colour"] == (np.mean(ids[0] == 0), np.mean(ids[0] == 1))
    assert reported["size"] == (None, None)  # one id for both
    assert reported["hashed"] == (None, np.mean(ids[2] == 1))


def test_wrapped_ids_report_no_unknown_and_bins_have_equal_rows() -> None:
    counts = EvaluationCounts(
        {"colour": SparseColumn(num_embeddings=10, num_tokens=9)}, label_heads("label")
    )
    metrics = counts.make_metrics()
    logits = torch.tensor([-40.0, 0.0, 0.0, 40.0])
    for _ in counts.counted("test", iter([batch(np.zeros((1, 4), np.int32))])):
        metrics.update(StepOutput(torch.tensor(0.0), {"label": logits}, {"label": torch.ones(4)}))
    _, categories = counts.shown()
    assert categories["columns"][0]["unknown"] is None
    assert counted_columns(KEYS, COLUMNS, expanded=True) == {}
    by_logit = np.zeros((3, 512))
    by_logit[0] = 100
    by_logit[2] = np.linspace(0, 100, 512)
    bins = reliability_bins(by_logit)
    assert len(bins) == 15
    assert max(group["rows"] for group in bins) - min(group["rows"] for group in bins) <= 100


# -- Distillation targets, also after resuming
def _slice(rows: EncodedRows, start: int, stop: int) -> EncodedRows:
    return EncodedRows(
        rows.dense[start:stop],
        [ids[start:stop] for ids in rows.ids],  # type: ignore[index]
        {"label": rows.label[start:stop]},
    )


def test_targets_mix_labels_and_probabilities_also_after_resume(both: tuple[Saved, Saved]) -> None:
    rows = both[1].rows(300, labelled=True)
    probabilities = 1 / (1 + np.exp(-both[1].logits(rows)))
    for weight in (0.25, 1.0):
        targets = load_targets(Teacher(str(both[1].checkpoint), weight), both[1].preprocessor)(rows)
        assert targets.dtype == np.float32
        np.testing.assert_allclose(
            targets, (1 - weight) * rows.label + weight * probabilities, atol=1e-6
        )
    # Bit-identical because each batch is scored as a whole, not in the pieces it consists of.
    targets = load_targets(Teacher(str(both[0].checkpoint), 0.5), both[0].preprocessor)
    rows = both[0].rows(500, labelled=True)

    def labels(start: int, piece: int) -> list[np.ndarray]:
        pieces = (
            _slice(rows, begin, min(begin + piece, 500)) for begin in range(start, 500, piece)
        )
        slicer = BatchSlicer(pieces, SCHEMA, targets=targets)
        return [
            slicer.take(100, loss_weight=0.01).labels["label"].numpy()
            for _ in range(start, 500, 100)
        ]

    whole = labels(0, 500)
    assert not np.isin(whole[0], [0, 1]).any()
    for start, piece in ((0, 70), (200, 300), (300, 33)):
        for expected, got in zip(whole[start // 100 :], labels(start, piece), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert len(BatchSlicer(iter(()), SCHEMA, targets=targets).take(0, loss_weight=1)) == 0


def test_resumed_run_keeps_teacher_with_weight_and_checkpoint(
    both: tuple[Saved, Saved], tmp_path: Path
) -> None:
    teachers = Path(shutil.copytree(both[0].run, tmp_path / "teacher"))
    student = tmp_path / "student"
    config = TeacherConfig(checkpoint=str(teachers), weight=0.5)
    teacher = open_teacher(config, run=str(student))
    assert teacher == Teacher(str(teachers / "checkpoints" / "step_00000002"), 0.5)
    shutil.copytree(
        teachers / "checkpoints" / "step_00000001", teachers / "checkpoints" / "step_00000003"
    )
    assert open_teacher(config, run=str(student)) == teacher  # though there is a newer one
    record = json.loads((student / RECORD).read_text())
    (student / RECORD).write_text(json.dumps([record]))  # as an earlier version wrote it
    assert open_teacher(config, run=str(student)) == teacher
    (student / RECORD).write_text(json.dumps([record, record]))
    rejects(
        r"has 2 teachers\. Join them with `rayrec ensemble`", open_teacher, config, run=str(student)
    )
    (student / RECORD).write_text(json.dumps({**record, "weights": "0" * 16}))
    rejects("the teacher's weights changed since", open_teacher, config, run=str(student))
    assert open_teacher(TeacherConfig(), run=str(student)) is None
    with pytest.raises(InputError, match="none: no such folder"):
        open_teacher(
            TeacherConfig(checkpoint=str(tmp_path / "none"), weight=0.5),
            run=str(tmp_path / "other"),
        )
    distilled = recipes.criteo_kaggle_distilled("log.txt")
    rejects(r"Pass --workload.teacher.checkpoint RUN", distilled.workload.check, distilled)
    given = distilled.replace(workload={"teacher": {"checkpoint": "runs/teacher"}})
    given.workload.check(given)
    none = given.replace(workload={"teacher": {"weight": 0.0}})
    rejects(r"teacher.weight: must be above 0", none.workload.check, none)
    rejects(
        r"weight: must be at least 0 and at most 1, got 1\.5",
        TeacherConfig,
        checkpoint="runs/teacher",
        weight=1.5,
    )
    rejects(
        r"teacher.checkpoint: must be a run or checkpoint", TeacherConfig, checkpoint="", weight=0.5
    )


def test_group_needs_raw_rows_in_evaluation(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    line = rejects("schema.group", check_grouped, SCHEMA.replace(group="cat_5"), str(tmp_path))
    assert "is preprocessed and has no values of cat_5. Evaluate on a raw log" in line


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param("cat_5", "log.txt", id="raw rows"),
        pytest.param("cat_5", None, id="no rows"),
        pytest.param(None, "dataset", id="no group"),
    ],
)
def test_group_accepts_raw_rows_in_evaluation(
    tmp_path: Path, group: str | None, name: str | None
) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "dataset.json").write_text("{}")
    check_grouped(SCHEMA.replace(group=group), None if name is None else str(tmp_path / name))


@pytest.mark.parametrize(("mebibytes", "fits"), [(17, True), (19, False)])
def test_network_is_limited_by_stored_weights(mebibytes: int, fits: bool) -> None:
    """Twice 1 MiB and 16 MiB more."""

    def build() -> None:
        with _limited_weights(1 << 20, "checkpoint"):
            nn.Module().weight = nn.Parameter(torch.empty(mebibytes << 18))

    if fits:
        build()
    else:
        rejects(
            "checkpoint: the network does not match the 1,048,576 bytes of stored weights", build
        )
