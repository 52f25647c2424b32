"""Images in class folders and tar shards: order, pixels, crops, resume to the same bits, and
unreadable or unusable files.
"""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from builders.faults import rejects
from builders.runs import QUIET, events_of, losses, short_run, threads_of, train
from PIL import Image

import rayrec
from rayrec.data.engine import InProcess, StreamEngine, TaskPlacement, ThreadEngine
from rayrec.data.numbered_rows import ImageConfig, ImageIndex, ImageRows, index_images
from rayrec.ingest import batches, ray_engine
from rayrec.ingest.block_order import BatchSharding
from rayrec.ingest.loader import Loader
from rayrec.ingest.row_order import RowOrder
from rayrec.recipes.mnist import image_folder
from rayrec.workloads.base import TrainConfig

CLASSES = ("apple", "bear", "cat")
CONFIG = ImageConfig(size=24, resize=32, crop_scale=(0.2, 1.0))


def picture(label: int, row: int, kind: str) -> bytes:
    """Return an image of 40 x 32 pixels whose channel `label` is bright."""
    pixels = np.random.default_rng((label, row)).integers(0, 60, (32, 40, 3), dtype=np.uint8)
    pixels[4:28, 4:36, label] += np.uint8(180)
    Image.fromarray(pixels).save(
        content := io.BytesIO(),
        format=kind,
        **({"quality": 95} if kind == "JPEG" else {}),
    )
    return content.getvalue()


def write_folder(folder: Path, rows: int, *, first: int = 0) -> Path:
    """Write class folders with `rows` images of each class, JPEG and PNG, some in a subfolder."""
    for label, name in enumerate(CLASSES):
        for row in range(first, first + rows):
            kind, suffix = (
                ("PNG", "png") if row % 3 == 0 else ("JPEG", "JPG" if row % 3 == 1 else "jpeg")
            )
            path = folder / name / ("more" if row % 4 == 3 else ".") / f"{row % 7}_{row}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(label, row, kind))
    return folder


def write_shards(folder: Path, index: ImageIndex, *, rows: int) -> Path:
    """Write the images of an index as tar shards in WebDataset's layout, in the same order."""
    folder.mkdir()
    assert index.labels is not None
    for start in range(0, len(index), rows):
        with tarfile.open(folder / f"{start:05}.tar", "w") as tar:
            for row in range(start, min(start + rows, len(index))):
                suffix = index.row_path(row).rpartition(".")[2]
                files = {
                    f"{row:06}.{suffix}": bytes(index.content(row)),
                    f"{row:06}.cls": b"%d" % index.labels[row],
                }
                for name, content in files.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_folder(root / "train", 20)
    write_folder(root / "val", 6, first=100)
    return root


def index_of(path: Path | str, **options: Any) -> ImageIndex:
    return index_images(str(path), ThreadEngine(2), **options)


def rows_of(index: ImageIndex, seed: int | None = None, *, mode: Any = "RGB") -> ImageRows:
    return ImageRows(InProcess(index), CONFIG, mode, seed)


