"""Profiles: what exactly becomes of missing values, integers and categories, one small description a published pipeline."""

import difflib
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rayrec.config import Config, InputError
from rayrec.data.encoding.counts import CountingJob, Counts, mean_and_variance
from rayrec.data.encoding.derivation import Derivation
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.known_categories import ENDS, frequency_ends
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import LOWEST_INTEGER, DenseColumn, SparseColumn
from rayrec.data.logs.splits import Split
from rayrec.hashing import murmur3
from rayrec.schema import Schema

MLPERF_NUM_EMBEDDINGS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""Rows of the 26 tables in MLPerf's benchmarks on Criteo 1TB: distinct categories, at most 40 million."""


@dataclass(frozen=True, kw_only=True)
class Preset(Config):
    """How raw columns become model inputs. A missing number counts as 0 throughout, as in every Criteo pipeline."""

    name: str = "rayrec"
    """Of the pipeline it follows."""
    dense: Literal["signed_log", "log", "identity", "buckets"] = "signed_log"
    """sign(x) ln(1 + |x|); ln(x + shift); x; or categories floor(ln(x)^2) for x > 2, else x, where 0 is none."""
    dense_shift: float = 1.0
    """Added before the logarithm ("log")."""
    dense_lowest: int | None = None
    """Smaller numbers are raised to this first ("log" and "identity")."""
    dense_from_file_minimum: bool = False
    """Numbers are counted from the least one among all dense columns of their file."""
    dense_standardized: bool = True
    """Afterwards the mean is subtracted and the result divided by the standard deviation, both of the counted rows."""
    ids: Literal["frequency", "first_seen", "murmur3"] = "frequency"
    """Ids by falling count (then rising token), or by the row of the log in which a category comes first; murmur3: no
    vocabulary, a hash of the category modulo the table's rows (needs num_embeddings)."""
    first_id: int = 2
    """Id of the first category."""
    unknown_id: int | None = 0
    """Id of categories never seen, or too seldom; None: one more row at the end of the table."""
    missing: int | Literal["token", "zero", "unknown"] = 1
    """Id of an empty field; token: a category of its own, counted as the others are; zero: the category 00000000; unknown:
    as one never seen."""
    min_count: int = 2
    """Categories seen less often than this share unknown_id."""
    token_modulo: int | None = None
    """Categories are numbers taken modulo this before they are told apart; None: as they are."""
    num_embeddings: tuple[int, ...] | None = None
    """Rows of each table, fixed: ids are taken modulo these; None: as many as there are ids."""
    max_num_embeddings: int | None = None
    """Most rows a table may have; None: no limit."""
    beyond_limit: Literal["hash", "modulo"] = "hash"
    """A column that needs more rows than max_num_embeddings: hash gives up its vocabulary, id = first_id + token modulo the
    rest (64-bit tokens are mixed first); modulo takes its ids modulo the limit."""
    counted: Literal["train", "all"] = "train"
    """Rows that vocabulary and constants are made from; all: with those held out, as the published pipeline does."""
    multi_hot: MultiHot | None = None
    """Makes a bag of every id."""
    split: Split = field(default_factory=Split)
    """Which rows train, validate and test, where no evaluation log is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_count < 1:
            raise InputError(f"min_count: {self.min_count} must be at least 1")
        if self.max_num_embeddings is not None and self.max_num_embeddings <= self.first_id:
            raise InputError(f"max_num_embeddings: {self.max_num_embeddings} must be above {self.first_id}")
        if self.dense_lowest is not None and abs(self.dense_lowest) > -LOWEST_INTEGER:
            raise InputError(f"dense_lowest: {self.dense_lowest} must lie between -2^62 and 2^62")
        if self.token_modulo is not None and not 1 <= self.token_modulo < 2**32:
            raise InputError(f"token_modulo: {self.token_modulo} must lie between 1 and 2^32 - 1")
        if self.ids == "murmur3" and self.num_embeddings is None:
            raise InputError("preset: ids murmur3 need num_embeddings, the rows of each table")
        reserved = {self.unknown_id, self.missing if isinstance(self.missing, int) else None} - {None}
        if self.first_id < 0 or any(not 0 <= name < self.first_id for name in reserved if name is not None):
            raise InputError(f"preset: unknown_id and missing must lie below first_id {self.first_id}")

    @property
    def first_rows(self) -> bool:
        """Whether counting must note where each category comes first."""
        return self.ids == "first_seen"

    @property
    def derivation(self) -> Derivation:
        """What is made of raw rows before they are counted."""
        return Derivation(buckets=self.dense == "buckets", modulo=self.token_modulo)

    def counting(self, schema: Schema) -> CountingJob:
        """What must be counted of a log of `schema`."""
        return CountingJob(schema, derivation=self.derivation, first_rows=self.first_rows)

    def check(self, schema: Schema) -> None:
        """Raises InputError where these rules cannot be followed on a log of `schema`."""
        if schema.tokens == "hexadecimal":
            return
        rules = {
            "dense buckets": self.dense == "buckets",
            "dense_from_file_minimum": self.dense_from_file_minimum,
            "token_modulo": self.token_modulo is not None,
            "ids murmur3": self.ids == "murmur3",
            "multi_hot": self.multi_hot is not None,
        }
        unfit = [name for name, used in rules.items() if used]
        if unfit:
            raise InputError(f"preset {self.name}: {' and '.join(unfit)} need a log of hexadecimal tokens, such as Criteo's")

    def inputs(self, schema: Schema) -> Schema:
        """The columns that are counted and that the model gets."""
        return self.derivation.inputs(schema)


def make_preprocessor(preset: Preset, schema: Schema, counts: Counts) -> Preprocessor:
    """Turns counts of a log of `schema` into a Preprocessor. It depends on the rows counted alone, not on how they were
    divided among tasks. Raises InputError for a log that the preset does not fit."""
    preset.check(schema)
    inputs = preset.inputs(schema)
    if preset.num_embeddings is not None and len(preset.num_embeddings) != len(inputs.sparse):
        raise InputError(f"preset.num_embeddings: {len(preset.num_embeddings)} tables for {len(inputs.sparse)} sparse columns")
    sparse: list[SparseColumn] = []
    kept: list[np.ndarray] = []
    ends: dict[str, list[int]] = {}
    for number, (name, owner) in enumerate(zip(inputs.sparse, inputs.vocabulary_owners, strict=True)):
        if owner != number:
            sparse.append(sparse[owner])
            if inputs.sparse[owner] in ends:
                ends[name] = ends[inputs.sparse[owner]]
            continue
        column, known = _sparse_column(preset, counts, number)
        sparse.append(column)
        kept.append(known.tokens)
        if known.amounts is not None and column.has_own_ids:
            ends[name] = frequency_ends(known.amounts)
    return Preprocessor(
        preset=preset.name,
        schema=schema,
        dense=tuple(_dense_column(preset, moments) for moments in counts.dense_moments.tolist()),
        sparse=tuple(sparse),
        tokens=np.concatenate(kept) if kept else np.zeros(0, np.uint32),
        integer_buckets=preset.dense == "buckets",
        file_minimum=_file_minimum(counts) if preset.dense_from_file_minimum else None,
        multi_hot=preset.multi_hot,
        constants={"rules": preset.to_dict(), "rows": counts.rows, ENDS: ends},
    )


def _file_minimum(counts: Counts) -> dict[str, int]:
    return {"": min(counts.file_minimum.values(), default=0), **dict(sorted(counts.file_minimum.items()))}


def _dense_column(preset: Preset, moments: list[int]) -> DenseColumn:
    """`moments`: present values, sum, and upper and lower part of the sum of squares, of sign(x) ln(1 + |x|)."""
    assert preset.dense != "buckets"
    lowest = LOWEST_INTEGER if preset.dense_lowest is None else preset.dense_lowest
    mean, scale = 0.0, 1.0
    if preset.dense_standardized and moments[0]:
        mean, variance = mean_and_variance(moments)
        scale = 1.0 / math.sqrt(variance) if variance > 1e-12 else 1.0
    plain = DenseColumn(preset.dense, preset.dense_shift, lowest, mean, scale)
    missing_value = float(plain.apply(np.zeros(1))[0])
    if not math.isfinite(missing_value):
        raise InputError(
            f"preset {preset.name}: a missing number counts as 0 and its logarithm is {missing_value}; raise dense_shift"
        )
    return DenseColumn(**{**vars(plain), "missing_value": missing_value})


@dataclass(frozen=True)
class KnownTokens:
    """A column's tokens that were counted often enough, in the order of their ids."""

    tokens: np.ndarray
    gap: int | None = None
    """How many of them come before the empty field, where that is a category too."""
    amounts: np.ndarray | None = None
    """Rows of each; None where they do not fall."""


