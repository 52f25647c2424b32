"""Tests of the vision workload, from files to predictions and exports, and of invalid input."""

import gzip
import math
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.digits import idx, pictures, write_digits
from builders.faults import Trap, rejects
from ranks.checkpoint import same
from torch.nn import functional
from transformers import ResNetConfig as HuggingFaceConfig
from transformers import ResNetForImageClassification

from rayrec import checkpoint
from rayrec.checkpoint.safetensors import read_weights, write_weights
from rayrec.config import InputError
from rayrec.data.engine import ThreadEngine
from rayrec.ingest.loader import Loader
from rayrec.layers.operation_count import counted
from rayrec.recipes.mnist import mnist_resnet18, mnist_resnet18_augmented
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext
from rayrec.workloads.vision import AugmentationConfig, Prepared, ResNetConfig, VisionWorkload
from rayrec.workloads.vision_model import BatchNorm, ResNet, augmented, load_weights, normalised

SMALL = ResNetConfig(blocks=(1, 1, 1, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), train=60, test=30)


def prepare(config: TrainConfig) -> Prepared:
    config.workload.check(config)
    return config.workload.prepare(
        RunContext(
            config, "run", ThreadEngine(1), lambda text: None, lambda long_name, done, total: None
        )
    )


def on_worker(config: TrainConfig) -> WorkerContext:
    return WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1))


# -- the arithmetic
@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (0.5, 0.5),
        (0.1307, 0.3081),
        (0.485, 0.229),
    ],
)
def test_normalization_is_bit_identical_to_torchvision(mean: float, std: float) -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(4, 8, 8)
    expected = images.unsqueeze(1).to(torch.float32).div(255)  # ToTensor
    expected.sub_(torch.tensor(mean)).div_(torch.tensor(std))  # Normalize
    for given in (images, images.float()):
        result = normalised(given, mean=mean, std=std)
        assert (result.dtype, result.shape) == (torch.float32, (4, 1, 8, 8))
        assert torch.equal(result, expected)


def moved(images: torch.Tensor, *, seed: int = 0, **fields: float) -> torch.Tensor:
    torch.manual_seed(seed)
    return augmented(images, **AugmentationConfig(**fields).to_dict())


def test_augmentation_follows_seed_and_applies_to_training_only() -> None:
    images = torch.from_numpy(pictures(np.arange(20) % 10, seed=0))
    how = {"max_shift": 3.0, "max_rotation_degrees": 15.0, "max_scale": 0.1}
    result = moved(images, **how)
    assert (result.dtype, result.shape) == (torch.float32, images.shape)
    assert result.min() >= 0
    assert result.max() <= 255
    assert torch.equal(result, moved(images, **how))
    assert not torch.equal(result, moved(images, seed=1, **how))
    # Each image is moved in its own way: the same one twice becomes two.
    twice = moved(images[:1].expand(2, -1, -1), **how)
    assert not torch.equal(twice[0], twice[1])
    torch.testing.assert_close(moved(images), images.float(), atol=1e-2, rtol=0)
    assert moved(images[:0], **how).shape == (0, 28, 28)
    assert not AugmentationConfig().moves
    tensors = {
        "images": torch.full((2, 8, 8), 7, dtype=torch.uint8),
        "labels": torch.tensor([0, 2]),
    }
    assert VisionWorkload(model=SMALL).augment(tensors) is tensors
    changed = VisionWorkload(model=SMALL, augmentation=AugmentationConfig(max_shift=4.0)).augment(
        tensors
    )
    assert changed["images"].dtype == torch.float32
    assert changed["labels"] is tensors["labels"]
    assert tensors["images"].dtype == torch.uint8


def centres(images: torch.Tensor) -> torch.Tensor:
    """Return the center of mass (down, right) of each image in pixels, float32 [rows, 2]."""
    down, right = (torch.arange(size, dtype=torch.float32) for size in images.shape[1:])
    ink = images.sum(dim=(1, 2))
    return torch.stack([(images.sum(2) @ down) / ink, (images.sum(1) @ right) / ink], dim=1)


