"""Base configuration and interface of click models, for training, scoring, export, serving and
planning. Imports no torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt, Lt

from rayrec import models
from rayrec.bounds import Count, Share, Sizes, SomeSizes
from rayrec.config import CLASS, Config, InputError, same_class

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rayrec.layers.mlp import Precision, TowerSettings
    from rayrec.models.heads import Head
    from rayrec.schema import Label, Schema


@dataclass(frozen=True)
class CandidateRows:
    """Table rows of a feature's known categories, which are its candidates. The other rows are
    reserved: for unknown and missing values.
    """

    first: int = 0
    stop: int | None = None
    """End of the range [first, stop). None: the end of the table."""
    gap: int | None = None
    """Row within the range that is reserved for missing values. None: no such row."""
    missing: int | None = None
    """Reserved row of missing values. None if unknown values share it, or a category."""

    @property
    def count(self) -> int | None:
        """Number of known categories. None if it depends on the table."""
        return None if self.stop is None else self.stop - self.first - (self.gap is not None)

    def contains(self, ids: Any) -> Any:
        """Return whether each id is a known category, bool [ids]. Takes and returns tensors or
        arrays.
        """
        inside = ids >= self.first
        if self.stop is not None:
            inside = inside & (ids < self.stop)
        return inside if self.gap is None else inside & (ids != self.gap)

    def numbers(self, ids: Any) -> Any:
        """Return the candidate number of each id, -1 for reserved rows, int64 [ids]. Takes and
        returns tensors or arrays.
        """
        numbers = ids - self.first
        if self.gap is not None:
            numbers = numbers - 1 * (ids > self.gap)
        return (numbers + 1) * self.contains(ids) - 1

    def ids(self, numbers: Any) -> Any:
        """Return the id of each candidate number, in the numbers' dtype [numbers]. Takes and
        returns tensors or arrays.
        """
        ids = numbers + self.first
        return ids if self.gap is None else ids + (ids >= self.gap)

    def of_table(self, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of the candidates, [candidates, width]. Copies only a table with a
        gap.
        """
        if self.gap is None:
            return table[self.first : self.stop]
        import torch

        return torch.cat([table[self.first : self.gap], table[self.gap + 1 : self.stop]])


@dataclass(frozen=True)
class ModelInputs:
    """Inputs and outputs of a click model."""

    num_dense: int
    """Number of dense features."""
    features: tuple[str, ...]
    """Names of the categorical features, each of which has a table."""
    label: str = "label"
    """Name of the predicted label, or of the main one if there are several."""
    more_labels: tuple[Label, ...] = ()
    """Other labels, if the model predicts several (`ClickModelConfig.SEVERAL_LABELS`)."""
    vocabularies: tuple[str, ...] = ()
    """Vocabulary of each feature, which determines its table. If empty, each feature has a separate
    one with its name.
    """
    weighted: bool = False
    """Whether ids have weights that multiply their embeddings before the sum."""
    lists: tuple[tuple[str, int | None], ...] = ()
    """Features with any number of ids per row, each with its maximum per row. None is unlimited."""
    aligned: tuple[tuple[str, str], ...] = ()
    """Features of `lists` with the feature they are aligned with (`Feature.aligned_with`): equally
    many ids in each row.
    """
    aged: tuple[str, ...] = ()
    """Features of `lists` with times (`Feature.ages`)."""
    label_kind: str = "binary"
    """Kind of the main label (`rayrec.schema.Label.kind`)."""
    candidates: tuple[tuple[str, CandidateRows], ...] = ()
    """Table rows of known categories, by feature. Features without an entry have no reserved
    rows.
    """
    bin_ends: tuple[tuple[float, ...], ...] = ()
    """Rising quantiles of each dense feature over the training rows. Empty if unknown."""
    frequencies: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    """Occurrences of the candidates in the training rows, by feature, as runs: (occurrences, number
    of candidates). Features without an entry have unknown ones.
    """

    @classmethod
    def from_schema(cls, schema: Schema, **fields: Any) -> ModelInputs:
        """Return the inputs for a schema of the model's columns (`Preprocessor.inputs`). `fields`
        are those that depend on the log: `candidates`, `bin_ends`, `frequencies`.
        """
        has_main = schema.label is None and schema.labels
        return cls(
            len(schema.dense),
            schema.sparse,
            schema.labels[0].name if has_main else schema.label or "label",
            schema.labels[1:] if has_main else schema.labels,
            schema.vocabularies,
            bool(schema.list_weights),
            tuple((name, schema.feature(name).max_length) for name in schema.lists),
            tuple(
                (feature.name, feature.aligned_with)
                for feature in schema.features
                if feature.aligned_with
            ),
            schema.aged,
            schema.labels[0].kind if has_main else "binary",
            **fields,
        )

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, the main one first."""
        return (self.label, *(label.name for label in self.more_labels))

    def candidates_of(self, feature: str) -> CandidateRows:
        """Return the table rows of a feature's known categories."""
        return dict(self.candidates).get(feature, CandidateRows())

    def frequencies_of(self, feature: str) -> torch.Tensor | None:
        """Return the share of each candidate in all occurrences of candidates, float32
        [candidates], on the CPU. None if unknown.
        """
        runs = dict(self.frequencies).get(feature)
        if not runs:
            return None
        import torch

        with torch.device("cpu"):
            amounts, repeats = torch.tensor(runs).unbind(1)
            counts = amounts.repeat_interleave(repeats).double()
            return (counts / counts.sum()).float()

    @property
    def table_of(self) -> dict[str, str]:
        """Table name of each feature. Features with the same vocabulary share a table."""
        return dict(zip(self.features, self.vocabularies or self.features, strict=True))