def known_tokens(preset: Preset, counts: Counts, number: int) -> KnownTokens:
    """The vocabulary of sparse column `number` of the model's inputs."""
    # An empty field may make token 0 frequent that is not without it.
    always = 0 if preset.missing == "zero" else None
    tokens, amounts, first_rows = counts.kept(number, preset.min_count, always=always)
    missing_count, missing_row = (int(value) for value in counts.missing[number])
    if preset.missing == "zero" and missing_count:
        tokens, amounts, first_rows = merged(
            np.append(tokens, tokens.dtype.type(0)),
            np.append(amounts, missing_count),
            None if first_rows is None else np.append(first_rows, missing_row),
        )
    frequent = amounts >= preset.min_count
    tokens, amounts = tokens[frequent], amounts[frequent]
    if first_rows is not None:
        first_rows = first_rows[frequent]
        order = np.argsort(first_rows, kind="stable")
    else:
        order = np.lexsort((tokens, -amounts))
    gap = None
    if preset.missing == "token" and missing_count >= preset.min_count:
        # By frequency, it comes before tokens that are as frequent.
        keys, key = (-amounts, -missing_count) if first_rows is None else (first_rows, missing_row)
        gap = int(np.searchsorted(keys[order], key))
    return KnownTokens(tokens[order], gap, amounts[order] if first_rows is None else None)


