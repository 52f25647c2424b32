"""Output heads of networks: loss, columns, metrics and JSON of each kind. Does not import torch
itself.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rayrec.config import InputError
from rayrec.metrics.binary import BinaryMetricsAccumulator, checked, row_losses, sigmoid
from rayrec.metrics.means import Accumulator, CountAccumulator, LabelsAccumulator, NumberAccumulator
from rayrec.metrics.ranking import DEFAULT_KS

if TYPE_CHECKING:
    import torch

    from rayrec.batch import Batch
    from rayrec.schema import Label

    Outputs = Mapping[str, torch.Tensor]

Tokens = Callable[[str], np.ndarray]
"""Function from a feature name to the user's own id of each table row, int64 or text as objects
[num_embeddings].
"""


@dataclass(frozen=True)
class Head(ABC):
    """Output of a network. Each subclass is one kind."""

    kind: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Dtypes of the head's tensors, in the order of `names`."""
    called: ClassVar[tuple[str, str]] = ("values", "head")
    """Nouns for the values and the head in error messages."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value of one row."""
        return ()

    def check(self, outputs: Outputs, *, rows: int, where: str) -> None:
        """Check that all values are present and have the right shape and dtype. Raises InputError.
        Values that broadcast would train without an error, and scoring would reject other dtypes
        only after training.
        """
        shape = (rows, *self.shape)
        noun, owner = self.called
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            values = outputs.get(name)
            if values is None:
                names = ", ".join(outputs) or "nothing"
                raise InputError(
                    f"{where}: outputs must have {noun} named after the {owner}, {name}, got "
                    f"{names}."
                )
            if values.shape != shape or str(values.dtype) != f"torch.{dtype}":
                raise InputError(
                    f"{where}: {noun} must have shape {shape} and dtype {dtype}, got "
                    f"{tuple(values.shape)} and {values.dtype}."
                )

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        """Return the prediction columns, [rows, ...] each."""
        return {name: values[name] for name in self.names}

    def answer(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        """Return the fields of a server's answer, [rows, ...] each."""
        return self.columns(values, tokens)

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the fields of `answer`, by name."""


@dataclass(frozen=True)
class LabelHead(Head):
    """Prediction of a label of the log, in a tensor with its name, float32 [rows]."""

    called = ("logits", "label")
    logit_description: ClassVar[str] = "What the network gives."

    main: bool = False
    """Whether this is the main label, which every row has."""

    @property
    def suffix(self) -> str:
        """Suffix of the column names."""
        return "" if self.main else f"_{self.name}"

    def losses(
        self,
        outputs: Outputs,
        labels: Outputs,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted loss of each row, 0 for rows without the label, float32 [rows]."""
        values = outputs[self.name]
        targets = labels[self.name]
        if not self.main:
            has_label = ~targets.isnan()
            weights = has_label.to(values.dtype) if weights is None else has_label * weights
            targets = targets.where(has_label, 0.0)
        return self._losses(values, targets, weights)

    @abstractmethod
    def _losses(
        self,
        values: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def prediction(self, values: np.ndarray) -> np.ndarray:
        """Return the predictions for the tensor's values, float32."""
        return values

    @abstractmethod
    def row_losses(self, values: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return the metrics that are means over rows, lower is better, float64 [rows] each."""

    @abstractmethod
    def accumulator(self) -> Accumulator:
        """Return a new accumulator of the exact metrics of predictions against the label."""

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        logits = values[self.name]
        return {f"score{self.suffix}": self.prediction(logits), f"logit{self.suffix}": logits}

    def answer(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        scores = self.prediction(values[self.name])
        return (
            {"scores": scores, "logits": values[self.name]}
            if self.main
            else {f"score{self.suffix}": scores}
        )

    def json_schema(self) -> dict[str, Any]:
        scores = self._scores_schema()
        logits = many({"type": "number"}, self.logit_description)
        return (
            {"scores": scores, "logits": logits} if self.main else {f"score{self.suffix}": scores}
        )

    def _scores_schema(self) -> dict[str, Any]:
        return many({"type": "number"}, f"Predicted {self.name}.")


@dataclass(frozen=True)
class BinaryHead(LabelHead):
    """Logit of a label that is 1 or 0."""

    kind = "binary"
    logit_description = "Logit of the score."

    def _losses(
        self,
        values: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(
            values,
            labels,
            weight=weights,
            reduction="none",
        )

    def prediction(self, values: np.ndarray) -> np.ndarray:
        return sigmoid(values)

    def row_losses(self, values: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        return {"logloss": row_losses(*checked(values, labels))[0]}

    def accumulator(self) -> Accumulator:
        return BinaryMetricsAccumulator()

    def _scores_schema(self) -> dict[str, Any]:
        meaning = "Probability of a click." if self.main else f"Probability that {self.name} is 1."
        return many({"type": "number", "minimum": 0, "maximum": 1}, meaning)


@dataclass(frozen=True)
class NumberHead(LabelHead):
    """Prediction of a numeric label, trained with squared error."""

    kind = "number"

    def _losses(
        self,
        values: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        losses = (values - labels).square()
        return losses if weights is None else weights * losses

    def row_losses(self, values: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        squared, absolute = NumberAccumulator().terms(values.astype(np.float64), labels)
        return {"mse": squared, "mae": absolute}

    def accumulator(self) -> Accumulator:
        return NumberAccumulator()


@dataclass(frozen=True)
class CountHead(LabelHead):
    """Logarithm of the mean of a count label, trained with the Poisson loss."""

    kind = "count"

    def _losses(
        self,
        values: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        losses = values.exp() - labels * values
        return losses if weights is None else weights * losses

    def prediction(self, values: np.ndarray) -> np.ndarray:
        return np.exp(values)

    def row_losses(self, values: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        return {"deviance": CountAccumulator().terms(values.astype(np.float64), labels)[0]}

    def accumulator(self) -> Accumulator:
        return CountAccumulator()


@dataclass(frozen=True)
class VectorHead(Head):
    """Vector of a row, such as of a user or item, in a tensor with its name, float32 [rows,
    width].
    """

    kind = "vector"

    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,)

    def json_schema(self) -> dict[str, Any]:
        vector = {
            **many({"type": "number"}, "A vector."),
            "minItems": self.width,
            "maxItems": self.width,
        }
        return {self.name: many(vector, f"Vectors of {self.name}.")}


@dataclass(frozen=True)
class ItemsHead(Head):
    """Best categories of a feature in order: ids in a tensor with the head's name, int64, and
    `scores`, float32 [rows, k] both.
    """

    kind = "items"
    dtypes = ("int64", "float32")

    k: int
    feature: str
    """Feature of the ids."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, "scores"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.k,)

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        return {
            **super().columns(values, tokens),
            self.name: tokens(self.feature)[values[self.name]],
        }

    def json_schema(self) -> dict[str, Any]:
        return {
            self.name: many(
                many({"type": ["integer", "string"]}, f"Categories of {self.feature}."),
                "The best, the best first.",
            ),
            "scores": many(many({"type": "number"}, "Scores."), "What they were chosen by."),
        }


def many(items: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the JSON schema of an array."""
    return {"type": "array", "items": items, "description": description}


def label_heads(
    main: str,
    more_labels: Sequence[Label] = (),
    *,
    kind: str = "binary",
) -> tuple[LabelHead, ...]:
    """Return the head of each label, the main one first. `kind` is for the main label."""
    classes: dict[str, type[LabelHead]] = {
        head.kind: head for head in (BinaryHead, NumberHead, CountHead)
    }
    return (
        classes[kind](main, main=True),
        *(classes[label.kind](label.name) for label in more_labels),
    )


def labels_accumulator(
    heads: Sequence[Head],
    *,
    grouped: bool = False,
    ks: Sequence[int] = DEFAULT_KS,
) -> LabelsAccumulator | None:
    """Return the metrics of all label heads, or None. `grouped` and `ks` are for the main label
    (`LabelsAccumulator`).
    """
    accumulators = {head.name: head.accumulator() for head in heads if isinstance(head, LabelHead)}
    return LabelsAccumulator(accumulators, grouped=grouped, ks=ks) if accumulators else None


def named_outputs(outputs: object, heads: Sequence[Head], *, where: str) -> Outputs:
    """Return the outputs of a network by name. Raises InputError unless they are a dict or the only
    head's tensor.
    """
    if isinstance(outputs, Mapping):
        return outputs
    if len(heads) == 1 and len(heads[0].names) == 1 and hasattr(outputs, "dtype"):
        return {heads[0].name: outputs}  # type: ignore[dict-item]
    raise InputError(
        f"{where} must return a dict of logits, {{'{heads[0].name}': logits}}, got a "
        f"{type(outputs).__name__}."
    )


def network_loss(network: Any) -> Callable[[Outputs, Batch], torch.Tensor] | None:
    """Return the network's loss(outputs, batch), or None without one. If its second parameter is
    `labels`, pass the labels.
    """
    loss = getattr(network, "loss", None)
    if loss is None or list(inspect.signature(loss).parameters)[1:2] != ["labels"]:
        return loss
    return lambda outputs, batch: loss(outputs, batch.labels)


def measured(
    network: Any,
    outputs: Outputs,
    batch: Batch,
    losses: torch.Tensor | None = None,
    *,
    ks: Sequence[int] = (),
) -> dict[str, torch.Tensor]:
    """Return the row values that an evaluation averages: the network's measures, and `loss` if it
    defines one. NaN excludes a row. `losses`: row losses if already computed. `ks`: ranks of a
    network that ranks candidates, if not its own k.
    """
    measures = getattr(network, "measures", None)
    loss = network_loss(network)
    if losses is None and loss is not None:
        losses = loss(outputs, batch)
    values = {} if losses is None else {"loss": losses}
    if measures is None:
        return values
    ranks = {"ks": tuple(ks)} if ks else {}
    return {**values, **measures(outputs, batch, **ranks)}
