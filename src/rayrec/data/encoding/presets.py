"""Presets: rules for missing values, integers and categories that follow published pipelines."""

import math
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from rayrec.config import Config, InputError, packaged_json, suggest
from rayrec.data.encoding.counts import CountingJob, Counts, mean_and_variance
from rayrec.data.encoding.encoder import Derivation, MultiHot
from rayrec.data.encoding.known_categories import ENDS, FREQUENCIES, frequency_ends, frequency_runs
from rayrec.data.encoding.moments import Moments
from rayrec.data.encoding.number_sample import QUANTILES
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import MIN_INTEGER, DenseColumn, SparseColumn
from rayrec.data.logs.splits import Split
from rayrec.data.raw_block import category_type
from rayrec.hashing import murmur3
from rayrec.schema import Schema

_STORED = packaged_json(__package__, "presets.json")
TERABYTE_CATEGORIES: Final[tuple[int, ...]] = tuple(_STORED["terabyte_categories"])
"""Number of distinct categories in the 26 columns of Criteo 1TB."""
MLPERF_NUM_EMBEDDINGS = tuple(min(rows, 40_000_000) for rows in TERABYTE_CATEGORIES)
"""Rows of the 26 tables in MLPerf's benchmarks on Criteo 1TB."""


MAX_INPUT: Final = 8.0
"""Maximum absolute input of a number in standard deviations, for logs other than Criteo's."""
_MARGIN: Final = 1e-6
"""Distance between a bound and the inputs of counted rows, at least the spacing of float32 numbers
there. An input equal to a bound is thus beyond it, and can be counted without the number itself.
"""


