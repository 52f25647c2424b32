"""Image operations on the device: normalization, augmentation, and the network. Requires torch,
unlike `vision`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from rayrec.config import InputError, first_of

STAGE_WIDTHS = (64, 128, 256, 512)
"""Number of channels of each stage. Each stage except the first halves the image."""


Statistic = float | Sequence[float]
"""Number for all channels, or one per channel."""


def normalised(images: torch.Tensor, *, mean: Statistic, std: Statistic) -> torch.Tensor:
    """Return (images / 255 - mean) / std, float32 [rows, channels, height, width], for images
    [rows, height, width] or [rows, height, width, channels] in [0, 255]. Bit-identical to
    torchvision's ToTensor and Normalize, on CPU and GPU.
    """
    # Tensors as divisors, because CUDA multiplies by the rounded inverse of a Python number.
    values = (
        torch.tensor(value, device=images.device).reshape(-1, 1, 1) for value in (255.0, mean, std)
    )
    pixel_range, center, deviation = values
    return (_planes(images).contiguous() / pixel_range).sub_(center).div_(deviation)


def _planes(images: torch.Tensor) -> torch.Tensor:
    """Move the channels, one if there is no such dimension, before height and width."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)


def augmented(
    images: torch.Tensor, *, max_shift: float, max_rotation_degrees: float, max_scale: float
) -> torch.Tensor:
    """Rotate, scale and shift each image by uniform random amounts from torch's generator of the
    device. Fills with 0, the background. Returns values in [0, 255], float32, in the shape of
    `images`, [rows, height, width, ...].
    """
    rows, height, width = images.shape[:3]
    if not rows:  # affine_grid rejects empty batches
        return images.float()
    random = torch.rand(rows, 4, device=images.device) * 2 - 1
    angle = random[:, 0] * math.radians(max_rotation_degrees)
    scale = 1 + random[:, 1] * max_scale
    shift = random[:, 2:] * max_shift  # pixels
    cosine = angle.cos() / scale
    sine = angle.sin() / scale
    # Transform from new to old positions. Grid coordinates are in halves of the image size.
    to_old = torch.stack(
        [
            torch.stack([cosine, -sine * (height / width), shift[:, 0] * (2 / width)], dim=1),
            torch.stack([sine * (width / height), cosine, shift[:, 1] * (2 / height)], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(to_old, [rows, 1, height, width], align_corners=False)
    result = functional.grid_sample(
        _planes(images.float()), grid, padding_mode="zeros", align_corners=False
    )
    return result.permute(0, 2, 3, 1).reshape(images.shape)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm2d that also accepts batches with a single value per channel, as at the end of an
    epoch. Having no variance, such a batch is normalized by the running statistics, which it does
    not update.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize inputs [rows, channels, height, width]."""
        if self.training and inputs.numel() == self.num_features:
            return functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(inputs)


class BasicBlock(nn.Module):
    """Block of two 3 x 3 convolutions with a shortcut."""

    def __init__(
        self, width_in: int, width: int, *, stride: int, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = BatchNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = BatchNorm(width)
        self.downsample = downsample

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [rows, width_in, height, width] to [rows, width, height / stride, width / stride]."""
        outputs = functional.relu(self.bn1(self.conv1(inputs)), inplace=True)
        outputs = self.bn2(self.conv2(outputs))
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        return functional.relu(outputs + shortcut, inplace=True)


class ResNet(nn.Module):
    """Residual network with torchvision's `state_dict` names and shapes."""

    def __init__(self, blocks: Sequence[int], *, num_channels: int, num_classes: int) -> None:
        super().__init__()
        # Modules are created and initialized in torchvision's order.
        width = STAGE_WIDTHS[0]
        self.conv1 = nn.Conv2d(num_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = BatchNorm(width)
        self.layer1 = _stage(width, STAGE_WIDTHS[0], blocks=blocks[0], stride=1)
        self.layer2 = _stage(STAGE_WIDTHS[0], STAGE_WIDTHS[1], blocks=blocks[1], stride=2)
        self.layer3 = _stage(STAGE_WIDTHS[1], STAGE_WIDTHS[2], blocks=blocks[2], stride=2)
        self.layer4 = _stage(STAGE_WIDTHS[2], STAGE_WIDTHS[3], blocks=blocks[3], stride=2)
        self.fc = nn.Linear(STAGE_WIDTHS[3], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, num_classes] for normalized images [rows, num_channels, height,
        width].
        """
        outputs = functional.relu(self.bn1(self.conv1(images)), inplace=True)
        outputs = functional.max_pool2d(outputs, 3, stride=2, padding=1)
        outputs = self.layer4(self.layer3(self.layer2(self.layer1(outputs))))
        return self.fc(outputs.mean(dim=(2, 3)))


def _stage(width_in: int, width: int, *, blocks: int, stride: int) -> nn.Sequential:
    downsample = None
    if stride != 1:
        downsample = nn.Sequential(
            nn.Conv2d(width_in, width, 1, stride=stride, bias=False), BatchNorm(width)
        )
    first = BasicBlock(width_in, width, stride=stride, downsample=downsample)
    return nn.Sequential(
        first, *[BasicBlock(width, width, stride=1, downsample=None) for _ in range(blocks - 1)]
    )


def load_weights(model: ResNet, weights: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Load weights with torchvision's names into the model. Batch counters may be missing, as in
    old files. A first layer for several channels is summed over channels for a one-channel model,
    so a gray image has the same result as three equal channels. Raises InputError, naming `where`,
    for weights of another network.
    """
    tensors = dict(weights)
    first = tensors.get("conv1.weight")
    if first is not None and first.ndim == 4 and model.conv1.in_channels == 1 != first.shape[1]:
        tensors["conv1.weight"] = first.sum(dim=1, keepdim=True)
    parameters = model.state_dict()
    # Torchvision's first weights are older than the counters.
    missing = [
        name
        for name in parameters
        if name not in tensors and not name.endswith("num_batches_tracked")
    ]
    unknown = [name for name in tensors if name not in parameters]
    if names := unknown or missing:
        blocks = tuple(
            len(stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)
        )
        raise InputError(
            f"{where}: must match a ResNet with blocks {blocks}, got "
            f"{'unknown' if unknown else 'no'} {first_of(names, 3)}. Choose weights of "
            "torchvision's network of that depth."
        )
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            hint = (
                "with as many classes and channels"
                if name.startswith(("fc.", "conv1."))
                else "of the same network"
            )
            raise InputError(
                f"{where}: {name} must have shape {tuple(parameters[name].shape)}, got "
                f"{tuple(tensor.shape)}. Choose weights {hint}."
            )
    model.load_state_dict(tensors, strict=False)
