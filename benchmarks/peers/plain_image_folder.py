"""A light network trained on class folders of images as torchvision does it: ImageFolder,
RandomResizedCrop, flip, ToTensor and Normalize in a DataLoader. torchvision's build on PyPI cannot
be loaded beside a CPU build of torch, so the few lines of these classes are here, as in torchvision
0.28 with Pillow.

Usage: python plain_image_folder.py JSON with `path`, `image_size`, `steps`, `warm_steps`,
`batch_size`, `learning_rate`, `seed`, `loader_workers`. Prints JSON: `rows_per_s` after the
warm-up.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class LightNetwork(nn.Module):
    """Two convolutions with large strides: a network that trains faster than images are decoded."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 8, stride=8)
        self.second = nn.Conv2d(16, 32, 3, stride=2)
        self.last = nn.Linear(32, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(images))))
        return self.last(hidden.mean(dim=(2, 3)))


class ImageFolder(Dataset):
    """Images of class folders, decoded, cropped and normalized."""

    def __init__(self, root: str, size: int) -> None:
        self.size = size
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(folder, name), label)
            for label, of_class in enumerate(self.classes)
            for folder, _, names in sorted(os.walk(os.path.join(root, of_class), followlinks=True))
            for name in sorted(names)
        ]
        self.mean, self.std = (torch.tensor(value).view(-1, 1, 1) for value in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[row]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB")
        left, top, width, height = self._crop(*image.size)
        image = image.crop((left, top, left + width, top + height)).resize(
            (self.size, self.size), Image.Resampling.BILINEAR
        )
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(
            self.size, self.size, 3
        )
        tensor = pixels.permute((2, 0, 1)).contiguous().to(torch.float32).div(255)
        return tensor.sub_(self.mean).div_(self.std), label

    @staticmethod
    def _crop(width: int, height: int) -> tuple[int, int, int, int]:
        log_ratio = torch.log(torch.tensor((3 / 4, 4 / 3)))
        for _ in range(10):
            area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
            ratio = torch.exp(
                torch.empty(1).uniform_(log_ratio[0].item(), log_ratio[1].item())
            ).item()
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = torch.randint(0, height - h + 1, (1,)).item()
                left = torch.randint(0, width - w + 1, (1,)).item()
                return int(left), int(top), w, h
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, side, side


def epochs(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def main(arguments: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(os.cpu_count() or 1)
    rows = ImageFolder(arguments["path"], arguments["image_size"])
    workers = arguments["loader_workers"]
    loader: Any = DataLoader(
        rows,
        arguments["batch_size"],
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )
    torch.manual_seed(arguments["seed"])
    model = LightNetwork(len(rows.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments["learning_rate"], momentum=0.9)
    batches = epochs(loader)
    num_rows = 0
    start_s = 0.0
    last = 0.0
    for step in range(arguments["steps"]):
        if step == arguments["warm_steps"]:
            start_s = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        last = loss.item()
        num_rows += len(labels) if step >= arguments["warm_steps"] else 0
    return {"rows_per_s": num_rows / (time.perf_counter() - start_s), "loss": last}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