def spots(rows: int, *places: tuple[int, int]) -> torch.Tensor:
    """Return images with spots of 2 x 2 pixels, uint8 [rows, 24, 48]."""
    images = torch.zeros(rows, 24, 48, dtype=torch.uint8)
    for down, right in places:
        images[:, down : down + 2, right : right + 2] = 200
    return images


def test_shifts_are_pixels_and_measures_cross_entropy_and_hits() -> None:
    images = spots(400, (11, 23))
    shift = centres(moved(images, max_shift=3.0)) - centres(images.float())
    assert shift.abs().max() <= 3.01
    assert shift.max(dim=0).values.min() > 2.8
    assert shift.min(dim=0).values.max() < -2.8
    assert shift.mean(dim=0).abs().max() < 0.3
    workload = VisionWorkload(model=SMALL, label_smoothing=0.2)
    table = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    tensors = {"images": torch.zeros(2, 8, 8, dtype=torch.uint8), "labels": torch.tensor([0, 2])}

    def model(images: torch.Tensor) -> torch.Tensor:
        assert torch.equal(images, torch.full((2, 1, 8, 8), -1.0))
        return table

    losses = (
        functional.cross_entropy(table, tensors["labels"], reduction="none", label_smoothing=each)
        for each in (0.0, 0.2)
    )
    plain, smooth = (loss.tolist() for loss in losses)
    measures = workload.measure(model, tensors)  # type: ignore[arg-type]
    assert measures["loss"].tolist() == pytest.approx(smooth)
    with torch.no_grad():
        measures = workload.measure(model, tensors)  # type: ignore[arg-type]
    assert (measures["loss"].tolist(), measures["accuracy"].tolist()) == (
        pytest.approx(plain),
        [1.0, 0.0],
    )
    assert workload.score({"accuracy": 0.5, "loss": 3.0}) == 0.5


@pytest.mark.parametrize("fields", [{"max_rotation_degrees": 20.0}, {"max_scale": 0.2}])
def test_rotation_and_scaling_are_centered(fields: dict[str, float]) -> None:
    middle = torch.tensor([11.5, 23.5])
    across = centres(moved(spots(400, (11, 33)), **fields)) - middle
    up = centres(moved(spots(400, (3, 23)), **fields)) - middle
    lengths = across.norm(dim=1) / 10, up.norm(dim=1) / 8
    torch.testing.assert_close(*lengths, atol=0.02, rtol=0)  # the same chance in both calls
    angles = (
        torch.atan2(across[:, 0], across[:, 1]).rad2deg(),
        torch.atan2(-up[:, 1], up[:, 0]).rad2deg(),
    )
    angles = angles[0], (angles[1] + 360) % 360 - 180
    torch.testing.assert_close(*angles, atol=1.0, rtol=0)
    if "max_scale" in fields:
        assert angles[0].abs().max() < 0.5
        assert (lengths[0].min().item(), lengths[0].max().item()) == pytest.approx(
            (0.8, 1.2), abs=0.02
        )
    else:
        assert lengths[0].sub(1).abs().max() < 0.02
        assert (angles[0].min().item(), angles[0].max().item()) == pytest.approx((-20, 20), abs=0.7)


# -- from files to rows
def test_sets_match_file_rows(folder: Path, tmp_path: Path) -> None:
    config = mnist_resnet18(str(folder))
    assert config.workload.set_rows(prepare(config)) == {"train": 60, "validation": 30, "test": 30}
    held_out = config.replace(workload={"validation_rows": 7})
    prepared = prepare(held_out)
    assert held_out.workload.set_rows(prepared) == {"train": 53, "validation": 7, "test": 30}
    sets = [
        held_out.workload.open_set(on_worker(held_out), prepared, name)
        for name in ("train", "validation")
    ]
    images = str(folder / "train-images-idx3-ubyte.gz")
    rows = config.workload.open_labelled(config, checkpoint="", path=images).read(np.arange(60))
    joined = [rows_of_set.read(np.arange(len(rows_of_set))) for rows_of_set in sets]
    for name in ("images", "labels"):
        assert np.array_equal(np.concatenate([part[name] for part in joined]), rows[name])
    assert (rows["images"].dtype, rows["labels"].dtype) == (np.uint8, np.int64)
    elsewhere = config.replace(
        eval_data={"path": str(write_digits(tmp_path / "other", train=20, test=10))}
    )
    assert elsewhere.workload.set_rows(prepare(elsewhere)) == {
        "train": 60,
        "validation": 10,
        "test": 10,
    }