@dataclass(frozen=True, kw_only=True)
class Preset(Config):
    """Rules that convert raw columns to model inputs. A missing number counts as 0, as in all
    Criteo pipelines. In other logs, it is 0 after the numbers are standardized, their mean.
    """

    name: str = "rayrec"
    """Name of the pipeline."""
    dense: Literal["signed_log", "log", "identity", "buckets", "by_skew"] = "signed_log"
    """Transform of numbers: sign(x) ln(1 + |x|), ln(x + shift), x, or categories floor(ln(x)^2) for
    x > 2, else x, 0 missing. by_skew: x, and signed_log for a column whose middle 98 % of values
    spread over more than 5 times its middle half; signed_log in Criteo's logs.
    """
    dense_shift: float = 1.0
    """Shift before the logarithm ("log")."""
    dense_lowest: int | None = None
    """Lower bound applied before the transform ("log" and "identity"). None: no bound."""
    dense_from_file_minimum: bool = False
    """Whether to subtract the minimum of all dense columns in the file."""
    dense_standardized: bool = True
    """Whether to subtract the mean and divide by the standard deviation of the counted rows after
    the transform.
    """
    ids: Literal["frequency", "first_seen", "murmur3"] = "frequency"
    """Order of ids. frequency: by falling count, then rising token. first_seen: by the first row
    with the category in the log. murmur3: no vocabulary, a hash of the category modulo the table's
    rows (needs num_embeddings).
    """
    first_id: int = 2
    """Id of the first category."""
    unknown_id: int | None = 0
    """Id of categories that are new or too rare. None: an additional row at the end of the
    table.
    """
    missing: int | Literal["token", "zero", "unknown"] = 1
    """Id of an empty field. token: a counted category; zero: the category 00000000; unknown: like a
    new category.
    """
    min_count: int = 2
    """Minimum count of a category. Rarer ones get unknown_id."""
    token_modulo: int | None = None
    """Modulo applied to category numbers before they are distinguished. None: no modulo."""
    num_embeddings: tuple[int, ...] | None = None
    """Fixed rows of each table; ids are taken modulo these. None: one row per id."""
    max_num_embeddings: int | None = None
    """Maximum rows of a table. None: no limit."""
    beyond_limit: Literal["hash", "modulo"] = "hash"
    """Handling of columns above max_num_embeddings. hash: no vocabulary, id = first_id + token
    modulo the rest (64-bit tokens are mixed first); modulo: ids modulo the limit.
    """
    counted: Literal["train", "all"] = "train"
    """Rows used for vocabulary and constants. all: includes held-out rows, like the published
    pipeline.
    """
    multi_hot: MultiHot | None = None
    """Expansion of every id to a bag. None: no expansion."""
    split: Split = field(default_factory=Split)
    """Training, validation and test rows if no evaluation log is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_count < 1:
            raise InputError(f"min_count: must be at least 1, got {self.min_count}")
        if self.max_num_embeddings is not None and self.max_num_embeddings <= self.first_id:
            raise InputError(
                f"max_num_embeddings: must be above {self.first_id}, got {self.max_num_embeddings}"
            )
        if self.dense_lowest is not None and abs(self.dense_lowest) > -MIN_INTEGER:
            raise InputError(
                f"dense_lowest: must be between -2^62 and 2^62, got {self.dense_lowest}"
            )
        if self.token_modulo is not None and not 1 <= self.token_modulo < 2**32:
            raise InputError(
                f"token_modulo: must be between 1 and 2^32 - 1, got {self.token_modulo}"
            )
        if self.ids == "murmur3" and self.num_embeddings is None:
            raise InputError("preset: ids murmur3 need num_embeddings, the rows of each table")
        reserved = {self.unknown_id, self.missing if isinstance(self.missing, int) else None} - {
            None
        }
        if self.first_id < 0 or any(
            not 0 <= name < self.first_id for name in reserved if name is not None
        ):
            raise InputError(
                f"preset: unknown_id and missing must be below first_id {self.first_id}"
            )

    @property
    def derivation(self) -> Derivation:
        """Derivation applied to raw rows before counting."""
        return Derivation(buckets=self.dense == "buckets", modulo=self.token_modulo)

    def counting(self, schema: Schema) -> CountingJob:
        """Return the counting job for a log of `schema`."""
        return CountingJob(
            schema,
            derivation=self.derivation,
            first_rows=self.ids == "first_seen",
            transform=self._counted_transform(schema),
            samples=self._samples(schema),
        )

    def _samples(self, schema: Schema) -> bool:
        """Return whether quantiles of numbers are needed."""
        return self.dense == "by_skew" and self.standardizes(schema)

    def standardizes(self, schema: Schema) -> bool:
        """Return whether missing numbers of a log are 0 after they are standardized, and inputs are
        bounded. Published pipelines and Criteo's logs have no such rules, and keep theirs.
        """
        return schema.tokens == "any" and self.dense_standardized and self.dense != "buckets"

    def _transform(self) -> DenseColumn:
        """Return the transform of numbers, before they are standardized."""
        assert self.dense != "buckets"
        lowest = MIN_INTEGER if self.dense_lowest is None else self.dense_lowest
        kind = "signed_log" if self.dense == "by_skew" else self.dense
        return DenseColumn(kind, self.dense_shift, lowest)

    def _counted_transform(self, schema: Schema) -> DenseColumn | None:
        """Return the transform for exact moments. None: those of integers in fixed point, which
        Criteo's Preprocessors have, and which others without standardized numbers do not use.
        """
        if self.dense == "buckets" or not self.dense_standardized:
            return None
        if schema.tokens == "hexadecimal" and self.dense in ("signed_log", "by_skew"):
            return None
        return self._transform()

    def check(self, schema: Schema) -> None:
        """Check that the rules can be applied to a log of `schema`. Raises InputError."""
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
            raise InputError(
                f"preset {self.name}: {' and '.join(unfit)} need a log of hexadecimal tokens, "
                "such as Criteo's"
            )

    def inputs(self, schema: Schema) -> Schema:
        """Return the columns that are counted and passed to the model."""
        return self.derivation.inputs(schema)


def make_preprocessor(preset: Preset, schema: Schema, counts: Counts) -> Preprocessor:
    """Build a Preprocessor from counts, independent of their division into tasks. Raises InputError
    if the log does not fit.
    """
    preset.check(schema)
    inputs = preset.inputs(schema)
    if preset.num_embeddings is not None and len(preset.num_embeddings) != len(inputs.sparse):
        raise InputError(
            f"preset.num_embeddings: {len(preset.num_embeddings)} tables for {len(inputs.sparse)} "
            "sparse columns"
        )
    sparse: list[SparseColumn] = []
    vocabularies: list[np.ndarray] = []
    amounts: dict[str, np.ndarray] = {}
    for number, (name, owner) in enumerate(
        zip(inputs.sparse, inputs.vocabulary_owners, strict=True)
    ):
        if owner != number:
            sparse.append(sparse[owner])
            if inputs.sparse[owner] in amounts:
                amounts[name] = amounts[inputs.sparse[owner]]
            continue
        column, vocabulary = _sparse_column(preset, counts, number)
        sparse.append(column)
        vocabularies.append(vocabulary.tokens)
        if vocabulary.amounts is not None and column.has_unique_ids:
            amounts[name] = vocabulary.amounts
    minimums = dict(sorted(counts.file_minimum.items()))
    return Preprocessor(
        preset=preset.name,
        schema=schema.replace(sample=None),
        dense=tuple(
            _dense_column(preset, schema, counts, number) for number in range(len(inputs.dense))
        ),
        sparse=tuple(sparse),
        tokens=np.concatenate(vocabularies) if vocabularies else np.zeros(0, category_type(schema)),
        integer_buckets=preset.dense == "buckets",
        file_minimum={"": min(minimums.values(), default=0), **minimums}
        if preset.dense_from_file_minimum
        else None,
        multi_hot=preset.multi_hot,
        constants={
            "rules": preset.to_dict(),
            "rows": counts.rows,
            ENDS: {name: frequency_ends(column) for name, column in amounts.items()},
            **_frequencies(schema, amounts),
            **_quantiles(schema, counts),
        },
    )


def _frequencies(
    schema: Schema,
    amounts: dict[str, np.ndarray],
) -> dict[str, dict[str, list[list[int]]]]:
    """Return the constant with the frequencies of categories. Only retrieval models read it, which
    train on logs without labels.
    """
    if schema.label is not None or schema.labels:
        return {}
    return {FREQUENCIES: {name: frequency_runs(column) for name, column in amounts.items()}}


def _quantiles(schema: Schema, counts: Counts) -> dict[str, dict[str, list[float]]]:
    """Return the constant with the quantiles of the numbers. Empty without a sample."""
    if counts.sample is None:
        return {}
    quantiles = {}
    for number, name in enumerate(schema.dense):
        values = counts.sample.quantiles(number)
        if values:
            quantiles[name] = values
    return {QUANTILES: quantiles}


# Rules of numbers, by log and preset:
#
#   Criteo's log             fixed-point moments of signed logarithms; a missing number is 0 before
#   other, standardized      exact moments; a missing number is the mean, with an indicator; bounds
#   other, by_skew           as above, and each column has the kind that its quantiles decide
#   not standardized         the transform alone
def _dense_column(preset: Preset, schema: Schema, counts: Counts, number: int) -> DenseColumn:
    """Return the rule of a dense column."""
    plain = preset._transform()
    if preset.dense_standardized and counts.transform is not None:
        moments = counts.exact_moments[number]
        if counts.sample is not None and not counts.sample.is_skewed(number):
            plain = replace(plain, kind="identity")
            moments = counts.plain_moments[number]
        standardized = _standardized(plain, moments, schema.dense[number])
        if preset.standardizes(schema):
            return _bounded(standardized, moments, counts.rows)
        plain = standardized
    elif preset.dense_standardized and counts.present[number]:
        mean, variance = mean_and_variance(counts.dense_moments[number].tolist())
        scale = 1.0 / math.sqrt(variance) if variance > 1e-12 else 1.0
        plain = replace(plain, mean=mean, scale=scale)
    missing_value = float(plain.apply(np.zeros(1))[0])
    if not math.isfinite(missing_value):
        raise InputError(
            f"preset {preset.name}: a missing number counts as 0, with logarithm {missing_value}; "
            "raise dense_shift"
        )
    return replace(plain, missing_value=missing_value)


def _standardized(plain: DenseColumn, moments: Moments, name: str) -> DenseColumn:
    """Return the rule with the mean and the scale of the counted values. A constant column has
    scale 1, so its input is 0.
    """
    if moments.not_finite:
        raise InputError(
            f"column {name}: {moments.not_finite:,} numbers have no logarithm after dense_shift "
            f"{plain.shift:g}. Raise it, or set dense_lowest or another transform."
        )
    mean, mean_low = moments.mean()
    deviation = moments.deviation()
    scale = 1.0 / deviation if deviation else 1.0
    if not math.isfinite(scale):
        scale = 1.0
    return replace(plain, mean=mean, mean_low=mean_low, scale=scale)


def _bounded(standardized: DenseColumn, moments: Moments, rows: int) -> DenseColumn:
    """Return the rule of another log's column: a missing number is 0, the mean, with an indicator
    if the counted rows had gaps, and inputs have bounds. They are those of the counted rows: no
    weight has learned about numbers beyond, such as the times of later weeks. They are at most
    MAX_INPUT, for outliers among the counted rows themselves.
    """
    lowest = -MAX_INPUT
    highest = MAX_INPUT
    if moments.present:
        limits = np.array([moments.lowest, moments.highest])
        inputs = (limits - standardized.mean - standardized.mean_low) * standardized.scale
        lowest, highest = inputs.tolist()
    elif rows:  # All values are missing: nothing is known of others
        lowest = highest = 0.0
    return replace(
        standardized,
        missing_value=0.0,
        lower=float(np.float32(max(-MAX_INPUT, lowest - _MARGIN))),
        upper=float(np.float32(min(MAX_INPUT, highest + _MARGIN))),
        indicator=0 < moments.present < rows,
    )


@dataclass(frozen=True)
class VocabularyColumn:
    """Tokens of a column with sufficient counts, in id order."""

    tokens: np.ndarray
    gap: int | None = None
    """Number of tokens before the empty field, if that is a category. None if not."""
    amounts: np.ndarray | None = None
    """Row count of each token. None if the order is not by falling count."""


def build_vocabulary(preset: Preset, counts: Counts, number: int) -> VocabularyColumn:
    """Return the vocabulary of sparse column `number` of the model's inputs."""
    # Empty fields may raise the count of token 0 above the minimum.
    always = 0 if preset.missing == "zero" else None
    tokens, amounts, first_rows = counts.frequent_tokens(number, preset.min_count, always=always)
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
        # Ties by token, so that the order does not depend on tasks.
        order = np.lexsort((tokens, -amounts))
    gap = None
    if preset.missing == "token" and missing_count >= preset.min_count:
        # By frequency, it precedes tokens of equal count.
        keys, key = (-amounts, -missing_count) if first_rows is None else (first_rows, missing_row)
        gap = int(np.searchsorted(keys[order], key))
    return VocabularyColumn(tokens[order], gap, amounts[order] if first_rows is None else None)


