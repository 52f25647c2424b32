"""The settings of ResNet and what one image costs; the network itself is in `resnet_module`, so that this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.config import Config, InputError

if TYPE_CHECKING:
    from rayrec.workloads.resnet_module import ResNet

STAGE_WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages; each but the first halves the image."""


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Config):
    """A residual network of basic blocks (He et al., 2015, section 4.1) with torchvision's names and start values."""

    blocks: tuple[int, int, int, int] = (2, 2, 2, 2)
    """Residual blocks of each stage: (2, 2, 2, 2) is ResNet18, (3, 4, 6, 3) is ResNet34."""
    num_channels: int = 1
    """Of the images: 1 is gray, 3 is RGB."""
    num_classes: int = 10
    """Classes told apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_channels", "num_classes"):
            if getattr(self, name) < 1:
                raise InputError(f"ResNetConfig.{name}: {getattr(self, name)} must be at least 1")
        if min(self.blocks) < 1:
            raise InputError(f"ResNetConfig.blocks: {self.blocks} must each be at least 1")

    def build(self) -> ResNet:
        """The network on CPU. Start values come from torch's global generator, in torchvision's order: after the same
        `torch.manual_seed`, `torchvision.models.resnet18` has the same ones, where channels and classes are the same."""
        from rayrec.workloads.resnet_module import ResNet

        return ResNet(self)


def multiply_adds(config: ResNetConfig, *, image_size: int) -> int:
    """Multiply-adds of the convolutions and of the last layer for one square image's forward pass (backward costs about twice
    as many)."""
    size = _halved(image_size)
    total = config.num_channels * STAGE_WIDTHS[0] * 7 * 7 * size**2
    size, width_in = _halved(size), STAGE_WIDTHS[0]
    for stage, (width, blocks) in enumerate(zip(STAGE_WIDTHS, config.blocks, strict=True)):
        if stage:
            size = _halved(size)
            total += width_in * width * size**2  # the shortcut's 1 x 1
        total += 9 * size**2 * (width_in * width + (2 * blocks - 1) * width**2)
        width_in = width
    return total + width_in * config.num_classes


def _halved(size: int) -> int:
    """After a layer of stride 2 that pads half of its kernel."""
    return (size + 1) // 2