def test_resume_and_prepare_reject_other_images(folder: Path, tmp_path: Path) -> None:
    def loader_of(path: Path, state: dict[str, Any] | None = None) -> Loader[Any, Any]:
        config = mnist_resnet18(str(path)).replace(batch_size=8)
        return config.workload.make_loader(on_worker(config), prepare(config), state=state, step=0)

    begun = loader_of(folder)
    next(begun)
    state = begun.state()
    begun.close()
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert loader_of(moved, state).state() == state
    path = moved / "train-images-idx3-ubyte.gz"
    *images, last = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(bytes([*images, last ^ 1])))  # as many rows
    rejects(r"^train_data: [^\n]* data_hash [^\n]* another --name\.$", loader_of, moved, state)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 8, 8), np.uint8)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(2, np.uint8)))
    with pytest.raises(
        InputError,
        match=r"test images of \(8, 8\) pixels do not match training images of \(28, 28\)",
    ):
        prepare(mnist_resnet18(str(folder)).replace(eval_data={"path": str(tmp_path)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_data": {"path": None}}, "must be a folder of images, .*rayrec fetch mnist"),
        (
            {"train_data": {"path": "nowhere"}},
            "nowhere: train-images-idx3-ubyte not found, .* rayrec fetch mnist --out nowhere",
        ),
        ({"eval_data": {"path": "nowhere"}}, "nowhere: t10k-images-idx3-ubyte not found"),
        ({"workload": {"weights": "nowhere.pt"}}, r"workload\.weights: nowhere\.pt: no such file"),
        (
            {"workload": {"validation_rows": 60}},
            r"more training rows than validation_rows \(60\), got 60 training and 30 test",
        ),
        (
            {"workload": {"model": {"num_classes": 9}}},
            "must be 0 to 8, got 9; set num_classes to 10",
        ),
    ],
)
def test_prepare_rejects_unusable_input(folder: Path, change: dict[str, Any], message: str) -> None:
    rejects(message, prepare, mnist_resnet18(str(folder)).replace(**change))


def test_settings_reject_impossible_values() -> None:
    for fields in (
        {"std": 0.0},
        {"validation_rows": -1},
        {"label_smoothing": 1.0},
        {"accumulate": 0},
    ):
        rejects(rf"^VisionWorkload\.{next(iter(fields))}", VisionWorkload, **fields)
    rejects(r"^(VisionWorkload\.|workload)", VisionWorkload, model=ResNetConfig(num_channels=3))
    rejects(r"^AugmentationConfig.max_", AugmentationConfig, max_scale=1.0)
    for changes in (
        {"blocks": (2, 2, 0, 2)},
        {"num_channels": 0},
        {"num_classes": 0},
    ):
        rejects(r"ResNetConfig\.\w+: .* at least 1", ResNetConfig, **changes)


# -- weights
def test_initial_weights_load_from_file(folder: Path, tmp_path: Path) -> None:
    coloured = ResNetConfig(num_channels=3).build()
    torch.save(coloured.state_dict(), tmp_path / "weights.pt")
    config = mnist_resnet18(str(folder)).replace(workload={"weights": str(tmp_path / "weights.pt")})
    model = config.workload.build(prepared := prepare(config))
    assert torch.equal(model.conv1.weight, coloured.conv1.weight.sum(dim=1, keepdim=True))
    assert torch.equal(model.fc.weight, coloured.fc.weight)
    with torch.no_grad():
        model.fc.bias.fill_(3.0)  # its own, not the shared array
    assert torch.equal(config.workload.build(prepared).fc.bias, coloured.fc.bias)
    torch.save(ResNetConfig(num_classes=1000).build().state_dict(), tmp_path / "weights.pt")
    rejects(r"weights\.pt: fc\.weight must have shape", prepare, config)


def test_weight_files_are_bit_identical(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }
    tensors |= {"whole": torch.randn(3, 4), "turned": torch.randn(3, 4).t()}
    path = str(tmp_path / "w.safetensors")
    assert write_weights(path, tensors) == Path(path).stat().st_size
    torch.save(tensors, tmp_path / "w.pt")
    for found in (read_weights(path), read_weights(str(tmp_path / "w.pt"))):
        torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    library = pytest.importorskip("safetensors.torch")
    torch.testing.assert_close(library.load_file(path), tensors, rtol=0, atol=0)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    library.save_file(contiguous, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(
        read_weights(str(tmp_path / "theirs.safetensors")), tensors, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_read_weights_rejects_damaged_and_unsafe_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    good = tmp_path / f"good_{name}"
    if name == "w.pt":
        torch.save({"a": torch.ones(100)}, good)
    else:
        write_weights(str(good), {"a": torch.ones(100)})
    whole = good.read_bytes()
    for content in [b"", b"\xff" * 40, whole[:-7], whole[: len(whole) // 2], pickle.dumps(Trap())]:
        path.write_bytes(content)
        rejects(rf"{name}: (damaged|must contain only tensors)", read_weights, str(path))
    if name == "w.safetensors":
        for head in (
            b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
            b'{"a":{"dtype":"F9"}}',
            b"[1]",
            b'{"a":3}',
        ):
            path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
            rejects("damaged, must be a complete safetensors file", read_weights, str(path))
    else:
        for value in (
            [torch.ones(2)],
            {"optimizer": {"a": torch.ones(2)}},
            {"state_dict": {"a": {}}},
        ):
            torch.save(value, path)
            rejects("must contain only named tensors", read_weights, str(path))
        torch.save({"epoch": 3, "state_dict": {"a": torch.ones(2)}}, path)
        assert list(read_weights(str(path))) == ["a"]
    rejects("no such file", read_weights, str(tmp_path / f"gone_{name}"))


# -- trained models
def test_path_resolves_to_image_and_label_files(folder: Path, tmp_path: Path) -> None:
    config = mnist_resnet18()
    workload = config.workload

    def labelled(path: Path) -> int:
        return len(workload.open_labelled(config, checkpoint="", path=str(path)))

    def inputs(path: Path) -> tuple[int, list[str]]:
        source = workload.open_inputs(config, checkpoint="", path=str(path))
        return len(source), sorted(source.read(np.arange(1)))

    assert (labelled(folder), labelled(folder / "train-images-idx3-ubyte.gz")) == (30, 60)
    assert inputs(folder) == (30, ["images", "labels"])
    (tmp_path / "train-images.idx3-ubyte").write_bytes(idx(np.zeros((4, 28, 28), np.uint8)))
    assert inputs(tmp_path) == (4, ["images"])
    rejects(r"train-images\.idx3-ubyte: label file not found\. Name the files", labelled, tmp_path)
    (tmp_path / "train-labels.idx1-ubyte").write_bytes(idx(np.zeros(4, np.uint8)))
    assert labelled(tmp_path) == 4
    (tmp_path / "mine").write_bytes(idx(np.zeros((3, 28, 28), np.uint8)))
    assert inputs(tmp_path / "mine") == (3, ["images"])
    rejects("mine: label file not found", labelled, tmp_path / "mine")
    rejects(
        r"nowhere: t10k-images-idx3-ubyte not found, .*; rayrec fetch mnist",
        inputs,
        tmp_path / "nowhere",
    )


def test_predictions_and_samples_match_softmax(folder: Path) -> None:
    config = mnist_resnet18(str(folder)).replace(workload={"model": SMALL})
    workload = config.workload
    torch.manual_seed(0)
    model = workload.build_from(config, checkpoint="").eval()
    rows = workload.open_labelled(config, checkpoint="", path=str(folder)).read(np.arange(30))
    tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
    columns = workload.predict(model, tensors)
    dtypes = {"prediction": np.int64, "probability": np.float32, "label": np.int64}
    assert {name: column.dtype for name, column in columns.items()} == dtypes
    with torch.no_grad():
        likely = model(normalised(tensors["images"], mean=0.5, std=0.5)).softmax(dim=1).numpy()
    assert np.array_equal(columns["prediction"], likely.argmax(axis=1))
    assert np.array_equal(columns["probability"], likely.max(axis=1))
    assert "label" not in workload.predict(model, {"images": tensors["images"]})
    prepared = prepare(config)
    sets = {
        name: workload.open_set(on_worker(config), prepared, name)
        for name in ("validation", "test")
    }
    samples = workload.samples(
        model,
        prepared=prepared,
        sets=sets,
        device=torch.device("cpu"),
    )
    assert samples == workload.samples(
        model, prepared=prepared, sets=sets, device=torch.device("cpu")
    )
    assert len(samples) == 9
    for sample in samples:
        (place,) = (
            place for place in range(30) if rows["images"][place].tolist() == sample["pixels"]
        )
        reported = (sample["kind"], sample["label"], sample["prediction"])
        assert reported == (
            "image",
            str(rows["labels"][place]),
            str(columns["prediction"][place]),
        )
        assert sample["probability"] == pytest.approx(columns["probability"][place], abs=1e-5)


def test_export_has_torchvision_names_and_recipes_are_complete(tmp_path: Path) -> None:
    config = mnist_resnet18().replace(workload={"model": SMALL, "mean": 0.25})
    model = SMALL.build()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.save(
        str(tmp_path / "step"), {**tensors, "optimizer.fc.bias.exp_avg": torch.zeros(10)}, state={}
    )
    reported = config.workload.export(
        config, checkpoint=str(tmp_path / "step"), out=str(tmp_path / "out")
    )
    found = read_weights(str(tmp_path / "out" / "model.safetensors"))
    assert reported["tensors"] == len(found) == len(tensors)
    assert same(found, model.state_dict())
    described = (tmp_path / "out" / "config.json").read_text()
    assert '"mean": 0.25' in described
    assert '"blocks": [' in described
    plain = mnist_resnet18("digits")
    better = mnist_resnet18_augmented("digits")
    assert (plain.global_batch_size, plain.epochs, plain.train_data.shuffle) == (128, 2, "full")
    assert (plain.workload.optimizer.kind, plain.workload.optimizer.learning_rate) == ("adam", 1e-5)
    assert not plain.workload.augmentation.moves
    assert better.workload.augmentation.moves


# -- ResNet: torchvision's names, shapes, arithmetic, initial values and weights
BLOCK = {
    "conv1": "layer.0.convolution",
    "bn1": "layer.0.normalization",
    "conv2": "layer.1.convolution",
}
BLOCK |= {
    "bn2": "layer.1.normalization",
    "downsample.0": "shortcut.convolution",
    "downsample.1": "shortcut.normalization",
}
OTHERS = {
    f"{name}1": f"resnet.embedder.embedder.{long_name}"
    for name, long_name in (("conv", "convolution"), ("bn", "normalization"))
}
OTHERS["fc"] = "classifier.1"
"""Modules of transformers by torchvision's names, within a block such as layer2.0 and outside."""


def to_transformers(model: ResNet) -> ResNetForImageClassification:
    """Return transformers' network with the weights of ours, which have the names of torchvision's
    resnet18().
    """
    state = {}
    for name, value in model.state_dict().items():
        module, _, part = name.rpartition(".")
        if block := re.fullmatch(r"layer([1-4])\.([01])\.(.+)", module):
            module = (
                f"resnet.encoder.stages.{int(block[1]) - 1}.layers.{block[2]}.{BLOCK[block[3]]}"
            )
        else:
            module = OTHERS[module]
        state[f"{module}.{part}"] = value.clone()
    sizes: dict[str, Any] = {
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
    }
    other = ResNetForImageClassification(
        HuggingFaceConfig(
            num_channels=1,
            embedding_size=64,
            num_labels=10,
            **sizes,
        )
    )
    other.load_state_dict(state)
    return other


def built(**fields: Any) -> ResNet:
    torch.manual_seed(0)
    return ResNetConfig(**fields).build()


def test_names_and_shapes_match_torchvision() -> None:
    model = built()
    to_transformers(model)
    assert len(model.state_dict()) == 122
    # 11,689,512 of the one for 3 channels and 1,000 classes.
    assert (
        sum(parameter.numel() for parameter in built(num_channels=3, num_classes=1000).parameters())
        == 11_689_512
    )
    deeper = ResNetConfig(blocks=(3, 4, 6, 3), num_channels=3, num_classes=1000).build()
    assert sum(parameter.numel() for parameter in deeper.parameters()) == 21_797_672  # resnet34


def test_initial_values_depend_on_seed_and_match_torchvision() -> None:
    model = built()
    state = model.state_dict()
    assert same(state, built().state_dict())
    torch.manual_seed(1)
    assert not torch.equal(ResNetConfig().build().conv1.weight, model.conv1.weight)
    for name, weight in state.items():
        module, _, part = name.rpartition(".")
        if weight.dim() == 4:
            assert weight.std().item() == pytest.approx(
                math.sqrt(2 / (len(weight) * weight[0, 0].numel())), rel=0.06
            ), name
            assert abs(weight.mean().item()) < 0.1 * weight.std().item()
        elif f"{module}.running_mean" in state and part in ("weight", "bias"):
            assert (weight == (part == "weight")).all(), name
    assert state["fc.weight"].abs().max() <= 1 / math.sqrt(512)


@pytest.mark.parametrize("training", [True, False])
def test_forward_matches_transformers(training: bool) -> None:
    model = built()
    generator = torch.Generator().manual_seed(3)
    for name, value in model.state_dict().items():  # other than 0 and 1
        if name.endswith(("running_mean", "running_var")) or (value.ndim == 1 and "fc" not in name):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    other = to_transformers(model).train(training)
    images = torch.randn(5, 1, 28, 28, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(
            model.train(training)(images), other(images).logits, rtol=1e-4, atol=1e-4
        )
    assert model.bn1.num_batches_tracked.item() == (1 if training else 0)


@pytest.mark.parametrize("rows", [1, 2])
def test_batch_norm_accepts_one_row(rows: int) -> None:
    model = built().train()
    before = model.layer4[1].bn2.running_var.clone()
    model(torch.randn(rows, 1, 28, 28)).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    assert torch.equal(model.layer4[1].bn2.running_var, before) == (rows == 1)
    plain = torch.nn.BatchNorm2d(3)
    ours = BatchNorm(3)
    values = torch.randn(2, 3, 2, 2)
    assert torch.equal(plain(values), ours(values))
    assert torch.equal(plain.running_var, ours.running_var)


def test_three_channel_weights_load_for_gray() -> None:
    coloured = built(num_channels=3).eval()
    gray = ResNetConfig().build().eval()
    load_weights(gray, coloured.state_dict(), where="a.pt")
    images = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(
        gray(images), coloured(images.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5
    )
    # Files of the first years have no counters.
    load_weights(
        gray,
        {name: value for name, value in coloured.state_dict().items() if "num_batches" not in name},
        where="a.pt",
    )


def test_load_weights_rejects_other_networks() -> None:
    for other, message in [
        (
            {"num_classes": 1000},
            r"a\.pt: fc\.weight must have shape \(10, 512\), got \(1000, 512\)\. Choose weights",
        ),
        (
            {"blocks": (3, 4, 6, 3)},
            r"a.pt: must match a ResNet with blocks \(2, 2.*, got unknown layer1.2.conv1.weight, "
            r".* more",
        ),
        (
            {"blocks": (1, 1, 1, 1)},
            r"a\.pt: must match a ResNet .*, got no layer1\.1\.conv1\.weight, .* more",
        ),
    ]:
        model = built()
        weights = ResNetConfig(**other).build().state_dict()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rejects(message, load_weights, model, weights, where="a.pt")
        assert same(model.state_dict(), before)
        with pytest.raises(
            InputError, match=r"conv1\.weight must have shape \(64, 3, 7, 7\), got \(64, 1, 7, 7\)"
        ):
            load_weights(built(num_channels=3), before, where="a.pt")


@pytest.mark.parametrize(
    ("channels", "classes", "size", "expected"),
    [(3, 1000, 224, 1_814_073_344), (1, 10, 28, 33_010_944)],
)
def test_multiply_adds_match_layers(channels: int, classes: int, size: int, expected: int) -> None:
    model = ResNetConfig(num_channels=channels, num_classes=classes).build()
    assert counted(model, lambda: model(torch.zeros(1, channels, size, size))) == expected