# Rows of a table, by id. Where two numbers fall together, the categories share a row:
#
#   0 ... first_id - 1     unknown and missing ids, if the preset has them
#   first_id ...           tokens in vocabulary order; `gap` is the empty field among them
#   last                   unknown_id, if it is None in the preset
#
#   table size             rule
#   as many as ids         each token has a row
#   fixed, or the limit    ids modulo the size
#   beyond, "hash"         no vocabulary: token modulo the rest of the table
def _sparse_column(
    preset: Preset,
    counts: Counts,
    number: int,
) -> tuple[SparseColumn, VocabularyColumn]:
    """Return the column's rule, and its vocabulary (empty if hashed)."""
    fixed = preset.num_embeddings[number] if preset.num_embeddings else None
    if preset.ids == "murmur3":
        assert fixed is not None
        missing_id = int(murmur3(np.zeros(1, np.uint32))[0]) % fixed
        column = SparseColumn(
            fixed,
            None,
            first_id=0,
            unknown_id=0,
            missing_id=missing_id,
            murmur3=True,
        )
        return column, VocabularyColumn(np.zeros(0, np.uint32))
    vocabulary = build_vocabulary(preset, counts, number)
    first_id = preset.first_id
    limit = fixed or preset.max_num_embeddings
    gap = None if vocabulary.gap is None else first_id + vocabulary.gap
    num_ids = first_id + len(vocabulary.tokens) + (gap is not None)
    num_embeddings = num_ids + (preset.unknown_id is None)
    unknown_id = num_ids if preset.unknown_id is None else preset.unknown_id
    missing_id = _missing_id(preset, vocabulary, unknown_id)
    if fixed is None and (limit is None or num_embeddings <= limit):
        column = SparseColumn(
            num_embeddings,
            len(vocabulary.tokens),
            first_id,
            unknown_id,
            missing_id,
            gap,
            preset.token_modulo,
        )
        return column, vocabulary
    assert limit is not None
    if fixed is None and preset.beyond_limit == "hash":
        # The id of token 0
        missing_id = missing_id if isinstance(preset.missing, int) else first_id
        # Tokens may be regular numbers; Criteo's are hashes
        wide = vocabulary.tokens.dtype == np.uint64
        column = SparseColumn(limit, None, first_id, unknown_id % limit, missing_id, mixed=wide)
        return column, VocabularyColumn(vocabulary.tokens[:0])
    column = SparseColumn(
        limit,
        len(vocabulary.tokens),
        first_id,
        unknown_id % limit,
        missing_id % limit,
        gap,
        preset.token_modulo,
    )
    return column, vocabulary


