"""Image classifiers: a ResNet on images in the idx format, which all workers hold in memory once a node."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rayrec import storage
from rayrec.bounds import Amount, Count, Natural, Positive, Share
from rayrec.config import Config, InputError
from rayrec.data import numbered_rows
from rayrec.data.engine import Shared
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext
from rayrec.workloads.data_parallel.workload import DataParallelWorkload

if TYPE_CHECKING:
    import torch

    from rayrec.workloads.vision_model import ResNet


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Config):
    """A residual network of basic blocks (He et al., 2015, section 4.1) with torchvision's names and start values."""

    blocks: tuple[Count, Count, Count, Count] = (2, 2, 2, 2)
    """Residual blocks of each stage: (2, 2, 2, 2) is ResNet18, (3, 4, 6, 3) is ResNet34."""
    num_channels: Count = 1
    """Of the images: 1 is gray, 3 is RGB."""
    num_classes: Count = 10
    """Classes told apart."""

    def build(self) -> ResNet:
        """The network on CPU. Start values come from torch's global generator, in torchvision's order: after the same
        `torch.manual_seed`, `torchvision.models.resnet18` has the same ones, where channels and classes are the same."""
        from rayrec.workloads.vision_model import ResNet

        return ResNet(self.blocks, num_channels=self.num_channels, num_classes=self.num_classes)


IMAGES, LABELS = "images", "labels"
"""Names of the tensors of a batch: uint8 (rows, height, width) and, where they are known, int64 (rows,)."""
NUM_SAMPLES = 9
"""Images of the test set shown with what the model takes them for."""


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig(Config):
    """How far each training image is moved at random, differently in every epoch; all zero leaves it as it is."""

    max_shift: Amount = 0.0
    """Pixels, in either direction of both axes."""
    max_rotation_degrees: Amount = 0.0
    """Degrees, either way."""
    max_scale: Share = 0.0
    """Share by which it grows or shrinks; below 1."""

    @property
    def moves(self) -> bool:
        return bool(self.max_shift or self.max_rotation_degrees or self.max_scale)


@dataclass(frozen=True)
class Part:
    """Rows of one pair of files."""

    arrays: Shared[dict[str, np.ndarray]]
    """IMAGES and LABELS; each node has them once, and its workers read them in place."""
    start: int
    stop: int


@dataclass(frozen=True)
class Prepared:
    """What the driver read and every worker needs."""

    sets: dict[str, Part]
    """`train`, `validation` and `test`, the last two the same rows where no training rows are held out."""
    weights: Shared[dict[str, np.ndarray]] | None
    """By name: the initial weights, where a file gave them."""
    data_hash: str
    """Of all images and labels."""