# What a click model declares, and what follows from it:
#
#   sequences      features whose embeddings are not summed: one vector per id
#   full_tables    features whose table the network reads
#   output_heads   labels, or vectors and items; decide metrics, columns and answers
#   width          values of an embedding, such as a weight behind the vector
#   build          the network: forward(dense, embedded) -> outputs by name
@dataclass(frozen=True, kw_only=True)
class ClickModelConfig(Config):
    """Base configuration of click models. A model is a subclass, in a file of
    `rayrec.models.ranking` or in user code.
    """

    TRAINS_ON_TABLES: ClassVar[bool] = True
    """Whether `full_tables` are read in training too, instead of only in evaluations."""
    SEVERAL_LABELS: ClassVar[bool] = False
    """Whether the network predicts each of `ModelInputs.label_names`; else only the main label."""
    LABELLED: ClassVar[bool] = True
    """Whether the loss needs a label. If False, the log may have no labels, and the network must
    define a loss.
    """
    BOOSTED: ClassVar[bool] = False
    """Whether boosting rounds train the network (`rayrec.workloads.recsys.boosting`), instead of
    gradients.
    """

    embedding_dim: Count = 16
    """Width of every embedding."""
    embedding_penalty: float = 0.0
    """L2 penalty on the embeddings of each trained example: half this value times the squared norm
    of the embeddings that the network receives is added to its loss. A summed list counts as its
    sum. Regularizes rare categories.
    """
    members: Count = 1
    """Number of networks in an ensemble, trained in parallel with separate embeddings, whose logits
    are averaged. Time, table size and memory grow in proportion.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members > 1 and not self.LABELLED:
            raise InputError(
                f"{type(self).__name__}.members: must be 1 without logits to average, got "
                f"{self.members}. Set it."
            )

    @classmethod
    def _custom_class(cls) -> str | None:
        return f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str) -> ClickModelConfig:
        """Build one model of a list. `class` is the name of a rayrec model, or an imported class of
        user code.
        """
        name = values.get(CLASS)
        if name is None:
            raise InputError(
                f"{where}{CLASS}: must name a model, got none. rayrec's are "
                f"{', '.join(models.names())}."
            )
        model_class = models.config_class(name) or cls._imported_class(str(name))
        if model_class is None:
            raise InputError(
                f"{where}{CLASS}: model {name} not found. rayrec's are {', '.join(models.names())}."
            )
        return model_class().updated(values, where=where)

    def with_class(self, name: object) -> ClickModelConfig | None:
        """Return the defaults of rayrec's model, or of an imported user class. The same class keeps
        its settings.
        """
        cls = models.config_class(name) or ClickModelConfig._imported_class(str(name))
        if cls is None:
            return None
        return self if cls is type(self) else cls.replacing(self)

    @classmethod
    def _imported_class(cls, name: str) -> type[ClickModelConfig] | None:
        """Return the subclass in user code with a stored `class`. Imports nothing."""
        classes: list[type[ClickModelConfig]] = [cls]
        for parent in classes:
            classes += parent.__subclasses__()
        paths = {
            str(each._custom_class()): each
            for each in classes
            if each.__module__.partition(".")[0] != "rayrec"
        }
        matches = {path: each for path, each in paths.items() if same_class(name, path)}
        return matches.get(name) or (next(iter(matches.values())) if len(matches) == 1 else None)

    def _allowed_classes(self) -> str:
        return f"{super()._allowed_classes()}; rayrec's models are {', '.join(models.names())}"

    @classmethod
    def replacing(cls, other: ClickModelConfig) -> Self:
        """Return the defaults of this class with the embedding settings of the model that it
        replaces in a recipe.
        """
        return cls().replace(**other.embedding_settings())

    def embedding_settings(self) -> dict[str, Any]:
        """Return the settings that all click models share."""
        return {field.name: getattr(self, field.name) for field in fields(ClickModelConfig)}

    def needs_categories(self) -> bool:
        """Return whether the network needs a categorical feature. False: numbers alone are enough,
        without any table.
        """
        return True

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the features whose embeddings the network takes unpooled
        (`KeyedEmbeddings.sequences`). Default: none. Pure. Raises InputError for inputs that the
        model does not support.
        """
        return ()

    @property
    def reads_ages(self) -> bool:
        """Flag for a network that reads the times of sequences (`JaggedEmbeddings.gaps`), if the
        log has them. Default: False.
        """
        return False

    @property
    def reads_request_time(self) -> bool:
        """Flag for a network that reads the time at which it is asked. Default: False."""
        return False

    def full_tables(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the features whose full table the network reads (`KeyedEmbeddings.table`).
        Default: none.
        """
        return ()

    def table_sample(self) -> int | None:
        """Return the number of rows that a training step reads from each of `full_tables`. They are
        drawn from known categories with repetition, equally on all workers. None: the full table.
        Default: None, and 0 without TRAINS_ON_TABLES.
        """
        return None if self.TRAINS_ON_TABLES else 0

    def needs_frequencies(self) -> bool:
        """Return whether the loss needs the `ModelInputs.frequencies` of candidates. Default:
        False.
        """
        return False

    def candidate_feature(self, inputs: ModelInputs) -> str | None:
        """Return the feature whose known categories the model ranks, None for models of labels. In
        a list, each item after the first is a target. Default: None.
        """
        return None

    def loss_logits(self) -> tuple[str, ...]:
        """Return further outputs that the loss takes as logits of the main label. Default: none."""
        return ()

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        """Return the outputs, the main one first. Default: one for each label. Pure."""
        from rayrec.models.heads import label_heads

        return label_heads(inputs.label, inputs.more_labels, kind=inputs.label_kind)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the value to maximize in early stopping, best checkpoint and searches.

        Default: the `objective`, negative if lower is better. For an undefined AUROC, because the
        validation rows have only one class, the negative log loss.
        """
        name = self.objective(metrics)
        if name == "auroc" and not math.isfinite(metrics["auroc"]):
            name = "-logloss"
        return -metrics[name[1:]] if name.startswith("-") else metrics[name]

    def objective(self, metrics: Mapping[str, float]) -> str:
        """Return the name of the metric behind `score`, after a minus sign if lower is better.

        Default: AUROC. For a main label that is a count or a number, the deviance or squared error.
        Without labels, the loss.
        """
        return next(
            name
            for name in ("auroc", "-deviance", "-mse", "-loss")
            if name.removeprefix("-") in metrics
        )

    @property
    def width(self) -> int:
        """Embedding width of one network."""
        return self.embedding_dim

    @property
    def table_width(self) -> int:
        """Width of the tables' rows, which contain the embeddings of all `members`."""
        return self.members * self.width

    @abstractmethod
    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        """Build the network without its tables.

        Its forward(dense, embedded) takes the dense features, float32 [rows, num_dense], and
        `rayrec.layers.keyed_embeddings.KeyedEmbeddings`. It returns a dict with the values of each
        of `output_heads` by name, and any other values for the network's loss. A single tensor is
        the value of the only head. Label values are logits, float32 [rows]. `rows` may be 0.
        Initial values are drawn from torch's global generator.

        The default loss is the sum of the losses of the heads: binary cross entropy, squared error
        for a number label, and 0 for a missing label. The network may have these methods:

        - loss(outputs, batch): loss of each row, float32 [rows], from the outputs of `forward` and
          the `rayrec.batch.Batch`, before weighting and averaging. May communicate between workers.
          loss(outputs, labels) receives `batch.labels`. If the schema has a `sample`, the label's
          logits, and those of `loss_logits`, are among the kept rows.
        - measures(outputs, batch): values that evaluations average, by name, float32 [rows]. NaN
          excludes a row. Integers are added up instead.
        - predict(outputs, embedded): values of the heads for inference. `forward` then need not
          return them.
        """


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ClickModelConfig):
    """Base configuration of click models with an MLP over all features."""

    mlp: Sizes = (400, 400, 400)
    """Layer widths of the MLP over all features."""
    dropout: Share = 0.0
    """Dropout probability of each MLP layer."""
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in the MLP."""

    def needs_categories(self) -> bool:
        return False

    def layer_settings(self, precision: Precision) -> TowerSettings:
        """Return the settings of the MLP's layers, except their widths."""
        return {
            "dropout": self.dropout,
            "batch_norm": self.batch_norm,
            "precision": precision,
        }


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ClickModelConfig):
    """Base configuration of multi-label models with experts, gates, and a tower for each label."""

    SEVERAL_LABELS: ClassVar[bool] = True

    expert: SomeSizes = (512, 256, 128)
    """Layer widths of each expert."""
    gate: Sizes = ()
    """Widths of a gate's layers before its softmax. If empty, the gate is linear, as in the
    paper.
    """
    tower: Sizes = (128, 64)
    """Layer widths of each label's tower."""
    dropout: Share = 0.0
    """Dropout probability of each layer."""
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in experts, gates and towers."""

    def needs_categories(self) -> bool:
        return False

    def layer_settings(self, precision: Precision) -> TowerSettings:
        """Return the settings of all layers, except their widths."""
        return {
            "dropout": self.dropout,
            "batch_norm": self.batch_norm,
            "precision": precision,
        }


def unpooled_features(config: ClickModelConfig, inputs: ModelInputs) -> tuple[str, ...]:
    """Return the features with unpooled lookups in training: sequences, full tables, and features
    that share a table with one. Raises InputError for a sequence with weights.
    """
    table_of = inputs.table_of
    sequences = tuple(dict.fromkeys((*config.sequences(inputs), *config.full_tables(inputs))))
    unknown = [name for name in sequences if name not in table_of]
    assert not unknown, (
        f"{type(config).__name__} names {unknown} in sequences or full_tables, which are no "
        "features"
    )
    if sequences and inputs.weighted:
        raise InputError(
            f"{type(config).__name__}: lists with weights must be summed, got unpooled lists "
            f"{', '.join(sequences)}. Remove weights from the schema's features."
        )
    summed = [name for name in inputs.aged if name not in sequences]
    if summed:
        raise InputError(
            f"{type(config).__name__}: lists with ages must not be summed, got "
            f"{', '.join(summed)}. Remove ages from the schema's features."
        )
    tables = {table_of[name] for name in sequences}
    return tuple(name for name in inputs.features if table_of[name] in tables)


def width_with_weight(dim: int) -> int:
    """Return the width of table rows that contain an embedding of `dim` values and a scalar. The
    rest is unused.
    """
    return (dim // 4 + 1) * 4  # fbgemm needs a multiple of 4


def table_key(feature: str) -> str:
    """Return the lookup key of a feature's full table in training."""
    return f"table:{feature}"


