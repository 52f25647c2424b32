"""Adoption of data preprocessed by other programs: checks it, and writes the metadata of a run next
to it.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from rayrec import storage
from rayrec.bounds import Count
from rayrec.config import Config, InputError
from rayrec.data.arrow import parse_reply
from rayrec.data.encoding.preprocessor import MAX_TABLE_ROWS, PREPROCESSOR_FOLDER, Preprocessor
from rayrec.data.engine import Engine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, SegmentEntry, numbered
from rayrec.data.logs.splits import NAMES, Kind, Split, SplitParts, check_parts
from rayrec.data.materialized import torchrec_arrays
from rayrec.data.materialized.dataset import VERSION, compute_hash, write_manifest
from rayrec.data.materialized.formats import finish_files
from rayrec.data.materialized.torchrec_arrays import (
    MAX_FAULTY_ROWS,
    PRESET,
    Day,
    IdFiles,
    ScanResult,
)
from rayrec.data.text import mds, text_blocks
from rayrec.data.text.mds import INDEX, Index, Layout, TokenColumn
from rayrec.data.text.text_blocks import PART_BYTES, find_shard_sets
from rayrec.data.text.tokenizer import TextTokenizer, read_tokenizer, write_tokenizer
from rayrec.imports import require
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine, reject_options
from rayrec.prepare.text import compute_hash as hash_of_tokens

_OF_SHARDS = ("tokenizer", "column", "token_dtype", "rows", "block_size")
"""Options that apply to MDS shards only."""


@dataclass(frozen=True, kw_only=True)
class AdoptionConfig(Config):
    """Options for reading, checking and splitting arrays of TorchRec's scripts, or for reading MDS
    shards.
    """

    sparse_path: str | None = None
    """Folder of the ID files, if different from that of dense values and labels. Requires `out`."""
    ids: Literal["auto"] | IdFiles = "auto"
    """Name suffix of the ID files. auto detects it."""
    files: tuple[str, ...] = ()
    """Days to read, in this order, given as file name prefixes such as day_0. Empty reads all, in
    natural order.
    """
    num_embeddings_per_feature: tuple[int, ...] = ()
    """Rows of each table. Larger IDs are taken modulo these, as in TorchRec's loader. Empty: the
    column's maximum ID plus one.
    """
    preprocessor: str | None = None
    """Folder with the Preprocessor to use, such as a run or adopted data. None creates one."""
    split: Literal["auto", "none"] | Kind = "auto"
    """Which rows to hold out. auto: the files valid and test, else the last day, else the last
    seventh of a single day. The first half of the held-out rows is validation, the second test, as
    in torchrec_dlrm. none: each run's recipe splits.
    """
    parts: SplitParts = field(default_factory=SplitParts)
    """Sizes of the parts, for --split fraction, days and named_days."""
    rows_per_segment: Count = 8192
    """Number of rows that are shuffled together. With --train-data.shuffle window, the rows of 16
    segments are mixed.
    """
    max_bad_fraction: float = 0.001
    """Maximum fraction of invalid rows. Below it, they are skipped."""
    engine: Literal["auto", "threads", "ray"] = "auto"
    """Engine that reads and checks the data. auto: threads of this process, or ray if an address,
    RAY_ADDRESS or a connection of this process specifies a Ray cluster.
    """
    address: str | None = None
    """Address of a running Ray cluster. None: RAY_ADDRESS, else, with engine ray, a local Ray."""
    tokenizer: str | None = None
    """Local folder of the HuggingFace tokenizer used for MDS shards."""
    column: str | None = None
    """Token column of MDS shards. None: tokens, else input_ids, else the only column."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "int64"
    """Token type of MDS shards with a bytes column."""
    rows: Layout = "equal"
    """Rows of MDS shards. equal: all of one length; pack: joined and cut into blocks; pad: padded
    to blocks, or cut.
    """
    block_size: Annotated[int, Ge(2)] | None = None
    """Tokens per block of --rows pack or pad. None with equal rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != "auto":
            check_parts(self.split, self.parts)
        elif self.parts != SplitParts():
            raise InputError("parts: must be used with --split fraction, days or named_days")
        wrong = [
            size for size in self.num_embeddings_per_feature if not 1 <= size <= MAX_TABLE_ROWS
        ]
        if wrong:
            raise InputError(
                f"num_embeddings_per_feature: each must be from 1 to {MAX_TABLE_ROWS:,}, got "
                f"{wrong[0]:,}"
            )
        if self.num_embeddings_per_feature and self.preprocessor:
            raise InputError(
                "num_embeddings_per_feature: must not be used with preprocessor, which sets the "
                "table sizes"
            )
        if (self.rows == "equal") != (self.block_size is None):
            raise InputError(
                "block_size: must be used with --rows pack or pad, and only then, got "
                f"{self.block_size}"
            )

    def split_by_days(self, days: Sequence[Day]) -> Split | None:
        """Return the split of these days, or None."""
        if self.split == "none":
            return None
        if self.split != "auto":
            return Split(kind=self.split, **vars(self.parts))
        if (
            all(day.name.startswith(tuple(name[:5] for name in NAMES)) for day in days)
            and len(days) > 1
        ):
            return Split(kind="named_files")
        return Split(kind="last_file" if len(days) > 1 else "sevenths")


# Folder of foreign arrays, and what becomes of it. Rows stay where they are:
#
#   find     days, their files and columns            before anything is read
#   scan     data tasks: ids, labels, invalid rows    one pass over all rows
#   tables   rows of each: given, or the largest id + 1
#   index    segments of valid rows; an invalid row cuts a segment
#   write    Preprocessor, then dataset.json, last    a folder without it is as before
def adopt(
    path: str, *, out: str | None = None, config: AdoptionConfig, console: Console
) -> dict[str, Any]:
    """Make a folder of TorchRec's arrays trainable: read and check them once, then write
    dataset.json and a Preprocessor into it, or into the new folder `out` with links to the arrays.
    Copies and changes no row. For MDS shards see `adopt_tokens`. Returns rows, out, sets,
    num_embeddings, the columns taken modulo these, bad_rows, hashes and rows_per_s. Raises
    InputError for a folder that is already adopted, missing, damaged or unsupported arrays, IDs
    outside [0, 2^40) without num_embeddings_per_feature, and more invalid rows than
    max_bad_fraction.
    """
    start_s = time.perf_counter()
    if out is not None and storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    if config.tokenizer is not None or find_shard_sets(path):
        why = "an option for arrays of TorchRec's scripts, not for MDS shards"
        reject_options(config, AdoptionConfig(), why, but=(*_OF_SHARDS, "engine", "address"))
        return adopt_tokens(path, out=out, config=config, console=console)
    array_options = [name for name in vars(config) if name not in _OF_SHARDS]
    reject_options(
        config,
        AdoptionConfig(),
        "an option for MDS shards, not for arrays of TorchRec's scripts",
        but=array_options,
    )
    folders = _folders(path, out, config)
    existing = Preprocessor.load(config.preprocessor) if config.preprocessor else None
    days = torchrec_arrays.find_days(
        folders, ids=None if config.ids == "auto" else config.ids, names=config.files
    )
    _check_columns(days[0], config, existing)
    runs = PreparationConfig(engine=config.engine, address=config.address)
    with console.preparing(), engine(runs, console, paths=folders) as running:
        scanned = _scan(days, running, console)
    preprocessor = existing or _new_preprocessor(days, scanned, config, path, console)
    modulo = _modulo(scanned, preprocessor, console)
    with _target(path, out, days) as (folder, final_path):
        index = _valid_rows(folder, path, days, scanned, config, console)
        split = config.split_by_days(days)
        sets = split.rows(index) if split and scanned.labelled else {}
        manifest = _write(folder, days, scanned, index, preprocessor, modulo, sets)
    seconds = time.perf_counter() - start_s
    return {
        "out": final_path,
        "format": manifest["format"],
        "rows": index.rows,
        "bad_rows": index.faults.total,
        "days": [day.name for day in days],
        "labelled": scanned.labelled,
        "sets": manifest["sets"],
        "num_embeddings": preprocessor.num_embeddings,
        "modulo": [preprocessor.inputs.sparse[number] for number in modulo],
        "preprocessor": manifest["preprocessor"],
        "hash": manifest["hash"],
        "bytes": sum(file["bytes"] for file in manifest["files"]),
        "seconds": seconds,
        "rows_per_s": index.rows / seconds,
    }


def _folders(path: str, out: str | None, config: AdoptionConfig) -> list[str]:
    """Return the folders of the arrays. Raises InputError if they cannot be adopted into `out`."""
    folders = [path, *([config.sparse_path] if config.sparse_path else [])]
    for folder in folders:
        if storage.is_url(folder):
            raise InputError(
                f"{folder}: contains no MDS shards ({INDEX}, also in train/), and arrays must be "
                "on a file system, to be mapped into memory. Copy them to one"
            )
        if not os.path.isdir(folder):
            raise InputError(f"{folder}: folder not found. Use the folder of the arrays")
    if out is None:
        _check_new(path)
        if config.sparse_path:
            raise InputError(
                "sparse_path: must be used with --out DIR, a new folder with links to both folders"
            )
    return folders


def _modulo(scanned: ScanResult, preprocessor: Preprocessor, console: Console) -> list[int]:
    """Return the sparse columns with ids outside their tables, and note them."""
    modulo = []
    for number, rows in enumerate(preprocessor.num_embeddings):
        low = scanned.min_ids[number]
        high = scanned.max_ids[number]
        if low < 0 or high >= rows:
            modulo.append(number)
            console.note(
                f"{preprocessor.inputs.sparse[number]}: IDs from {low:,} to {high:,} are taken "
                f"modulo {rows:,}"
            )
    return modulo


def _valid_rows(
    folder: str,
    path: str,
    days: Sequence[Day],
    scanned: ScanResult,
    config: AdoptionConfig,
    console: Console,
) -> LogIndex:
    """Return the index without invalid rows, and note these. Raises InputError for too many."""
    index = _index(folder, days, scanned, config.rows_per_segment)
    index.check(config.max_bad_fraction, path)
    faults = index.faults
    if faults.total > MAX_FAULTY_ROWS:
        raise InputError(
            f"{path}: {faults.describe()}; at most {MAX_FAULTY_ROWS:,} can be skipped. Fix the "
            "arrays"
        )
    if faults.total:
        console.note(f"{path}: {faults.describe()}; they are left out")
    return index


def _check_new(path: str) -> None:
    """Reject a folder that runs can already read. Raises InputError."""
    dataset = LogSource.at(path).dataset()
    if dataset is not None:
        again = "Remove its dataset.json to adopt it again, or use --out DIR"
        fix = again if dataset.adopted else "Train on it without adopting it"
        raise InputError(f"{path}: already has a dataset.json, so that runs can read it. {fix}")


def _check_columns(day: Day, config: AdoptionConfig, preprocessor: Preprocessor | None) -> None:
    """Check table sizes and Preprocessor against the columns of the arrays. Raises InputError."""
    sizes = config.num_embeddings_per_feature
    num_dense = day.matrices[0].columns
    if sizes and len(sizes) != len(day.hotness):
        raise InputError(
            f"num_embeddings_per_feature: must match the {len(day.hotness)} columns of "
            f"{day.plans[2].name}, got {len(sizes)}"
        )
    if preprocessor is None:
        return
    if (
        preprocessor.schema
        != torchrec_arrays.build_preprocessor(num_dense, day.hotness, [1] * len(day.hotness)).schema
    ):
        raise InputError(
            f"{config.preprocessor}: must be a Preprocessor for these columns, without raw "
            "values. Use that of adopted data"
        )


def _scan(days: Sequence[Day], running: Engine, console: Console) -> ScanResult:
    total = sum(day.rows for day in days)
    done = 0

    def results() -> Iterator[dict[str, Any]]:
        nonlocal done
        for table in running.run(
            "adopt",
            partial(torchrec_arrays.scan, days=days),
            torchrec_arrays.row_ranges(days),
            block_bytes=1 << 16,
        ):
            summary = parse_reply(table)
            done += summary["rows"]
            console.progress("adopt (rows)", done, total)
            yield summary

    return ScanResult.merge(days, results())


def _sizes(scanned: ScanResult, path: str) -> list[int]:
    # Only without given sizes: with them, any id is taken modulo its table.
    below = np.flatnonzero(scanned.min_ids < 0)
    if len(below):
        raise InputError(
            f"{path}: column {below[0]} has ID {scanned.min_ids[below[0]]:,}. Use "
            "--num-embeddings-per-feature to take IDs modulo the rows of each table, as TorchRec's "
            "loader does"
        )
    above = np.flatnonzero(scanned.max_ids >= MAX_TABLE_ROWS)
    if len(above):
        raise InputError(
            f"{path}: IDs of column {above[0]} must be below {MAX_TABLE_ROWS:,}, got "
            f"{scanned.max_ids[above[0]]:,}. Use --num-embeddings-per-feature to take them modulo "
            "fewer rows"
        )
    return (scanned.max_ids + 1).tolist()


def _new_preprocessor(
    days: Sequence[Day], scanned: ScanResult, config: AdoptionConfig, path: str, console: Console
) -> Preprocessor:
    """Return a Preprocessor for tables of the configured sizes, else for all ids."""
    sizes = config.num_embeddings_per_feature or _sizes(scanned, path)
    preprocessor = torchrec_arrays.build_preprocessor(
        days[0].matrices[0].columns, days[0].hotness, sizes
    )
    if not config.num_embeddings_per_feature:
        _note_hashes(preprocessor, sum(day.rows for day in days), console)
    return preprocessor


def _note_hashes(preprocessor: Preprocessor, rows: int, console: Console) -> None:
    """Note tables with more rows than contiguous IDs of this data can need: their IDs are
    hashes.
    """
    large = {
        name: size
        for name, size in zip(preprocessor.inputs.sparse, preprocessor.num_embeddings, strict=True)
        if name not in preprocessor.schema.lists and size > rows + 2
    }
    if large:
        name = max(large, key=lambda name: large[name])
        console.note(
            f"{len(large)} columns have IDs above the number of rows, {name} up to "
            f"{large[name] - 1:,}. A table has a row for "
            "each: use --num-embeddings-per-feature to take IDs modulo fewer rows, as TorchRec's "
            "loader does"
        )


def _index(
    folder: str, days: Sequence[Day], scanned: ScanResult, rows_per_segment: int
) -> LogIndex:
    """Return segments of valid rows in the order of the days. A segment does not span days or
    invalid rows.
    """
    names = sorted(day.name for day in days)
    entries = []
    for day, faulty in zip(days, scanned.faulty_rows, strict=True):
        path = storage.join(folder, f"{names.index(day.name):05d}", day.name)
        # Cuts at regular rows, and around each invalid row, which is then a segment of its row
        # alone.
        cuts = np.unique(
            np.concatenate(
                [np.arange(0, day.rows, rows_per_segment), faulty, faulty + 1, [day.rows]]
            )
        )
        starts = cuts[:-1]
        stops = cuts[1:]
        good = ~np.isin(starts, faulty)
        for start, stop in zip(starts[good].tolist(), stops[good].tolist(), strict=True):
            entries.append(SegmentEntry(path, start, stop, stop - start))
    return LogIndex(
        numbered(entries, "npy" if days[0].matrices[2].name == "sparse" else "npz"), scanned.faults
    )


@contextmanager
def _target(path: str, out: str | None, days: Sequence[Day]) -> Iterator[tuple[str, str]]:
    """Yield the output folder and its final path: the arrays' folder, or a new one with links to
    them, created atomically.
    """
    if out is None:
        target = storage.absolute(path).rstrip("/")
        yield target, target
        return
    with storage.writing_folder(out) as folder:
        for day in days:
            for source in day.paths:
                # Links, since arrays of a terabyte are not copied. The target is absolute, so the
                # new folder may move.
                os.symlink(storage.absolute(source), storage.join(folder, storage.name_of(source)))
        yield folder, storage.absolute(out).rstrip("/")


def _write(
    folder: str,
    days: Sequence[Day],
    scanned: ScanResult,
    index: LogIndex,
    preprocessor: Preprocessor,
    modulo: Sequence[int],
    sets: dict[str, tuple[int, int]],
) -> dict[str, Any]:
    """Write the Preprocessor, then the manifest. Return the manifest."""
    by_name = sorted(days, key=lambda day: day.name)
    plans = [plan for day in by_name for plan in day.plans]
    try:
        preprocessor.save(storage.join(folder, PREPROCESSOR_FOLDER))
        files = finish_files(folder, plans, scanned.ranges)
        manifest = {
            "version": VERSION,
            "format": index.format,
            "preprocessor": preprocessor.hash(),
            "sets": {name: list(rows) for name, rows in sets.items()},
            "labelled": scanned.labelled,
            "shuffle": "none",
            "seed": None,
            "preset": PRESET,
            "schema": preprocessor.schema.to_dict(),
            "rows": index.rows,
            "modulo": list(modulo),
            "source": [
                {"path": path, "bytes": plan.size_bytes}
                for day in by_name
                for plan, path in zip(day.plans, day.paths, strict=True)
            ],
            "faults": index.faults.to_dict(),
            "raw_files": [day.name for day in by_name],
            "file_rows": [day.rows for day in by_name],
            "matrices": [
                [list(vars(matrix).values()) for matrix in day.matrices] for day in by_name
            ],
            "segments": [
                [
                    int(storage.name_of(storage.parent_folder(each.path))),
                    each.start,
                    each.stop,
                    each.rows,
                ]
                for each in index.segments
            ],
            "hash": compute_hash(files),
            "files": files,
            "parquet": [],
        }
        write_manifest(folder, manifest)
    except PermissionError as error:
        raise InputError(
            f"{folder}: cannot be written to ({error.strerror}). Use --out DIR, a new folder with "
            "links to the arrays"
        ) from None
    return manifest


def adopt_tokens(
    path: str, *, out: str | None, config: AdoptionConfig, console: Console
) -> dict[str, Any]:
    """Write manifest.json and the tokenizer into a folder of MDS shards, local or a URL, or into
    the new folder `out`. `out` has links to the sets, or their URLs. The shards have one
    index.json, or one in train/ and one in validation/, val/, valid/, eval/ or test/. Data tasks
    read every shard once; none is copied or changed. Raises InputError for no or damaged shards,
    `out` at a URL with local shards, and a folder with a manifest. Also for sets without tokens,
    unsuitable row lengths, and unknown IDs.
    """
    start_s = time.perf_counter()
    require("tokenizers", extra="language")
    if config.tokenizer is None:
        raise InputError(
            f"{path}: contains MDS shards. Specify the tokenizer of their tokens with --tokenizer "
            "DIR"
        )
    path = storage.absolute(path).rstrip("/")
    sets = _sets(path, out)
    files = read_tokenizer(os.path.expanduser(config.tokenizer))
    tokenizer = TextTokenizer(files, config.tokenizer)
    described = {}
    shards = {}
    runs = PreparationConfig(engine=config.engine, address=config.address)
    with console.preparing(), engine(runs, console, paths=(path,)) as running:
        for name, folder in sets.items():
            described[name], shards[name] = _scan_shards(
                _inside(path, folder), tokenizer, config, running, console
            )
            described[name]["folder"] = folder
    sizes = {name: info["column"]["block_size"] for name, info in described.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"{path}: train and validation rows must match, got {sizes['train']} and "
            f"{sizes['validation']} tokens"
        )
    manifest = {
        "format": text_blocks.FORMAT,
        "version": text_blocks.VERSION,
        "block_size": sizes["train"],
        "part_bytes": PART_BYTES,
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer": tokenizer.hash,
        "end_token": tokenizer.end_token,
        "sets": described,
        "tokens_left_out": sum(info["tokens_left_out"] for info in described.values()),
        "source": [],
        "hash": hash_of_tokens([tokenizer.hash, shards]),
    }
    final_path = _write_tokens(path, out, manifest, files)
    names = ("format", "block_size", "vocabulary_size", "tokenizer", "end_token", "sets", "hash")
    return {
        "out": final_path,
        **{name: manifest[name] for name in names},
        "seconds": time.perf_counter() - start_s,
    }


def _sets(path: str, out: str | None) -> dict[str, str]:
    """Return the sets of shards in a folder. Raises InputError if they cannot be adopted into
    `out`.
    """
    sets = find_shard_sets(path)
    if not sets:
        raise InputError(
            f"{path}: MDS shards not found, no {INDEX} there or in train/. Check the path, or "
            "remove --tokenizer"
        )
    if out is None:
        if storage.exists(storage.join(path, text_blocks.MANIFEST)):
            raise InputError(
                f"{path}: already has a {text_blocks.MANIFEST}, so that runs can read it. Remove "
                "it to adopt it again"
            )
        if storage.exists(storage.join(path, "tokenizer")):
            raise InputError(f"{path}: already has a folder tokenizer. Use --out DIR")
    elif storage.is_url(out) and not storage.is_url(path):
        raise InputError(
            f"out: {out} cannot refer to local shards, {path}. Copy them to the store, or use a "
            "local --out"
        )
    return sets


def _inside(path: str, folder: str) -> str:
    return storage.join(path, folder) if folder else path


def _write_tokens(
    path: str, out: str | None, manifest: dict[str, Any], files: Mapping[str, bytes]
) -> str:
    """Write the tokenizer and the manifest next to the shards, or into the new folder `out` with
    links to them. Return that folder.
    """
    if out is None:
        try:
            _write_metadata(path, manifest, files)
        except PermissionError as error:
            raise InputError(
                f"{path}: cannot be written to ({error.strerror}). Use --out DIR, a new folder "
                "with links to the shards"
            ) from None
        return path
    with storage.writing_folder(out) as target:
        for info in manifest["sets"].values():
            shard_folder = _inside(path, info["folder"])
            if not storage.is_url(shard_folder):
                link = info["folder"] or "train"
                os.symlink(shard_folder, storage.join(target, link))
                shard_folder = link
            info["folder"] = shard_folder
        _write_metadata(target, manifest, files)
    return storage.absolute(out).rstrip("/")


def _write_metadata(folder: str, manifest: dict[str, Any], files: Mapping[str, bytes]) -> None:
    write_tokenizer(files, storage.join(folder, "tokenizer"))
    storage.write_json(storage.join(folder, text_blocks.MANIFEST), manifest)


def _scan_shards(
    folder: str, tokenizer: TextTokenizer, config: AdoptionConfig, running: Engine, console: Console
) -> tuple[dict[str, Any], list[Any]]:
    """Return the manifest entry of a set, and the identity of its shards. Reads all shards in data
    tasks.
    """
    index_path = storage.join(folder, INDEX)
    index = Index.parse(storage.read_bytes(index_path), index_path)
    name, encoding = index.find_column(config.column, index_path)
    if encoding != "bytes" and config.token_dtype != "int64":
        raise InputError(
            f"token_dtype: the type {encoding} of column {name} determines it. Remove this option"
        )
    end_token = tokenizer.end_token if config.rows == "pack" else None
    column = TokenColumn(name, config.token_dtype, config.block_size or 0, config.rows, end_token)
    scan = partial(mds.scan_shard, folder=folder, column=column)
    rows = sum(shard.rows for shard in index.shards)
    done = 0
    counts: Counter[str] = Counter()
    blocks = []
    for shard, reply in zip(
        index.shards, running.run("adopt", scan, index.shards, block_bytes=1 << 16), strict=True
    ):
        report = parse_reply(reply)
        shard_path = storage.join(folder, shard.name)
        size = report["block_size"]
        dtype = report["dtype"]
        if not done:
            column = replace(column, dtype=dtype, block_size=size)
        if (dtype, size) != (column.dtype, column.block_size):
            raise mds.different_rows(shard_path, column.block_size, column.dtype)
        if report["min"] < 0 or report["max"] >= tokenizer.vocabulary_size:
            other = ", or another --token-dtype" if encoding == "bytes" else ""
            raise InputError(
                f"{shard_path}: tokens must be below {tokenizer.vocabulary_size:,}, the size of "
                f"the tokenizer, got {report['min']:,} to {report['max']:,}. Use the tokenizer "
                f"that created them{other}"
            )
        blocks.append(report["blocks"])
        counts += Counter(
            blocks=blocks[-1],
            tokens=report["tokens"],
            tokens_left_out=report["left_out"],
            bytes=shard.size_bytes,
        )
        done += shard.rows
        console.progress("adopt (rows)", done, rows)
    shards: list[Any] = [
        [shard.name, shard.rows, shard.size_bytes, shard.checksum] for shard in index.shards
    ]
    described = {"name": name, "dtype": column.dtype, "block_size": column.block_size}
    if column.layout != "equal":
        if not counts["blocks"]:
            raise InputError(
                f"{folder}: no shard has the {column.block_size} tokens of a block. Lower "
                "--block-size"
            )
        described |= {"layout": column.layout, "end_token": end_token, "blocks": blocks}
        shards.append(described)
    return {"tokens_left_out": 0, **counts, "column": described}, shards
