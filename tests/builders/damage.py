"""Damage to a checkpoint's weights or manifest, which other checkpoints never share by hard links.
Each returns a file's path.
"""

import os
import random

from builders.faults import flip

from rayrec import storage
from rayrec.checkpoint import MANIFEST, Checkpoint


def _data_files(checkpoint: Checkpoint) -> list[str]:
    names = sorted(name for name in os.listdir(checkpoint.path) if name.endswith(".safetensors"))
    return [storage.join(checkpoint.path, name) for name in names]


def flip_a_bit(checkpoint: Checkpoint, *, seed: int = 0) -> str:
    """One bit in the midst of the tensors of a rank."""
    chance = random.Random(seed)
    path = chance.choice(_data_files(checkpoint))
    flip(path, bit=1 << chance.randrange(8))
    return path


def cut_short(checkpoint: Checkpoint) -> str:
    path = _data_files(checkpoint)[0]
    os.truncate(path, os.path.getsize(path) - 100)
    return path


def remove_file(checkpoint: Checkpoint) -> str:
    path = _data_files(checkpoint)[-1]
    os.remove(path)
    return path


def tear_manifest(checkpoint: Checkpoint) -> str:
    """Leaves half of the manifest."""
    path = storage.join(checkpoint.path, MANIFEST)
    os.truncate(path, os.path.getsize(path) // 2)
    return path