def _missing_id(preset: Preset, vocabulary: VocabularyColumn, unknown_id: int) -> int:
    if isinstance(preset.missing, int):
        return preset.missing
    if preset.missing == "token" and vocabulary.gap is not None:
        return preset.first_id + vocabulary.gap
    if preset.missing == "zero" and len(zero := np.flatnonzero(vocabulary.tokens == 0)):
        return preset.first_id + int(zero[0])
    return unknown_id


def merged(
    tokens: np.ndarray,
    amounts: np.ndarray,
    first_rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Sum the counts of equal tokens, and sort the tokens."""
    if not len(tokens):
        return tokens, amounts, first_rows
    order = np.argsort(tokens, kind="stable")
    tokens = tokens[order]
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
    first_rows = None if first_rows is None else np.minimum.reduceat(first_rows[order], starts)
    return tokens[starts], np.add.reduceat(amounts[order], starts), first_rows


ALL: dict[str, Preset] = {
    name: Preset(name=name).updated(
        {field: value for field, value in rules.items() if field != "about"}
    )
    for name, rules in _STORED["presets"].items()
}
"""All presets by name. presets.json also tells which program each follows (`about`)."""
RAYREC, MLPERF_V1, TORCHREC, TORCHREC_2024 = (
    ALL[name] for name in ("rayrec", "mlperf-v1", "torchrec", "torchrec-2024")
)
RAY_TEMPLATE, NVT, FUXICTR_X1, FUXICTR_X4 = (
    ALL[name] for name in ("ray-template", "nvt", "fuxictr-x1", "fuxictr-x4")
)


def by_name(name: str) -> Preset:
    """Return the preset with this name. Raises InputError for an unknown name, with the nearest
    one.
    """
    if name not in ALL:
        hint = suggest(name, ALL, otherwise=f"choose from {', '.join(ALL)}")
        raise InputError(f"preset '{name}' not found; {hint}")
    return ALL[name]
