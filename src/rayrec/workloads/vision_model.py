"""What happens to images on the device, before, in and behind the network; apart from `vision`, for it needs torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from rayrec.workloads.vision import AugmentationConfig


def normalised(images: torch.Tensor, *, mean: float, std: float) -> torch.Tensor:
    """float32 (rows, 1, height, width): (images / 255 - mean) / std of (rows, height, width), uint8 or float from 0 to 255.

    To the last bit what torchvision's ToTensor and Normalize make, on CPU as on GPU.
    """
    # Divisors on the device: by a number of Python's, CUDA multiplies with its rounded inverse.
    pixel_range, deviation = (torch.full((), value, device=images.device) for value in (255.0, std))
    return ((images.float() / pixel_range - mean) / deviation).unsqueeze(1)


def augmented(images: torch.Tensor, augmentation: AugmentationConfig) -> torch.Tensor:
    """float32 (rows, height, width) from 0 to 255: each image turned, scaled and shifted by amounts drawn evenly from torch's
    generator of the device; what comes in from outside is 0, the background."""
    rows, height, width = images.shape
    if not rows:  # affine_grid refuses
        return images.float()
    drawn = torch.rand(rows, 4, device=images.device) * 2 - 1
    angle = drawn[:, 0] * math.radians(augmentation.max_rotation_degrees)
    scale = 1 + drawn[:, 1] * augmentation.max_scale
    shift = drawn[:, 2:] * augmentation.max_shift  # pixels
    cosine, sine = angle.cos() / scale, angle.sin() / scale
    # From places of the new image to places of the old one; the grid's unit is half the image, in either direction.
    to_old = torch.stack(
        [
            torch.stack([cosine, -sine * (height / width), shift[:, 0] * (2 / width)], dim=1),
            torch.stack([sine * (width / height), cosine, shift[:, 1] * (2 / height)], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(to_old, [rows, 1, height, width], align_corners=False)
    moved = functional.grid_sample(images.float().unsqueeze(1), grid, padding_mode="zeros", align_corners=False)
    return moved.squeeze(1)