@dataclass(frozen=True, kw_only=True)
class VisionWorkload(DataParallelWorkload):
    """Trains a ResNet to tell classes of gray images."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (*DataParallelWorkload.FREE_ON_RESUME, "weights")

    model: ResNetConfig = field(default_factory=ResNetConfig)
    """The network."""
    weights: str | None = None
    """File of initial weights under torchvision's names, .safetensors or .pt, local or a URL; None: random ones."""
    mean: float = 0.5
    """Subtracted from pixels, which go from 0 to 1, before they are divided by `std`."""
    std: Positive = 0.5
    """Of the normalisation; above 0."""
    validation_rows: Natural = 0
    """Last training rows that are held out to choose the best weights by; 0: the test rows do that as well."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """Of training images."""
    label_smoothing: Share = 0.0
    """Share of a training row's target that is spread over all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.num_channels != 1:
            raise InputError(f"workload.model.num_channels: {self.model.num_channels}: images in the idx format are gray, 1")

    def score(self, metrics: dict[str, float]) -> float:
        """Share of the rows whose class is told right."""
        return metrics["accuracy"]

    # -- on the driver

    def check(self, config: TrainConfig) -> None:
        if config.train_data.path is None:
            raise InputError(
                "train_data.path: no folder of images given; pass --train-data.path DIR (`rayrec fetch mnist --out DIR`)"
            )
        for folder, part in ((config.train_data.path, "train"), (_test_folder(config), "t10k")):
            for what in ("images", "labels"):
                if numbered_rows.find(folder, part, what) is None:
                    raise numbered_rows.missing(folder, part, what)
        if self.weights is not None and not storage.exists(self.weights):
            raise InputError(f"workload.weights: {self.weights}: no such file")

    def list_data(self, path: str, names: Sequence[str]) -> list[storage.File]:
        parts = [(part, what) for part in ("train", "t10k") for what in ("images", "labels")]
        found = [place for part, what in parts if (place := numbered_rows.find(path, part, what)) is not None]
        if not found:
            raise numbered_rows.missing(path, *parts[0])
        return list(storage.find_files(found).values())

    def prepare(self, context: RunContext) -> Prepared:
        share = context.engine.share
        config = context.config
        assert config.train_data.path is not None
        classes = self.model.num_classes
        train = numbered_rows.read_part(config.train_data.path, "train", num_classes=classes)
        folder = _test_folder(config)
        test = numbered_rows.read_part(folder, "t10k", num_classes=classes)
        if train.images.shape[1:] != test.images.shape[1:]:
            raise InputError(
                f"{folder}: test images have {test.images.shape[1:]} pixels, training images {train.images.shape[1:]}; use "
                "files of one data set"
            )
        kept = len(train.images) - self.validation_rows
        if kept < 1 or not len(test.images):
            raise InputError(
                f"{config.train_data.path}: has {len(train.images):,} training and {len(test.images):,} test rows; both are "
                f"needed, and more than validation_rows ({self.validation_rows:,}) to train on"
            )
        train_ref, test_ref = share(_arrays(train)), share(_arrays(test))
        whole_test = Part(test_ref, 0, len(test.images))
        held_out = Part(train_ref, kept, len(train.images)) if self.validation_rows else whole_test
        sets = {"train": Part(train_ref, 0, kept), "validation": held_out, "test": whole_test}
        weights = None if self.weights is None else share(self._initial_weights(self.weights))
        return Prepared(sets, weights, _data_hash(train, test))

    def _initial_weights(self, path: str) -> dict[str, np.ndarray]:
        from rayrec.checkpoint.safetensors import read_weights
        from rayrec.workloads.vision_model import load_weights

        model = self.model.build()
        load_weights(model, read_weights(path), where=path)
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def data_hash(self, prepared: Prepared) -> str:
        return prepared.data_hash

    def set_rows(self, prepared: Prepared) -> dict[str, int]:
        return {name: part.stop - part.start for name, part in prepared.sets.items()}

    # -- on each worker

    def open_set(self, context: WorkerContext, prepared: Prepared, name: str) -> RowSource:
        part = prepared.sets[name]
        arrays = part.arrays.get()
        return ArrayRows({key: array[part.start : part.stop] for key, array in arrays.items()})

    def build(self, prepared: Prepared) -> ResNet:
        import torch

        model = self.model.build()
        if prepared.weights is not None:
            weights = prepared.weights.get()  # arrays of the object store, which nobody may write to
            model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
        return model

    def augment(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from rayrec.workloads.vision_model import augmented

        if not self.augmentation.moves:
            return tensors
        return {**tensors, IMAGES: augmented(tensors[IMAGES], **self.augmentation.to_dict())}

    def measure(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`loss`, the cross entropy, in training against smoothed targets; and `accuracy`, 1 where the class is right."""
        import torch
        from torch.nn import functional

        logits, labels = self._logits(model, tensors), tensors[LABELS]
        smoothing = self.label_smoothing if torch.is_grad_enabled() else 0.0
        loss = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == labels).float()}

    def _logits(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 (rows, num_classes)."""
        from rayrec.workloads.vision_model import normalised

        return model(normalised(tensors[IMAGES], mean=self.mean, std=self.std)).float()

    def samples(
        self, model: torch.nn.Module, *, prepared: Prepared, sets: Mapping[str, RowSource], device: torch.device
    ) -> list[dict[str, Any]]:
        """Nine test images, the same in every run on them: pixels, label, prediction and its probability."""
        import torch

        source = sets["test"]
        rows = np.random.default_rng(0).choice(len(source), size=min(NUM_SAMPLES, len(source)), replace=False)
        arrays = source.read(rows)
        columns = self.predict(model, {name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
        return [
            {
                "kind": "image",
                "pixels": image.tolist(),
                "label": str(label),
                "prediction": str(prediction),
                "probability": float(probability),
            }
            for image, label, prediction, probability in zip(
                arrays[IMAGES], arrays[LABELS], columns["prediction"], columns["probability"], strict=True
            )
        ]

    # -- for checkpoints that are to be used

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> ArrayRows:
        """Images and labels of a folder (its test files, else its training files), or of a file of images with its labels
        beside it. Raises InputError where they are missing, damaged or do not fit each other."""
        images, labels = _paths(path)
        if labels is None:
            raise InputError(
                f"{images}: its labels are not beside it; call the two files ...-images-idx3-ubyte and ...-labels-idx1-ubyte"
            )
        return ArrayRows(_arrays(numbered_rows.read_pair(images, labels, num_classes=self.model.num_classes)))

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> ArrayRows:
        """As `open_labelled`, but where there are no labels, without them."""
        images, labels = _paths(path)
        if labels is None:
            return ArrayRows({IMAGES: numbered_rows.read_images(images)})
        return ArrayRows(_arrays(numbered_rows.read_pair(images, labels, num_classes=self.model.num_classes)))

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> ResNet:
        return self.model.build()

    def predict(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Columns `prediction` (int64), `probability` (float32) of that class and, where labels are known, `label` (int64)."""
        import torch

        with torch.no_grad():
            probability, prediction = self._logits(model, tensors).softmax(dim=1).max(dim=1)
        columns = {"prediction": prediction, "probability": probability}
        if LABELS in tensors:
            columns["label"] = tensors[LABELS]
        return {name: column.cpu().numpy() for name, column in columns.items()}  # device sync

    def export(self, config: TrainConfig, *, checkpoint: str, out: str) -> dict[str, Any]:
        """Writes `model.safetensors`, whose names `torchvision.models.resnet18(num_classes=...)` loads once its first layer
        has one channel, and `config.json`: what the network is and how its input is normalised."""
        from rayrec.checkpoint.reader import export_weights

        written = export_weights(checkpoint, out)
        storage.write_json(storage.join(out, "config.json"), {**self.model.to_dict(), "mean": self.mean, "std": self.std})
        return dict(written)


def _test_folder(config: TrainConfig) -> str:
    folder = config.train_data.path if config.eval_data.path is None else config.eval_data.path
    assert folder is not None
    return folder


def _data_hash(*parts: numbered_rows.LabelledImages) -> str:
    """16 hex digits; 0.05 s for MNIST's 55 MB."""
    digest = hashlib.sha256()
    for part in parts:
        for array in _arrays(part).values():
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def _arrays(rows: numbered_rows.LabelledImages) -> dict[str, np.ndarray]:
    assert rows.labels is not None
    return {IMAGES: rows.images, LABELS: rows.labels.astype(np.int64)}


def _paths(path: str) -> tuple[str, str | None]:
    """The files of the images and of the labels that a path names. Raises InputError where there are no images."""
    if storage.size_of(path) is not None:
        return path, _labels_beside(path)
    for part in ("t10k", "train"):
        images = numbered_rows.find(path, part, "images")
        if images is not None:
            return images, numbered_rows.find(path, part, "labels")
    raise numbered_rows.missing(path, "t10k", "images")


def _labels_beside(images: str) -> str | None:
    """The file with the labels of a file of images, by its name: plain or .gz."""
    folder, slash, name = images.rpartition("/")
    plain = name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    if plain == name.removesuffix(".gz"):
        return None
    return next((path for end in ("", ".gz") if storage.exists(path := f"{folder}{slash}{plain}{end}")), None)
