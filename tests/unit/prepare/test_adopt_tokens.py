"""Adopted shards of MosaicML's writer: training matches rayrec's shards, and invalid shards are rejected in one line."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import flip, rejects
from builders.runs import QUIET, train

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.text import mds
from rayrec.data.text.mds import TokenRows
from rayrec.data.text.text_blocks import open_tokens
from rayrec.data.text.tokenizer import bytes_bpe, write_tokenizer

BLOCK = 16
ROWS = np.random.default_rng(0).integers(0, 260, (60, BLOCK))
Sample = Callable[[np.ndarray], dict[str, Any]]
adopt = functools.partial(rayrec.adopt, console=QUIET)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer with IDs below 260."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(bytes_bpe(["the cat and the hat and the bat"] * 4, 260), str(folder))
    return folder


def cells(name: str, dtype: str, **others: Any) -> Sample:
    """Return the function of a row's cells: its tokens as a type, and other columns."""
    return lambda row: {name: row.astype(dtype), **others}


FIXED, fixed = {"tokens": "ndarray:uint16:16"}, cells("tokens", "uint16")
OTHERS = {"attention_mask": "ndarray:uint8", "input_ids": "ndarray:int64", "label": "int"}
others = cells("input_ids", "int64", attention_mask=np.ones(BLOCK, np.uint8), label=3)


def write(folder: Path, columns: dict[str, str], sample: Sample, rows: np.ndarray = ROWS, **options: Any) -> Path:
    with mds.load_streaming().MDSWriter(out=str(folder), columns=columns, size_limit=1200, **options) as writer:
        for row in rows:
            writer.write(sample(row))
    return folder


def adopted_rows(place: str, cache: Path) -> np.ndarray:
    tokens = open_tokens(place)
    rows = TokenRows(tokens.set_path("train"), column=tokens.columns["train"], cache_folder=str(cache))
    assert len(rows.chunk_rows) > 1
    order = np.random.default_rng(1).permutation(len(rows))
    rows.will_read(order[:7])
    found = rows.read(order)["tokens"]
    rows.close()
    assert found.dtype == np.int64
    return found[np.argsort(order)]


