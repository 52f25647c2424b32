"""Makes MDS shards of tokens that another program wrote usable as they are, next to the tokenizer that made them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.text import mds, text_blocks
from rayrec.data.text.mds import INDEX, Index, TokenColumn
from rayrec.data.text.text_blocks import PART_BYTES
from rayrec.data.text.tokenizer import TextTokenizer, read_tokenizer, write_tokenizer
from rayrec.imports import require
from rayrec.observe.console import Console
from rayrec.prepare.text import hash_of


def adopt_tokens(
    path: str,
    *,
    out: str | None,
    tokenizer: str | None,
    column: str | None,
    token_dtype: str,
    console: Console,
) -> dict[str, Any]:
    """Writes manifest.json and the tokenizer into a folder of MDS shards (its own index.json, or those of train/ and of
    validation/, val/, valid/, eval/ or test/), local or at a URL, or into the new folder `out`, which then has links to the sets.
    Reads every shard once; copies and changes none.

    Raises InputError for `out` with a URL, a set without a column of tokens, rows of different lengths, ids that the tokenizer
    does not have, damaged shards, and a folder that has a manifest already.
    """
    begun = time.perf_counter()
    require("tokenizers", extra="language")
    if tokenizer is None:
        raise InputError(f"{path}: holds MDS shards; give the tokenizer that made their tokens: --tokenizer DIR")
    path = storage.absolute(path).rstrip("/")
    if out is not None and (storage.is_url(path) or storage.is_url(out)):
        raise InputError(f"out: {out} would link to the shards of {path}, which no store can; leave out --out")
    if out is None and storage.exists(storage.join(path, text_blocks.MANIFEST)):
        raise InputError(
            f"{path}: has a {text_blocks.MANIFEST} already, so that runs can read it; remove it to adopt it again"
        )
    if out is None and storage.exists(storage.join(path, "tokenizer")):
        raise InputError(f"{path}: has a folder tokenizer already, where the tokenizer would go; give --out DIR")
    files = read_tokenizer(os.path.expanduser(tokenizer))
    known = TextTokenizer(files, tokenizer)
    sets, described, shards = text_blocks.sets_of_shards(path), {}, {}
    for name, folder in sets.items():
        described[name], shards[name] = _scan(
            storage.join(path, folder) if folder else path, known, column, token_dtype, console
        )
        described[name]["folder"] = folder
    sizes = {name: found["column"]["block_size"] for name, found in described.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"{path}: rows of train have {sizes['train']} tokens, of validation {sizes['validation']}")
    manifest = {
        "format": text_blocks.FORMAT,
        "version": text_blocks.VERSION,
        "block_size": sizes["train"],
        "part_bytes": PART_BYTES,
        "vocabulary_size": known.vocabulary_size,
        "tokenizer": known.hash,
        "end_token": known.end_token,
        "sets": described,
        "tokens_left_out": 0,
        "source": [],
        "hash": hash_of([known.hash, shards]),
    }
    if out is None:
        _write(path, manifest, files)
    else:
        with storage.writing_folder(out) as target:
            for found in described.values():
                link = found["folder"] or "train"
                os.symlink(storage.join(path, found["folder"]) if found["folder"] else path, storage.join(target, link))
                found["folder"] = link
            _write(target, manifest, files)
    names = ("format", "block_size", "vocabulary_size", "tokenizer", "end_token", "sets", "hash")
    place = path if out is None else storage.absolute(out).rstrip("/")
    return {"out": place, **{name: manifest[name] for name in names}, "seconds": time.perf_counter() - begun}


def _write(folder: str, manifest: dict[str, Any], files: Mapping[str, bytes]) -> None:
    try:
        write_tokenizer(files, storage.join(folder, "tokenizer"))
        storage.write_json(storage.join(folder, text_blocks.MANIFEST), manifest)
    except PermissionError as error:
        raise InputError(
            f"{folder}: cannot be written to ({error.strerror}); give --out DIR, a new folder that will have links to the shards"
        ) from None


def _scan(
    folder: str, tokenizer: TextTokenizer, column: str | None, token_dtype: str, console: Console
) -> tuple[dict[str, Any], list[Any]]:
    """What the manifest says of a set, and what identifies its shards. Reads every shard, one at a time."""
    index_path = storage.join(folder, INDEX)
    index = Index.parse(storage.read_bytes(index_path), index_path)
    name, encoding = index.find_column(column, index_path)
    if encoding != "bytes" and token_dtype != "int64":
        raise InputError(f"token_dtype: column {name} is of type {encoding}, which says it; leave it out")
    chosen: TokenColumn | None = None
    rows = sum(shard.rows for shard in index.shards)
    done = 0
    for shard in index.shards:
        path = storage.join(folder, shard.packed.name if shard.packed else shard.name)
        if not storage.exists(path):
            raise InputError(f"{path}: no such file; copy it there")
        with storage.Scratch("shard") as scratch:
            local = path
            if shard.packed or storage.is_url(path):
                local = os.path.join(scratch, shard.name)
                with open(local, "wb") as file:
                    for piece in mds.shard_content(folder, shard):
                        file.write(piece)
            content = mds.map_shard(local, shard)
            chosen = chosen or index.measure(content, name, token_dtype, path)
            found = index.rows(content, shard, chosen, path)
            lowest, highest = int(found.min()), int(found.max())
        if lowest < 0 or highest >= tokenizer.vocabulary_size:
            raise InputError(
                f"{path}: has tokens from {lowest:,} to {highest:,}, and the tokenizer has ids below "
                f"{tokenizer.vocabulary_size:,}; give the tokenizer that made them"
                + (", or another --token-dtype" if encoding == "bytes" else "")
            )
        done += shard.rows
        console.progress("adopt (rows)", done, rows)
    assert chosen is not None
    described = {
        "blocks": rows,
        "tokens": rows * chosen.block_size,
        "tokens_left_out": 0,
        "bytes": sum(shard.size_bytes for shard in index.shards),
        "column": vars(chosen),
    }
    return described, [[shard.name, shard.rows, shard.size_bytes, shard.checksum] for shard in index.shards]
