"""What the outputs of a network mean: loss, columns, metrics and JSON of each kind. Loads no torch by itself."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rayrec.config import InputError
from rayrec.metrics.binary import BinaryMetricsAccumulator, sigmoid
from rayrec.metrics.means import Accumulator, CountAccumulator, LabelsAccumulator, NumberAccumulator
from rayrec.metrics.ranking import DEFAULT_KS

if TYPE_CHECKING:
    import torch

    from rayrec.batch import Batch
    from rayrec.schema import Label

    Outputs = Mapping[str, torch.Tensor]

Tokens = Callable[[str], np.ndarray]
"""By the name of a feature, int64 (num_embeddings,): the token that each id stands for."""


@dataclass(frozen=True)
class Head(ABC):
    """An output of a network. Its class says of which kind."""

    kind: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Of the tensors that hold its values, by the order of `names`."""
    called: ClassVar[tuple[str, str]] = ("values", "head")
    """What errors call its values, and itself."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that hold its values."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's value."""
        return ()

    def check(self, outputs: Outputs, *, rows: int, where: str) -> None:
        """Raises InputError for values that are missing, and for those of another shape or dtype. What broadcasts would train
        without an error, and what is not float32 would be refused by scoring, after training."""
        shape, (what, of) = (rows, *self.shape), self.called
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            values = outputs.get(name)
            if values is None:
                given = ", ".join(outputs) or "nothing"
                raise InputError(f"{where} gave {given}, and no {what} by the name of the {of}, {name}")
            if values.shape != shape or str(values.dtype) != f"torch.{dtype}":
                raise InputError(
                    f"{where} gave {what} of shape {tuple(values.shape)} and {values.dtype} for {rows} rows; give {shape} "
                    f"and {dtype}"
                )

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        """Return the columns of a prediction, (rows, ...) each."""
        del tokens
        return {name: values[name] for name in self.names}

    def answer(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        """Return the fields of a server's answer, (rows, ...) each."""
        return self.columns(values, tokens)

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the fields of `answer`, by name."""


@dataclass(frozen=True)
class LabelHead(Head):
    """Predicts a label of the log, in a tensor of its name, (rows,) float32."""

    called = ("logits", "label")
    of_logits: ClassVar[str] = "What the network gives."

    main: bool = False
    """Whether it predicts the main label, which every row has."""

    @property
    def suffix(self) -> str:
        """Of the names of its columns."""
        return "" if self.main else f"_{self.name}"

    def losses(self, outputs: Outputs, labels: Outputs, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return each row's loss times its weight, float32 (rows,); 0 for rows that lack the label."""
        values, wanted = outputs[self.name], labels[self.name]
        if not self.main:
            there = ~wanted.isnan()
            weights = there.to(values.dtype) if weights is None else there * weights
            wanted = wanted.where(there, 0.0)
        return self._losses(values, wanted, weights)

    @abstractmethod
    def _losses(self, values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor: ...

    def prediction(self, values: np.ndarray) -> np.ndarray:
        """Return what is predicted, float32, from the tensor's values."""
        return values

    @abstractmethod
    def accumulator(self) -> Accumulator:
        """Return the exact metrics of predictions against the label."""

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        logits = values[self.name]
        return {f"score{self.suffix}": self.prediction(logits), f"logit{self.suffix}": logits}

    def answer(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        scores = self.prediction(values[self.name])
        return {"scores": scores, "logits": values[self.name]} if self.main else {f"score{self.suffix}": scores}

    def json_schema(self) -> dict[str, Any]:
        scores = self._scores_schema()
        logits = many({"type": "number"}, self.of_logits)
        return {"scores": scores, "logits": logits} if self.main else {f"score{self.suffix}": scores}

    def _scores_schema(self) -> dict[str, Any]:
        return many({"type": "number"}, f"Predicted {self.name}.")


@dataclass(frozen=True)
class BinaryHead(LabelHead):
    """The logit of a label that is 1 or 0."""

    kind = "binary"
    of_logits = "Logit of the score."

    def _losses(self, values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(values, labels, weight=weights, reduction="none")

    def prediction(self, values: np.ndarray) -> np.ndarray:
        return sigmoid(values)

    def accumulator(self) -> Accumulator:
        return BinaryMetricsAccumulator()

    def _scores_schema(self) -> dict[str, Any]:
        meaning = "Probability of a click." if self.main else f"Probability that {self.name} is 1."
        return many({"type": "number", "minimum": 0, "maximum": 1}, meaning)


@dataclass(frozen=True)
class NumberHead(LabelHead):
    """A label that is any number, by squared error."""

    kind = "number"

    def _losses(self, values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        losses = (values - labels).square()
        return losses if weights is None else weights * losses

    def accumulator(self) -> Accumulator:
        return NumberAccumulator()


@dataclass(frozen=True)
class CountHead(LabelHead):
    """The logarithm of the mean of a label that is a count, by the loss of a Poisson distribution."""

    kind = "count"

    def _losses(self, values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        losses = values.exp() - labels * values
        return losses if weights is None else weights * losses

    def prediction(self, values: np.ndarray) -> np.ndarray:
        return np.exp(values)

    def accumulator(self) -> Accumulator:
        return CountAccumulator()


@dataclass(frozen=True)
class VectorHead(Head):
    """A vector of a row, such as of a user or an item, in a tensor of its name, (rows, width) float32."""

    kind = "vector"

    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,)

    def json_schema(self) -> dict[str, Any]:
        vector = {**many({"type": "number"}, "A vector."), "minItems": self.width, "maxItems": self.width}
        return {self.name: many(vector, f"Vectors of {self.name}.")}


@dataclass(frozen=True)
class ItemsHead(Head):
    """The best categories of a feature, the best first: their ids in a tensor of its name, (rows, k) int64, and what they were
    chosen by in `scores`, (rows, k) float32."""

    kind = "items"
    dtypes = ("int64", "float32")

    k: int
    feature: str
    """Whose ids they are."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, "scores"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.k,)

    def columns(self, values: Mapping[str, np.ndarray], tokens: Tokens) -> dict[str, np.ndarray]:
        return {**super().columns(values, tokens), self.name: tokens(self.feature)[values[self.name]]}

    def json_schema(self) -> dict[str, Any]:
        return {
            self.name: many(many({"type": "integer"}, f"Categories of {self.feature}."), "The best, the best first."),
            "scores": many(many({"type": "number"}, "Scores."), "What they were chosen by."),
        }


def many(of: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the JSON schema of an array."""
    return {"type": "array", "items": of, "description": description}


def label_heads(main: str, others: Sequence[Label] = (), *, kind: str = "binary") -> tuple[LabelHead, ...]:
    """Return the head of each label, the main one, of this kind, first."""
    classes: dict[str, type[LabelHead]] = {head.kind: head for head in (BinaryHead, NumberHead, CountHead)}
    return (classes[kind](main, main=True), *(classes[label.kind](label.name) for label in others))


def labels_accumulator(
    heads: Sequence[Head], *, grouped: bool = False, ks: Sequence[int] = DEFAULT_KS
) -> LabelsAccumulator | None:
    """Return the metrics of the labels that heads predict; None if they predict none. `grouped`, `ks`: of the main label, see
    `LabelsAccumulator`."""
    of_labels = {head.name: head.accumulator() for head in heads if isinstance(head, LabelHead)}
    return LabelsAccumulator(of_labels, grouped=grouped, ks=ks) if of_labels else None


def named_outputs(outputs: object, heads: Sequence[Head], *, where: str) -> Outputs:
    """Return what a network gave, by name. Raises InputError for anything else than tensors by name, or the tensor of the only
    head."""
    if isinstance(outputs, Mapping):
        return outputs
    if len(heads) == 1 and len(heads[0].names) == 1 and hasattr(outputs, "dtype"):
        return {heads[0].name: outputs}  # type: ignore[dict-item]
    raise InputError(f"{where} returned a {type(outputs).__name__}; return a dict of logits, {{'{heads[0].name}': logits}}")


def own_loss(network: Any) -> Callable[[Outputs, Batch], torch.Tensor] | None:
    """Return the network's loss(outputs, batch), None without one. One whose second parameter is `labels` gets the labels."""
    loss = getattr(network, "loss", None)
    if loss is None or list(inspect.signature(loss).parameters)[1:2] != ["labels"]:
        return loss
    return lambda outputs, batch: loss(outputs, batch.labels)


def measured(network: Any, outputs: Outputs, batch: Batch, losses: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return the row values that an evaluation averages, NaN in rows that it leaves out: what the network measures, and for one
    with a loss of its own `loss`. `losses`: known already."""
    measures, loss = getattr(network, "measures", None), own_loss(network)
    if losses is None and loss is not None:
        losses = loss(outputs, batch)
    found = {} if losses is None else {"loss": losses}
    return found if measures is None else {**found, **measures(outputs, batch)}