@pytest.mark.parametrize(
    ("columns", "sample", "options"),
    [
        ({"tokens": "ndarray:int32:16"}, cells("tokens", "int32"), {}),
        ({"tokens": "ndarray:int32"}, cells("tokens", "int32"), {"hashes": ["sha1", "xxh64"]}),
        ({"input_ids": "ndarray"}, cells("input_ids", "uint16"), {"compression": "zstd:7"}),
        ({"tokens": "bytes"}, lambda row: {"tokens": row.astype(np.int64).tobytes()}, {"compression": "gz"}),
        (OTHERS, others, {"compression": "br:2", "hashes": ["md5"]}),
        ({"ids": "ndarray:uint32:16"}, cells("ids", "uint32"), {"compression": "snappy"}),
        ({"ids": "ndarray:uint16:16"}, cells("ids", "uint16"), {"compression": "bz2"}),
    ],
    ids=["fixed", "dynamic", "any-zstd", "bytes-gz", "others-br", "snappy", "bz2"],
)
def test_adopted_shards_keep_rows(tmp_path: Path, tokenizer: Path, columns: dict[str, str], sample: Sample, options: Any) -> None:
    folder = write(tmp_path / "set", columns, sample, **options)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = adopt(str(folder), tokenizer=str(tokenizer))
    assert (made["block_size"], made["sets"]["train"]["blocks"]) == (BLOCK, 60)
    for place in (str(folder), f"file://{folder}"):  # the latter takes the way of a store's
        np.testing.assert_array_equal(adopted_rows(place, tmp_path / "cache"), ROWS)
    assert {path.name for path in folder.iterdir()} == {*before, "manifest.json", "tokenizer"}
    assert all((folder / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_adopt_writes_next_to_shards_at_url(tmp_path: Path, tokenizer: Path, compression: str | None) -> None:
    folder = write(
        tmp_path / "set", {"tokens": "ndarray:int32"}, cells("tokens", "int32"), compression=compression, hashes=["xxh64"]
    )
    url = f"file://{folder}"
    rejects(f"`rayrec adopt {url} --tokenizer DIR`", train, recipes.gpt2_tiny(url), name="advised", storage_path=str(tmp_path))
    rejects("Remove --out", adopt, url, tokenizer=str(tokenizer), out=str(tmp_path / "out"))
    assert adopt(url, tokenizer=str(tokenizer))["out"] == url
    np.testing.assert_array_equal(adopted_rows(url, tmp_path / "cache"), ROWS)


def test_adopted_shards_match_rayrec_shards_in_training(tmp_path: Path, tokenizer: Path) -> None:
    """Equal tokens, written by rayrec and by MosaicML's writer, compressed and with other columns. Linked, not copied."""
    for name, rows in (("train", ROWS[:48]), ("val", ROWS[48:])):
        write(tmp_path / "theirs" / name, OTHERS, others, rows, compression="zstd")
    out = tmp_path / "adopted"
    adopt(str(tmp_path / "theirs"), out=str(out), tokenizer=str(tokenizer))
    assert (out / "val").is_symlink()
    theirs = json.loads((out / "manifest.json").read_text())
    assert {name: found["blocks"] for name, found in theirs["sets"].items()} == {"train": 48, "validation": 12}
    own = tmp_path / "own"
    for name, their_name, rows in (("train", "train", ROWS[:48]), ("validation", "val", ROWS[48:])):
        shards = json.loads((out / their_name / "index.json").read_text())["shards"]
        infos, rest = [], iter(rows.astype(np.uint16))
        for number, shard in enumerate(shards):
            of_shard = np.array([*itertools.islice(rest, shard["samples"])])
            infos.append(mds.write_shard(of_shard, str(own / name / f"shard.{number:05d}.mds")))
        mds.write_index(str(own / name), infos)
    write_tokenizer({path.name: path.read_bytes() for path in tokenizer.iterdir()}, str(own / "tokenizer"))
    sets = {name: {"blocks": found["blocks"]} for name, found in theirs["sets"].items()}
    (own / "manifest.json").write_text(json.dumps({**theirs, "sets": sets}))
    found = [trained(path, tmp_path / "runs") for path in (out, own)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert rayrec.evaluate(str(tmp_path / "runs" / "adopted"), str(out))["loss"] == pytest.approx(found[0]["metrics"]["loss"])


def trained(path: Path, runs: Path) -> dict[str, Any]:
    workload = {"model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": BLOCK}, "max_new_tokens": 2}
    data: Any = {"train_data": {"shuffle": "window", "segments_per_block": 2}, "steps": 6, "batch_size": 8}
    config = recipes.gpt2_tiny(str(path)).replace(workload=workload, scaling={"num_workers": 1}, **data)
    return train(config, storage_path=str(runs), name=path.name).summary


def flipped(folder: Path) -> Path:
    """Flip a bit of the second shard."""
    flip(sorted(folder.glob("shard*"))[1], -9, bit=4)
    return folder


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda f: write(f, FIXED, fixed), {"tokenizer": None}, r"Specify the tokenizer .* --tokenizer DIR$"),
        (lambda f: write(f, {"text": "str"}, lambda row: {"text": "a cat"}), {}, r"is text, not tokens\. .*--format mds"),
        (lambda f: write(f, {"a": "ndarray:uint16:16", "b": "int"}, cells("a", "uint16", b=1)), {},
         r"its rows have a \(ndarray:uint16:16\), b \(int\)\. Name the token column with --column\.$"),
        (lambda f: write(f, FIXED, fixed), {"column": "ids"}, r"with --column, ids not found\.$"),
        (lambda f: write(f, {"tokens": "json"}, lambda row: {"tokens": row.tolist()}), {}, "integers or bytes, got json"),
        (lambda f: write(f, {"tokens": "ndarray:int32"}, lambda row: {"tokens": row[: 5 + row[0] % 2].astype(np.int32)}), {},
         r"all rows must have \d tokens of int32 at the same offset\. Write rows of one length"),
        (lambda f: write(f, {"tokens": "ndarray"}, cells("tokens", "float32")), {}, "must be arrays of integers"),
        (lambda f: write(f, {"tokens": "bytes"}, lambda row: {"tokens": row.astype(np.int32).tobytes()}), {},
         r"below 260, the size of the tokenizer, .*another --token-dtype"),
        (lambda f: write(f, FIXED, lambda row: fixed(row + 3)), {}, r"tokens must be below 260, .*, got \d+ to 262"),
        (lambda f: flipped(write(f, FIXED, fixed, hashes=["sha1"])), {}, r"shard\.00001\.mds: damaged: sha1 must be"),
        (lambda f: flipped(write(f, FIXED, fixed, compression="zstd", hashes=["md5"])), {}, r"\.zstd: damaged: md5 must be"),
        (lambda f: write(f, FIXED, fixed), {"split": "sevenths"}, r"^--split: an option for arrays .*not for MDS shards"),
    ],
)  # fmt: skip
def test_adopt_rejects_invalid_shards_in_one_line(tmp_path: Path, tokenizer: Path, make: Any, options: Any, message: str) -> None:
    folder = make(tmp_path / "set")
    rejects(message, adopt, str(folder), **{"tokenizer": str(tokenizer), **options})
    assert not (folder / "manifest.json").exists()


def test_unadopted_shards_error_names_command(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "set", FIXED, fixed))
    rejects(r"`rayrec adopt [^`]*set --tokenizer DIR`", train, recipes.gpt2_tiny(folder), scaling={"num_workers": 1})
    with pytest.raises(InputError, match=r"must contain plain text, got MDS shards.*`rayrec adopt [^`]*set --tokenizer DIR`"):
        rayrec.preprocess(folder, out=str(tmp_path / "out"), format="mds", console=QUIET)
