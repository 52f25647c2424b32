"""What a click model is to everything that trains, scores, exports, serves and plans it. Loads no torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt, Lt

from rayrec import models
from rayrec.bounds import Count
from rayrec.config import CLASS, Config, InputError, same_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rayrec.layers.mlp import Precision
    from rayrec.models.heads import Head
    from rayrec.schema import Label, Schema


@dataclass(frozen=True)
class ModelInputs:
    """The inputs and outputs of a click model."""

    num_dense: int
    """Number of dense features."""
    features: tuple[str, ...]
    """Names of the categorical features, each of which has a table."""
    label: str = "label"
    """Name of the label that is predicted, of several the main one."""
    more_labels: tuple[Label, ...] = ()
    """The other labels, if the model predicts several (`ClickModelConfig.SEVERAL_LABELS`)."""
    vocabularies: tuple[str, ...] = ()
    """The vocabulary, and with it the table, of each feature; empty: each has its own, of its name."""
    weighted: bool = False
    """Whether ids have weights, by which their embeddings are multiplied before they are summed."""
    lists: tuple[tuple[str, int | None], ...] = ()
    """The features that have any number of ids a row, each with the most that a row has; None: any number."""
    aligned: tuple[tuple[str, str], ...] = ()
    """Features of `lists` and the one that each is aligned with (`Feature.aligned_with`): in a row, both have as many ids."""
    label_kind: str = "binary"
    """Kind of the main label (`rayrec.schema.Label.kind`)."""

    @classmethod
    def of(cls, schema: Schema) -> ModelInputs:
        """Of the model's columns (`Preprocessor.inputs`)."""
        has_own = schema.label is None and schema.labels
        return cls(
            len(schema.dense),
            schema.sparse,
            schema.labels[0].name if has_own else schema.label or "label",
            schema.labels[1:] if has_own else schema.labels,
            schema.vocabularies,
            bool(schema.list_weights),
            tuple((name, schema.feature(name).max_length) for name in schema.lists),
            tuple((feature.name, feature.aligned_with) for feature in schema.features if feature.aligned_with),
            schema.labels[0].kind if has_own else "binary",
        )

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels, the main one first."""
        return (self.label, *(label.name for label in self.more_labels))

    @property
    def table_of(self) -> dict[str, str]:
        """The name of each feature's table, which features of one vocabulary share."""
        return dict(zip(self.features, self.vocabularies or self.features, strict=True))