def torchvision_files(root: Path) -> list[tuple[str, int]]:
    """Return the path and label of each image in the order of torchvision's `make_dataset`."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [
        (os.path.join(inside, name), label)
        for label, class_folder in enumerate(classes)
        for inside, _, names in sorted(os.walk(root / class_folder, followlinks=True))
        for name in sorted(names)
    ]


def test_order_and_pixels_match_image_folder(folder: Path) -> None:
    root = folder / "train"
    expected = torchvision_files(root)
    (root / ".DS_Store").write_bytes(b"")
    index = index_of(root)
    assert index.labels is not None
    assert [(index.row_path(row), index.labels[row]) for row in range(len(index))] == expected
    assert (index.classes, index.chunk_rows) == (CLASSES, (60,))
    numbers = np.array([59, 0, 7, 7])
    for pixels, row in zip(rows_of(index).read(numbers)["images"], numbers, strict=True):
        with Image.open(expected[row][0]) as image:
            box = (8.0, 4.0, 32.0, 28.0)  # the center 24 x 24 of 40 x 32 pixels
            assert np.array_equal(
                pixels,
                np.asarray(image.resize((24, 24), Image.Resampling.BILINEAR, box=box)),
            )
    gray = rows_of(index, mode="L").read(numbers)["images"]
    assert (gray.shape, gray.dtype) == ((4, 24, 24), np.uint8)


@pytest.fixture
def index(folder: Path) -> ImageIndex:
    return index_of(folder / "train")


def test_shards_have_order_and_pixels_of_image_folder(
    folder: Path,
    tmp_path: Path,
    index: ImageIndex,
) -> None:
    expected = rows_of(index, 5).read_epoch(np.arange(60), 2)
    shards = index_of(write_shards(tmp_path / "shards", index, rows=25))
    assert (shards.chunk_rows, shards.classes) == ((25, 25, 10), ())
    for shard_inputs in (
        shards,
        index_of(tmp_path / "shards" / "*.tar"),
        index_of(tmp_path / "shards"),
    ):
        for name, array in rows_of(shard_inputs, 5).read_epoch(np.arange(60), 2).items():
            assert np.array_equal(array, expected[name])


def test_split_of_images_takes_rows_of_every_class(folder: Path, index: ImageIndex) -> None:
    rest, split_off = index.split(6)
    assert len(rest) == 54
    assert split_off.labels.tolist() == [0, 0, 1, 1, 2, 2]  # type: ignore[union-attr]
    assert not {rest.row_path(row) for row in range(54)} & {
        split_off.row_path(row) for row in range(6)
    }
    assert index.hash != rest.hash


def test_random_crops_depend_on_seed_epoch_and_row(folder: Path, index: ImageIndex) -> None:
    rows = rows_of(index, 5)
    numbers = np.arange(12)
    images = rows.read_epoch(numbers, 1)["images"]
    assert np.array_equal(
        images[[7, 2]],
        rows_of(index, 5).read_epoch(np.array([7, 2]), 1)["images"],
    )
    for other in (rows.read_epoch(numbers, 2), rows_of(index, 6).read_epoch(numbers, 1)):
        assert not any(np.array_equal(a, b) for a, b in zip(images, other["images"], strict=True))


def test_random_crops_cover_image_in_all_sizes_and_ratios() -> None:
    boxes = np.array(
        [CONFIG._box(400, 300, np.random.default_rng(row).random((10, 4))) for row in range(500)]
    )
    left, top, width, height = boxes.T
    areas = width * height / 120_000
    ratios = width / height
    assert min(left.min(), top.min()) == 0
    assert 390 < (left + width).max() <= 400
    assert 290 < (top + height).max() <= 300
    assert 0.19 < areas.min() < 0.22
    assert 0.95 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.8
    assert 1.25 < ratios.max() < 1.35
    assert CONFIG._box(100, 10, np.ones((10, 4))) == (43, 0, 13, 10)  # no crop of 20 % fits


def test_half_of_images_are_mirrored() -> None:
    flat = np.zeros((32, 32, 3), np.uint8)
    flat[:, 16:] = 200
    Image.fromarray(flat).save(content := io.BytesIO(), format="PNG")
    flip = ImageConfig(size=8, resize=8, crop_scale=None)
    mirrored = [
        flip.decode(content.getbuffer(), "RGB", (5, 0, row))[0, 0, 0] > 100 for row in range(200)
    ]
    assert 70 < sum(mirrored) < 130


def loader(
    source: ImageRows,
    engine: StreamEngine | None,
    *,
    rank: int = 0,
    state: dict[str, Any] | None = None,
) -> Loader:
    order = RowOrder(tuple(source.chunk_rows), "full", 3, 16)
    return Loader(
        order,
        batches.ArrayBatches(source, engine=engine),
        BatchSharding(rank, 2, 8),
        epochs=2,
        state=state,
    )


@pytest.mark.parametrize(
    "engine_of",
    [lambda: ThreadEngine(3), lambda: ray_engine.RayEngine(TaskPlacement(max_cpus=2.0))],
)
def test_data_tasks_yield_same_batches(
    folder: Path,
    engine_of: Callable[[], StreamEngine],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    index: ImageIndex,
) -> None:
    engine = engine_of()
    if isinstance(engine, ray_engine.RayEngine):
        request.getfixturevalue("local_ray")
        assert ray.is_initialized()
    monkeypatch.setattr(batches, "ITEM_BYTES", 6000)  # three images
    expected = list(loader(rows_of(index, 5), None, rank=1))
    resumed = loader(rows_of(index, 5), engine, rank=1, state={"epoch": 0, "offset": 32})
    for start, some in ((0, loader(rows_of(index, 5), engine, rank=1)), (2, resumed)):
        read_batches = list(some)
        assert len(read_batches) == len(expected) - start == 8 - start
        for batch, other in zip(read_batches, expected[start:], strict=True):
            assert batch.tensors.keys() == {"images", "labels", "readable"}
            assert all(
                torch.equal(tensor, other.tensors[name]) for name, tensor in batch.tensors.items()
            )
            assert batch.loss_weight == other.loss_weight
            assert (
                batch.row_numbers.numbers.tolist()  # type: ignore[union-attr]
                == other.row_numbers.numbers.tolist()  # type: ignore[union-attr]
            )
        assert some.stages.take()[1] == sum(len(batch) for batch in read_batches)


def run_of(folder: Path, storage: Path, **changes: Any) -> TrainConfig:
    workload = {
        "model": {"blocks": (1, 1, 1, 1), "num_classes": 3},
        "images": {"size": 24, "resize": 32},
        "optimizer": {
            "kind": "adam",
            "learning_rate": 0.003,
            "momentum": 0.0,
            "weight_decay": 0.0,
        },
        "schedule": {"warmup_fraction": 0.0, "decay_fraction": 0.0},
    }
    fields: dict[str, Any] = {
        "batch_size": 8,
        "eval_batch_size": 9,
        "scaling": threads_of(1),
        "log_every": 1,
        "cluster": {"address": "none"},
        "eval_data": {"path": f"{folder}/val"},
        **changes,
    }
    fields["workload"] = {**workload, **fields.get("workload", {})}
    return short_run(image_folder(f"{folder}/train"), storage, **{"steps": 24, **fields})


@pytest.mark.extended
def test_run_learns_resumes_and_is_used(folder: Path, tmp_path: Path) -> None:
    run = train(run_of(folder, tmp_path / "a"))
    assert run.summary["rows_of_sets"] == {"train": 60, "test": 18, "validation": 18}
    assert run.summary["metrics"]["accuracy"] > 0.9
    assert run.summary["metrics"]["unreadable"] == 0
    train(run_of(folder, tmp_path / "b", steps=7))  # within the first epoch, with another reader
    resumed = train(run_of(folder, tmp_path / "b", workload={"data_tasks": False}))
    assert resumed.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert resumed.summary["rows_lost"] == resumed.summary["rows_repeated"] == 0
    metrics = rayrec.evaluate(
        run.folder,
        str(folder / "val"),
        cluster_address="none",
        console=QUIET,
    )
    assert (metrics["rows"], metrics["accuracy"]) == (
        18,
        pytest.approx(run.summary["metrics"]["accuracy"]),
    )
    mixed = shutil.copytree(folder / "val" / "cat", tmp_path / "mixed")
    (mixed / "0.png").write_bytes(b"damaged")
    rayrec.predict(
        run.folder,
        str(mixed),
        out=str(tmp_path / "out"),
        cluster_address="none",
        console=QUIET,
    )
    assert pq.read_table(tmp_path / "out")["prediction"].to_pylist() == [-1, *[2] * 6]
    rayrec.export(run.folder, out=str(tmp_path / "exported"))
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (settings["classes"], settings["images"]["size"], settings["mean"]) == (
        [*CLASSES],
        24,
        [0.485, 0.456, 0.406],
    )
    (samples,) = (event["samples"] for event in events_of(run.folder, "samples"))
    assert {sample["label"] for sample in samples} <= {*CLASSES}
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "train" / "cat" / "0_0.png").rename(changed / "train" / "cat" / "z.png")
    rejects(
        "cannot resume, because data_hash changed",
        train,
        run_of(changed, tmp_path / "b", steps=40),
    )


def test_unreadable_images_are_counted_and_limited(folder: Path, tmp_path: Path) -> None:
    images = shutil.copytree(folder, tmp_path / "images")
    for path in (images / "train/bear/0_0.png", images / "val/bear/2_100.JPG"):
        path.write_bytes(path.read_bytes()[:200])
    (images / "train/apple/1_1.JPG").write_bytes(b"")
    uncropped = {"images": {"size": 24, "resize": 32, "crop_scale": None}}
    run = train(run_of(images, tmp_path, max_bad_fraction=0.06, workload=uncropped))
    assert run.summary["metrics"]["unreadable"] == pytest.approx(1 / 18)
    assert run.summary["metrics"]["accuracy"] > 0.9
    assert all(np.isfinite(losses(run.folder)))
    assert "cannot be decoded: " in (Path(run.folder) / "logs" / "worker_0.log").read_text()
    strict = run_of(images, tmp_path / "b", max_bad_fraction=0.03)
    rejects(
        r"cannot be decoded, like [01] images before it .* raise --max-bad-fraction\.$",
        train,
        strict,
    )


THREE = ["train/a/1.jpg", "train/b/1.jpg", "train/c/1.jpg", "val/a/1.jpg"]


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (
            ["val/a/1.jpg"],
            {},
            r"train: contains no \.jpg, \.jpeg, \.png or \.tar files",
        ),
        (
            [*THREE, "train/a/notes.txt"],
            {},
            r"only images, or only tar shards, got also a/notes\.txt\. Move it",
        ),
        (
            [*THREE, "train/b.tar"],
            {},
            r"only images, or only tar shards, got also [abc]/1\.jpg",
        ),
        (
            [*THREE, "train/2.jpg"],
            {},
            r"train: 2\.jpg is not in a subfolder named after a class",
        ),
        (
            [*THREE, "val/d/2.jpg"],
            {},
            r"val: d/2\.jpg is not in a subfolder named after a class of the training images",
        ),
        (
            THREE[:3],
            {"eval_data": {"path": None}},
            r"train_data\.path and eval_data\.path: must be folders .*validation-rows N",
        ),
        (
            ["train/1.tar", "val/a/1.jpg"],
            {},
            r"1\.tar: not a plain tar file with class numbers, or damaged",
        ),
        (
            ["train/a/1.jpg", "val/a/2.jpg"],
            {},
            r"has 1 classes, but workload\.model\.num_classes is 3\. Pass .*num-classes 1\.",
        ),
        (
            THREE,
            {"workload": {"validation_rows": 3}},
            r"more images than validation_rows, 3, got 3\. Lower it",
        ),
        (
            THREE,
            {"workload": {"images": {"resize": 20}}},
            r"images\.resize: must be at least size 224, got 20",
        ),
        (
            THREE,
            {"workload": {"images": {"crop_scale": (0.5, 0.2)}}},
            r"images\.crop_scale: must be a minimum above 0 and a maximum",
        ),
        (
            THREE,
            {"workload": {"model": {"num_channels": 2}}},
            r"num_channels: must be 1 or 3, got 2",
        ),
        (
            THREE,
            {"workload": {"model": {"num_channels": 1}}},
            r"workload\.mean and std: must be one number each for gray images",
        ),
    ],
)
def test_unusable_input_is_rejected(
    tmp_path: Path,
    files: list[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    for name in files:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"x" * 600)
    (tmp_path / "data" / "train").mkdir(exist_ok=True)
    rejects(message, lambda: train(run_of(tmp_path / "data", tmp_path / "runs", **changes)))


@pytest.mark.extended
def test_images_are_read_from_store(
    folder: Path,
    bucket: str,
    tmp_path: Path,
    index: ImageIndex,
) -> None:
    write_shards(tmp_path / "shards", index, rows=25)
    rayrec.storage.copy_files(str(folder), f"{bucket}/images")
    rayrec.storage.copy_files(str(tmp_path / "shards"), f"{bucket}/shards")
    expected = rows_of(index, 5).read_epoch(np.arange(60), 1)
    for path in (f"{bucket}/images/train", f"{bucket}/shards", f"{bucket}/shards/*.tar"):
        read_batches = rows_of(index_of(path), 5).read_epoch(np.arange(60), 1)
        assert all(np.array_equal(array, read_batches[name]) for name, array in expected.items())
    runs = [
        train(run_of(path, tmp_path / str(number), steps=4))
        for number, path in enumerate((folder, f"{bucket}/images"))
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]
