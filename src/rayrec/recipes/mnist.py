"""ResNet18 recipes for images: MNIST, data sets in its format, and JPEG and PNG files."""

from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.run_config import DataConfig, ScalingConfig
from rayrec.workloads.vision import (
    AugmentationConfig,
    ImageFilesWorkload,
    ResNetConfig,
    VisionWorkload,
)


def mnist_resnet18(path: str | None = None) -> TrainConfig:
    """Train ResNet18 on MNIST as in Ray's PyTorch tutorial: Adam 1e-5, two epochs, 128 images per
    step over two workers.
    """
    return TrainConfig(
        recipe="mnist_resnet18",
        workload=VisionWorkload(
            model=ResNetConfig(), optimizer=DenseOptimizerConfig(kind="adam", learning_rate=1e-5)
        ),
        train_data=DataConfig(path=path, shuffle="full"),
        epochs=2,
        global_batch_size=128,
        eval_batch_size=500,
        evaluations_per_epoch=1,
        scaling=ScalingConfig(num_workers=2),
    )


def mnist_resnet18_augmented(path: str | None = None) -> TrainConfig:
    """Train ResNet18 on MNIST to over 99.4 % test accuracy: random augmentation, AdamW, learning
    rate warmup and decay.
    """
    workload = VisionWorkload(
        model=ResNetConfig(),
        augmentation=AugmentationConfig(max_shift=2.0, max_rotation_degrees=10.0, max_scale=0.1),
        label_smoothing=0.1,
        optimizer=DenseOptimizerConfig(
            kind="adamw", learning_rate=0.002, weight_decay=0.05, decay_matrices_only=True
        ),
        schedule=LearningRateSchedule(warmup_fraction=0.2, decay_fraction=0.8, decay="linear"),
    )
    changes = {"workload": workload, "epochs": 7, "global_batch_size": 256, "precision": "bf16"}
    return mnist_resnet18(path).replace(recipe="mnist_resnet18_augmented", **changes)


def image_folder(path: str | None = None) -> TrainConfig:
    """Train ResNet18 on JPEG and PNG images in class folders or tar shards, with torchvision's
    settings for ImageNet.
    """
    return TrainConfig(
        recipe="image_folder",
        workload=ImageFilesWorkload(
            model=ResNetConfig(num_channels=3, num_classes=1000),
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            data_tasks=True,
            optimizer=DenseOptimizerConfig(
                kind="sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4
            ),
            schedule=LearningRateSchedule(
                warmup_fraction=0.05, decay_fraction=0.95, decay="linear"
            ),
        ),
        train_data=DataConfig(path=path, shuffle="full"),
        epochs=90,
        global_batch_size=256,
        eval_batch_size=256,
        evaluations_per_epoch=1,
    )


RECIPES = (mnist_resnet18, mnist_resnet18_augmented, image_folder)