def _sparse_column(preset: Preset, counts: Counts, number: int) -> tuple[SparseColumn, KnownTokens]:
    """The column's rule, and its vocabulary (empty where it is hashed)."""
    fixed = preset.num_embeddings[number] if preset.num_embeddings else None
    if preset.ids == "murmur3":
        assert fixed is not None
        missing_id = int(murmur3(np.zeros(1, np.uint32))[0]) % fixed
        column = SparseColumn(fixed, None, first_id=0, unknown_id=0, missing_id=missing_id, murmur3=True)
        return column, KnownTokens(np.zeros(0, np.uint32))
    known = known_tokens(preset, counts, number)
    first_id, limit = preset.first_id, fixed or preset.max_num_embeddings
    gap = None if known.gap is None else first_id + known.gap
    num_ids = first_id + len(known.tokens) + (gap is not None)
    num_embeddings = num_ids + (preset.unknown_id is None)
    unknown_id = num_ids if preset.unknown_id is None else preset.unknown_id
    missing_id = _missing_id(preset, known, unknown_id)
    if fixed is None and (limit is None or num_embeddings <= limit):
        column = SparseColumn(num_embeddings, len(known.tokens), first_id, unknown_id, missing_id, gap, preset.token_modulo)
        return column, known
    assert limit is not None
    if fixed is None and preset.beyond_limit == "hash":
        missing_id = missing_id if isinstance(preset.missing, int) else first_id  # that of token 0
        wide = known.tokens.dtype == np.uint64  # tokens that may be numbers with a pattern; Criteo's are hashes
        column = SparseColumn(limit, None, first_id, unknown_id % limit, missing_id, mixed=wide)
        return column, KnownTokens(known.tokens[:0])
    column = SparseColumn(limit, len(known.tokens), first_id, unknown_id % limit, missing_id % limit, gap, preset.token_modulo)
    return column, known


def _missing_id(preset: Preset, known: KnownTokens, unknown_id: int) -> int:
    if isinstance(preset.missing, int):
        return preset.missing
    if preset.missing == "token" and known.gap is not None:
        return preset.first_id + known.gap
    if preset.missing == "zero" and len(zero := np.flatnonzero(known.tokens == 0)):
        return preset.first_id + int(zero[0])
    return unknown_id