@dataclass(frozen=True, kw_only=True)
class TableInit(Config):
    """Initial value distribution of embedding tables."""

    kind: Literal["uniform", "normal", "xavier"] = "uniform"
    """Distribution: uniform from -sqrt(1/n) to sqrt(1/n) for n rows, normal with mean 0 and
    standard deviation `std`, or Xavier normal, whose deviation is sqrt(2/(n + width)).
    """
    std: Annotated[float, Gt(0), Lt(math.inf)] = 1e-4
    """Standard deviation of kind normal."""

    def deviation(self, rows: int, width: int) -> float | None:
        """Return the standard deviation of normal values in a table of this shape. None:
        uniform.
        """
        deviations = {"normal": self.std, "xavier": (2 / (rows + width)) ** 0.5}
        return deviations.get(self.kind)


def stored_model(
    values: Mapping[str, Any],
    *,
    where: str,
    own: type[ClickModelConfig] | None = None,
) -> ClickModelConfig:
    """Load a configuration from `ClickModelConfig.to_dict`. Only imports code of rayrec's models.
    `where`: file name for error messages. `own`: class of a model outside rayrec. Raises InputError
    for an unknown class or invalid settings.
    """
    if not isinstance(values, Mapping):
        raise InputError(
            f"{where}: network must be a mapping of settings, got {str(values)[:40]!r}"
        )
    # Early files have no class name
    name = str(values.get(CLASS) or f"{models.__name__}.ranking.dlrm.DLRMConfig")
    if own is not None and own.__qualname__.rpartition(".")[2] == name.rpartition(".")[2]:
        cls: type[ClickModelConfig] | None = own
    else:
        cls = models.config_class(name) if "." in name else None
    if cls is None:
        raise InputError(
            f"{where}: network must be rayrec's, got {name}. Pass its training recipe, --recipe "
            "FILE.py:FUNCTION."
        )
    try:
        return cls().updated({**cls.EARLIER, **values})
    except TypeError as error:
        raise InputError(
            f"{where}: {cls.__qualname__} must have a default for each field ({error})"
        ) from None
