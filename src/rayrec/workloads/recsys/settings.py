"""Settings of a click workload, what follows from them alone, and what the driver hands to its workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset
from rayrec.data.engine import Shared
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex
from rayrec.ingest.block_order import BlockOrder
from rayrec.models.base import ClickModelConfig, ModelInputs, TableStart, unpooled_features
from rayrec.models.heads import BinaryHead
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.schema import Schema
from rayrec.sharding.planner import ShardingConfig
from rayrec.workloads.base import TrainConfig, Workload
from rayrec.workloads.recsys.distillation import Teacher, TeacherConfig


@dataclass(frozen=True)
class Prepared:
    """What the driver found out and every worker needs."""

    preprocessor: Shared[Preprocessor]
    preprocessor_hash: str
    inputs: Schema
    """Columns the model gets."""
    num_embeddings: list[int]
    sets: dict[str, BlockOrder]
    """`train`, `validation` and, where the split has one, `test`."""
    bad_rows: int
    folder: str
    """Of the stored Preprocessor."""
    best_auroc: float | None
    """The best any model could reach on the test rows; known for the test rows of a synthetic log."""
    teacher: Teacher | None = None

    def open_preprocessor(self) -> Preprocessor:
        """On any process of the run."""
        return self.preprocessor.get()


@dataclass(frozen=True, kw_only=True)
class ClickSettings(Workload):
    """The fields of `ClickWorkload`, which the modules that it calls take."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        "vocabulary_memory_bytes", "sharding.sharding_types", "sharding.min_column_width", "sharding.reserved_fraction",
        "sharding.optimizer_floats_per_row", "schema.group",
    )  # fmt: skip
    RENAMED: ClassVar[Mapping[str, str]] = {"profile": "preset"}
    schema: Schema
    """Columns of the log."""
    preset: Preset = field(default_factory=Preset)
    """How raw columns become model inputs, where no Preprocessor is given, and how the log is split."""
    preprocessor: str | None = None
    """Folder of a Preprocessor made by `rayrec vocabulary`; None: that of preprocessed data, else made from the rows that
    the preset counts."""
    vocabulary_memory_bytes: int | None = None
    """Memory for counts of categories; counts beyond it are spilled to the disk; None: a quarter of the available memory."""
    model: ClickModelConfig = field(default_factory=DLRMConfig)
    """The network."""
    table_start: TableStart = field(default_factory=TableStart)
    """Start values of the embedding tables."""
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    """Of the embedding tables."""
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Of everything else."""
    max_gradient_norm: float | None = None
    """Clip the gradients of tables and network together to this joint 2-norm, with the weight_decay of adam; for sparse
    optimizers adam, adamw and sparse_adam. None never clips. `dense_optimizer.max_gradient_norm` clips the network alone."""
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    """Learning rate over the steps, for both."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """How tables are spread over workers."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """A larger model to learn from, beside the labels."""

    def score(self, metrics: dict[str, float]) -> float:
        return self.model.score(metrics)

    def check(self, config: TrainConfig) -> None:
        if config.train_data.path is None:
            raise InputError("train_data.path: no training log given; pass --train-data.path PATH (rayrec generate makes one)")
        if self.preprocessor is None and not LogSource.at(config.train_data.path).is_preprocessed:
            inputs = self.preset.inputs(self.schema)
            check_sparse(inputs)
            self.unpooled(inputs)  # raises an error for columns that the model cannot take
        self._check_labels()
        self.teacher.check()
        self._check_clipping()
        if self.sharding.uvm_caching and self.sparse_optimizer.own_rule:
            raise InputError(
                f"workload.sharding.uvm_caching: {self.sparse_optimizer.kind} updates tables outside fbgemm's kernels, which "
                "alone know the cache; choose sparse_optimizer.kind rowwise_adagrad, adagrad or sgd"
            )

    def _check_labels(self) -> None:
        name = type(self.model).__name__
        if len(self.schema.label_names) > 1 and not self.model.SEVERAL_LABELS:
            raise InputError(
                f"schema.labels: {name} predicts one label, and the schema has {', '.join(self.schema.label_names)}; leave "
                "labels out, or choose a model of several"
            )
        if not self.schema.label_names and self.model.LABELLED:
            raise InputError(f"schema.label: must be a column, which {name} learns from, got None. Name it.")
        if self.schema.label is None and self.schema.labels and self.schema.labels[0].missing == "allowed":
            raise InputError(
                f"schema.labels: the main label, {self.schema.labels[0].name}, must be in every row, got missing: allowed. Set "
                "it to fault."
            )
        if self.schema.group and self.model.LABELLED and not self.predicts_clicks:
            raise InputError(
                f"schema.group: must be None where the main label is no click, got {self.schema.group}. Leave it out."
            )
        if self.teacher.checkpoint and not self.predicts_clicks:
            raise InputError(
                f"teacher.checkpoint: must be None for {name}, which predicts no clicks, got {self.teacher.checkpoint}. "
                "Leave it out."
            )

    def _check_clipping(self) -> None:
        norm = self.max_gradient_norm
        if norm is None:
            return
        if not norm > 0:
            raise InputError(f"workload.max_gradient_norm: {norm} must be above 0; None never clips")
        if not self.sparse_optimizer.own_rule:
            raise InputError(
                f"workload.max_gradient_norm: {self.sparse_optimizer.kind} updates tables within the backward pass, before the "
                "norm of all gradients is known; choose sparse_optimizer.kind adam, adamw or sparse_adam, or clip the network "
                "alone: dense_optimizer.max_gradient_norm"
            )
        if self.dense_optimizer.max_gradient_norm is not None:
            raise InputError(
                "workload.max_gradient_norm and dense_optimizer.max_gradient_norm: the first clips the network too; give one"
            )

    @property
    def predicts_clicks(self) -> bool:
        """Whether the main output is the logit of a label that is 1 or 0."""
        return isinstance(self.model.output_heads(ModelInputs.of(self.schema))[0], BinaryHead)

    @property
    def table_schema(self) -> Schema:
        return self.schema

    def split_rows(self, path: str, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Row ranges [start, stop) of the sets of a training log; preprocessed data knows them already."""
        data = LogSource.at(path).dataset()
        return (data and data.sets) or self.preset.split.rows(index)

    def unpooled(self, inputs: Schema) -> tuple[str, ...]:
        """Those of the model's columns whose embeddings are looked up one by one in training."""
        return unpooled_features(self.model, ModelInputs.of(inputs))


def other_preprocessor(checkpoint: str, first: str) -> str:
    """What is wrong with models of different Preprocessors that are to be one model."""
    return (
        f"{checkpoint}: was trained with another Preprocessor than {first}, so that their ids differ; train all with one "
        "(--workload.preprocessor DIR)"
    )


def check_sparse(inputs: Schema) -> None:
    """Raises InputError for model inputs without a sparse column."""
    if not inputs.sparse:
        raise InputError(
            "schema: no sparse column, and a click model needs at least one; name a column of categories (whole numbers will "
            "do) in sparse, or train a model of your own (docs/bring-your-own.md)"
        )


def check_grouped(schema: Schema, path: str | None) -> None:
    """Raises InputError if a schema names a group and the rows to evaluate on are preprocessed: these hold ids, and all rare
    categories share one."""
    if schema.group is not None and path is not None and LogSource.at(path).is_preprocessed:
        raise InputError(
            f"schema.group: {path} is preprocessed and holds no values of {schema.group}; evaluate on a raw log "
            "(--eval-data.path), or leave group out"
        )