def merged(
    tokens: np.ndarray, amounts: np.ndarray, first_rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Adds up what came under one token several times; tokens in rising order."""
    if not len(tokens):
        return tokens, amounts, first_rows
    order = np.argsort(tokens, kind="stable")
    tokens = tokens[order]
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
    return (
        tokens[starts],
        np.add.reduceat(amounts[order], starts),
        None if first_rows is None else np.minimum.reduceat(first_rows[order], starts),
    )


RAYREC = Preset()
"""Our own default: nothing is lost below zero, ids depend on no order of rows, unseen and missing are told apart."""

MLPERF_V1 = Preset(
    name="mlperf-v1",
    dense="log",
    dense_lowest=0,
    dense_standardized=False,
    ids="first_seen",
    first_id=0,
    unknown_id=None,
    missing="zero",
    min_count=1,
    counted="all",
    split=Split(test_first=True),
)
"""dlrm's data_utils.py: ln(max(x, 0) + 1), dictionaries in order of first appearance over all rows, held-out ones too, ids
from 0. `token_modulo` is its --max-ind-range. It has no id for unseen categories, since its dictionary holds the test's
too; here each table has one more row for them."""

TORCHREC = Preset(
    name="torchrec",
    dense="log",
    dense_shift=2.0,
    dense_from_file_minimum=True,
    dense_standardized=False,
    ids="first_seen",
    unknown_id=1,
    missing="zero",
    min_count=3,
    beyond_limit="modulo",
    counted="all",
)
"""torchrec.datasets.criteo since June 2025: ln(x - m + 2), m the least integer of the file, missing ones being 0; contiguous
ids from 2 in order of first appearance over all files, rarer ones 1, then modulo the table's size."""

TORCHREC_2024 = TORCHREC.replace(name="torchrec-2024", dense_shift=3.0, dense_from_file_minimum=False)
"""torchrec.datasets.criteo before: ln(x + 3), which is -inf at -3 (Kaggle holds such values) and not a number below."""

RAY_TEMPLATE = Preset(
    name="ray-template",
    dense="log",
    dense_shift=3.0,
    dense_standardized=False,
    unknown_id=1,
    missing="token",
    min_count=3,
    counted="train",
)
"""The Ray Train and Ray Data template: ln(x + 3); categories counted 3 times or more get ids from 2 in the order of its files
of value counts, here by falling count (those files are not published); others 1; the empty field counts as a category."""

NVT = Preset(
    name="nvt",
    dense="log",
    dense_shift=3.0,
    dense_standardized=False,
    ids="murmur3",
    first_id=0,
    unknown_id=None,
    missing="zero",
    min_count=1,
    num_embeddings=MLPERF_NUM_EMBEDDINGS,
    counted="all",
)
"""TorchRec's NVTabular scripts from August 2022 to May 2023: ln(x + 3), and cuDF's murmur3 hash of the category modulo the
table's rows. The hash is that of the GPU library as documented; it was not run on a GPU."""

FUXICTR_X4 = Preset(
    name="fuxictr-x4",
    dense="buckets",
    first_id=1,
    unknown_id=None,
    missing="unknown",
    min_count=10,
    split=Split(kind="named_files"),
)
"""FuxiCTR 2.1 to 2.3.6 on Criteo_x4: integers become categories, 0 and the empty field none; id 0 is padding and never
produced, ids from 1 by falling count, then category; rarer ones and empty fields share the last row. The published split
comes as files train, valid and test."""

FUXICTR_X1 = Preset(
    name="fuxictr-x1",
    dense="identity",
    dense_standardized=False,
    first_id=1,
    unknown_id=None,
    missing="zero",
    min_count=1,
    split=Split(kind="named_files"),
)
"""FuxiCTR 2.1 to 2.3.6 on Criteo_x1, whose published files hold numbers scaled already and categories numbered already (the
code that made them is not published): numbers as they are, ids from 1 by falling count, then category."""

ALL: dict[str, Preset] = {
    preset.name: preset for preset in (RAYREC, MLPERF_V1, TORCHREC, TORCHREC_2024, RAY_TEMPLATE, NVT, FUXICTR_X1, FUXICTR_X4)
}
"""Every preset by its name."""


def by_name(name: str) -> Preset:
    """Raises InputError for a name that is none, with the nearest one."""
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=1)
        raise InputError(f"no preset '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"there are {', '.join(ALL)}"))
    return ALL[name]
