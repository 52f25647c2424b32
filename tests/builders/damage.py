"""Ways in which a checkpoint on a disk goes bad, done on purpose. Each returns the path of the file it harmed: of weights or the
manifest, which no other checkpoint shares; the others may be hard links, and damage to one would be damage to all."""

import os
import random

from rayrec import storage
from rayrec.checkpoint import MANIFEST, Checkpoint


def _data_files(checkpoint: Checkpoint) -> list[str]:
    names = sorted(name for name in os.listdir(checkpoint.path) if name.endswith(".safetensors"))
    return [storage.join(checkpoint.path, name) for name in names]


def flip_a_bit(checkpoint: Checkpoint, *, seed: int = 0) -> str:
    """One bit in the midst of the tensors of a rank."""
    chance = random.Random(seed)
    path = chance.choice(_data_files(checkpoint))
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
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
