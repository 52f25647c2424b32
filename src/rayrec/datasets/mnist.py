"""MNIST files: URLs, sizes and checksums."""

from rayrec.datasets.published_files import RemoteFile


def _file(name: str, size_bytes: int, md5: str, rows: int, unpacked_bytes: int) -> RemoteFile:
    return RemoteFile(
        name=name,
        url=f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
        page="https://github.com/cvdfoundation/mnist",
        size_bytes=size_bytes,
        md5=md5,
        rows=rows,
        unpacked_about_bytes=unpacked_bytes,
    )


TRAIN_IMAGES = _file("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", 60_000, 16 + 60_000 * 28 * 28)
TRAIN_LABELS = _file("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432", 60_000, 8 + 60_000)
TEST_IMAGES = _file("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3", 10_000, 16 + 10_000 * 28 * 28)
TEST_LABELS = _file("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c", 10_000, 8 + 10_000)

FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
"""Files in idx format: a big-endian header of 16 or 8 bytes, then one byte per pixel or label."""