@dataclass(frozen=True, kw_only=True)
class ClickModelConfig(Config):
    """The settings of a click model. A model is a subclass in a file of `rayrec.models.ranking`, or of the user's."""

    TRAINS_ON_TABLES: ClassVar[bool] = True
    """Whether `full_tables` are read in training too, and not in evaluations alone."""
    SEVERAL_LABELS: ClassVar[bool] = False
    """Whether the network predicts each of `ModelInputs.label_names`; else only the main label."""
    LABELLED: ClassVar[bool] = True
    """Whether the loss needs a label. False: the log may have none, and the network has a loss of its own."""

    embedding_dim: Count = 16
    """Width of every embedding."""
    embedding_penalty: float = 0.0
    """L2 penalty on the embeddings of each trained example, on top of its loss: half of it times the squared norm of what every
    feature gives the network, which is a category's embedding, of a list that is summed the sum, and of a list that is read one
    by one each embedding. Holds rare categories back."""
    members: Count = 1
    """Networks that are trained side by side, each with embeddings of its own, and whose logits are averaged: an ensemble that is
    one model. Time, tables and memory grow with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members > 1 and not self.LABELLED:
            raise InputError(f"{type(self).__name__}.members: must be 1 without logits to average, got {self.members}. Set it.")

    @classmethod
    def _own_class(cls) -> str | None:
        return f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def item(cls, values: Mapping[str, Any], *, among: Sequence[Config], where: str) -> Config:
        """A model of a list: `class` names it, one of rayrec's, or is the class of a model of the list `among`."""
        name = values.get(CLASS)
        if name is None:
            raise InputError(f"{where}{CLASS}: which model? rayrec's are {', '.join(models.names())}")
        others = (type(model) for model in among if isinstance(model, ClickModelConfig))
        own = next((other for other in others if same_class(name, f"{other.__module__}.{other.__qualname__}")), None)
        found = own or models.config_class(name)
        if found is None:
            raise InputError(f"{where}{CLASS}: no model {name}; rayrec's are {', '.join(models.names())}")
        made: ClickModelConfig = found().updated({key: value for key, value in values.items() if key != CLASS}, where=where)
        return made

    def of_class(self, name: object) -> ClickModelConfig | None:
        cls = models.config_class(name)
        return None if cls is None else cls.in_place_of(self)

    def _known_classes(self) -> str:
        return f"{super()._known_classes()}; rayrec's models are {', '.join(models.names())}"

    @classmethod
    def in_place_of(cls, other: ClickModelConfig) -> Self:
        """The defaults, with the settings of embeddings of the model whose place it takes in a recipe."""
        return cls().replace(**other.embedding_settings())

    def embedding_settings(self) -> dict[str, Any]:
        """The settings that every click model has."""
        return {field.name: getattr(self, field.name) for field in fields(ClickModelConfig)}

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        """The features whose embeddings the network takes one by one (`Embedded.sequences`), not summed: none, unless a model
        says otherwise. Pure, and the same for the same inputs. Raises InputError for inputs that the model cannot take."""
        del inputs
        return ()

    def full_tables(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the features whose whole table the network reads (`Embedded.table`). Default: none."""
        del inputs
        return ()

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        """Return the outputs, the main one first. Default: one for each label. Pure."""
        from rayrec.models.heads import label_heads

        return label_heads(inputs.label, inputs.more_labels, kind=inputs.label_kind)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the value to maximize, for early stopping, the best checkpoint and searches. Default: AUROC; where the
        validation rows are all of one class and have none, the negative log loss; of a main label that is a count or a number the
        negative deviance or squared error; of a model without labels the negative loss."""
        if "auroc" not in metrics:
            return -next(metrics[name] for name in ("deviance", "mse", "loss") if name in metrics)
        return metrics["auroc"] if math.isfinite(metrics["auroc"]) else -metrics["logloss"]

    @property
    def width(self) -> int:
        """Values of an embedding that one network takes."""
        return self.embedding_dim

    @property
    def table_width(self) -> int:
        """Values of a table's row."""
        return self.members * self.width

    @abstractmethod
    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        """The network without its tables: forward(dense, embedded) takes dense features (rows, num_dense) float32 and
        `rayrec.layers.keyed_embeddings.Embedded`, and gives the values of each of `output_heads` by its name, in a dict, which
        may hold more that the network's loss needs. A tensor alone is the value of the only head. Values of a label are logits,
        float32 (rows,).

        The loss is that of the heads: binary cross entropy, and for several labels the sum of their losses: squared error for a
        label that is a number, 0 for a missing label. The network may have these methods:

        - loss(outputs, batch): each row's loss, float32 (rows,), from what `forward` gave and the `rayrec.batch.Batch`; the
          framework weights and averages. It may exchange tensors between workers. loss(outputs, labels) gets `batch.labels`.
        - measures(outputs, batch): what evaluations average, float32 (rows,) by name; NaN leaves a row out.
        - predict(outputs, embedded): the heads' values for use; `forward` then need not give them.

        Start values are drawn from torch's global generator. `rows` may be 0.
        """


def unpooled_features(config: ClickModelConfig, inputs: ModelInputs) -> tuple[str, ...]:
    """The features whose embeddings are looked up one by one in training: the model's sequences, those whose full table it reads,
    and those that share a table with one. Raises InputError for a sequence with weights."""
    table_of = inputs.table_of
    sequences = tuple(dict.fromkeys((*config.sequences(inputs), *config.full_tables(inputs))))
    unknown = [name for name in sequences if name not in table_of]
    assert not unknown, f"{type(config).__name__} names {unknown} in sequences or full_tables, which are no features"
    if sequences and inputs.weighted:
        raise InputError(
            f"{type(config).__name__} takes lists of categories one by one ({', '.join(sequences)}), to which weights do not "
            "apply; leave weights out of the schema's features"
        )
    tables = {table_of[name] for name in sequences}
    return tuple(name for name in inputs.features if table_of[name] in tables)


def table_key(feature: str) -> str:
    """Return the key by which training looks up the full table of a feature, beside the keys of the features."""
    return f"table:{feature}"


@dataclass(frozen=True, kw_only=True)
class TableStart(Config):
    """Distribution of the start values of embedding tables."""

    kind: Literal["uniform", "normal"] = "uniform"
    """uniform: from -sqrt(1/n) to sqrt(1/n) for a table of n rows; normal: with mean 0 and standard deviation `std`."""
    std: Annotated[float, Gt(0), Lt(math.inf)] = 1e-4
    """Standard deviation (normal)."""


def stored_model(values: Mapping[str, Any], *, where: str, own: type[ClickModelConfig] | None = None) -> ClickModelConfig:
    """The settings that `ClickModelConfig.to_dict` gave: a file chooses among rayrec's own models, and no other code. `own`: the
    class of a model that is not rayrec's, where one was given; `where`: the file, for messages. Raises InputError
    for a class that is neither, and for settings that do not fit it."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: its network must be a mapping of settings, got {str(values)[:40]!r}")
    name = str(values.get(CLASS) or f"{models.__name__}.ranking.dlrm.DLRMConfig")  # early files name no class
    if own is not None and own.__qualname__.rpartition(".")[2] == name.rpartition(".")[2]:
        cls: type[ClickModelConfig] = own
    else:
        cls = _shipped(name, where)
    try:
        return cls().updated(values)
    except TypeError as error:
        raise InputError(f"{where}: {cls.__qualname__} cannot be made of its defaults ({error}); give every field one") from None


def _shipped(name: str, where: str) -> type[ClickModelConfig]:
    cls: type[ClickModelConfig] | None = models.config_class(name) if "." in name else None
    if cls is None:
        raise InputError(
            f"{where}: its network is {name}, which is not one of rayrec's; give the recipe that it was trained by: "
            "--recipe FILE.py:FUNCTION"
        )
    return cls
