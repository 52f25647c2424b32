"""Settings of a click workload, values derived from them, and the driver's input for workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from rayrec import models, storage
from rayrec.bounds import Positive
from rayrec.config import InputError
from rayrec.data.encoding.clipping import ClipSum
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset
from rayrec.data.engine import Shared
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex
from rayrec.ingest.block_order import BlockOrder
from rayrec.models.base import ClickModelConfig, ModelInputs, TableInit, unpooled_features
from rayrec.models.heads import BinaryHead
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.schema import PlaceholderSchema, Schema, load_schema
from rayrec.sharding.planner import ShardingConfig
from rayrec.workloads.base import TrainConfig, Workload
from rayrec.workloads.recsys.boosting_settings import check_boosting
from rayrec.workloads.recsys.distillation import Teacher, TeacherConfig
from rayrec.workloads.run_config import DataConfig


def read_schema(schema: Schema | str) -> Schema:
    """Return a schema, read from its YAML file (path or URL) if it is a text. Raises InputError for
    an unusable file.
    """
    return load_schema(storage.read_text(schema), schema) if isinstance(schema, str) else schema


@dataclass(frozen=True)
class Prepared:
    """Driver results shared with all workers."""

    preprocessor: Shared[Preprocessor]
    preprocessor_hash: str
    inputs: Schema
    """Input columns of the model."""
    num_embeddings: list[int]
    sets: dict[str, BlockOrder]
    """Row order of each set: `train`, `validation` and optionally `test`."""
    bad_rows: int
    folder: str
    """Folder of the stored Preprocessor."""
    best_auroc: float | None
    """Best achievable AUROC on the test rows of a synthetic log, None if unknown."""
    teacher: Teacher | None = None
    sampled_out: int = 0
    """Training rows that `Schema.sample` leaves out."""

    @cached_property
    def training_clips(self) -> ClipSum:
        """Numbers beyond their bounds in this process's training rows. Not sent to other processes
        with the rest.
        """
        return ClipSum(self.preprocessor.get())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "training_clips"}


@dataclass(frozen=True, kw_only=True)
class ClickSettings(Workload):
    """Fields of `ClickWorkload`."""

    SHORT_EVALUATIONS: ClassVar[bool] = True
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        "vocabulary_memory_bytes",
        "sharding.sharding_types",
        "sharding.min_column_width",
        "sharding.reserved_fraction",
        "sharding.optimizer_floats_per_row",
        "schema.group",
        "schema.delimiter",
        "schema.header",
        "schema.header_row",
    )
    RENAMED: ClassVar[Mapping[str, str]] = {"profile": "preset"}
    schema: Schema
    """Log columns."""
    preset: Preset = field(default_factory=Preset)
    """Column encoding, unless a Preprocessor is used, and the split of the log."""
    preprocessor: str | None = None
    """Folder of `rayrec vocabulary`, a run or a checkpoint. None: that of preprocessed data, else
    one from the preset's rows.
    """
    vocabulary_memory_bytes: int | None = None
    """Memory for category counts in bytes. Counts beyond it spill to disk. None uses a quarter of
    the available memory.
    """
    model: ClickModelConfig = field(default_factory=DLRMConfig)
    """Network architecture."""
    table_start: TableInit = field(default_factory=TableInit)
    """Initial values of the embedding tables."""
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    """Optimizer of the embedding tables."""
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer of the network."""
    max_gradient_norm: Positive | None = None
    """Joint 2-norm limit for gradients of tables and network, with the weight_decay of adam. For
    sparse optimizers adam, adamw and sparse_adam. None disables clipping.
    `dense_optimizer.max_gradient_norm` clips the network alone.
    """
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    """Learning rate schedule of both optimizers."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """Sharding of tables over workers."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teacher model for distillation."""
    best_metric: Literal["auroc", "logloss"] = "auroc"
    """Validation metric that selects the best weights, for labels of clicks and models without
    another metric. Early stopping and plateaus count its improvements. `early_stopping.target` is
    always an AUROC.
    """

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["logloss"] if self._prefers_logloss(metrics) else self.model.score(metrics)

    def objective(self, metrics: Mapping[str, float]) -> str:
        return "-logloss" if self._prefers_logloss(metrics) else self._model_objective(metrics)

    def target_value(self, metrics: dict[str, float]) -> tuple[str, float, int]:
        return self.replace(best_metric="auroc").objective_value(metrics)

    def _prefers_logloss(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the log loss is the metric to minimize: for labels of clicks, unless the
        model has its own metric.
        """
        return (
            self.best_metric == "logloss"
            and "logloss" in metrics
            and self._model_objective(metrics) == "auroc"
        )

    def _model_objective(self, metrics: Mapping[str, float]) -> str:
        model = type(self.model)
        base = ClickModelConfig
        has_only_score = model.score is not base.score and model.objective is base.objective
        return "" if has_only_score else self.model.objective(metrics)

    def check(self, config: TrainConfig) -> None:
        if config.train_data.path is None:
            raise InputError(
                "train_data.path: must be a training log, got None. Pass --data PATH (rayrec "
                "generate creates one)."
            )
        if isinstance(self.schema, PlaceholderSchema):
            self.schema.reject(config.train_data.path)
        if self.preprocessor is None and not LogSource.at(config.train_data.path).is_preprocessed:
            inputs = self.preset.inputs(self.schema)
            self.check_categories(inputs)
            self.unpooled(inputs)  # raises InputError for columns that the model cannot take
        check_boosting(config, self.model)
        self._check_labels()
        self.teacher.check()
        self._check_clipping()
        if self.sharding.uvm_caching and self.sparse_optimizer.has_custom_update:
            raise InputError(
                f"workload.sharding.uvm_caching: {self.sparse_optimizer.kind} updates tables "
                "outside fbgemm's kernels, which manage the cache. Set sparse_optimizer.kind to "
                "rowwise_adagrad, adagrad or sgd."
            )

    def check_categories(self, inputs: Schema) -> None:
        """Check that the model inputs have a sparse column, if the model needs one. Raises
        InputError.
        """
        if inputs.sparse or not self.model.needs_categories():
            return
        name = type(self.model).__name__
        classes = {model: models.config_class(model) for model in models.names()}
        fitting = [
            model for model, config in classes.items() if config and not config().needs_categories()
        ]
        raise InputError(
            f"schema: must have a sparse column for {name}. Name a column of categories or "
            "integers in sparse, or choose a --model that learns from numbers alone: "
            f"{', '.join(fitting)}."
        )

    def _check_labels(self) -> None:
        name = type(self.model).__name__
        if len(self.schema.label_names) > 1 and not self.model.SEVERAL_LABELS:
            raise InputError(
                f"schema.labels: must be one label for {name}, got "
                f"{', '.join(self.schema.label_names)}. Leave out labels, or "
                "choose a model with several labels."
            )
        if not self.schema.label_names and self.model.LABELLED:
            raise InputError(
                f"schema.label: must be a column, which {name} learns from, got None. Name it."
            )
        if (
            self.schema.label is None
            and self.schema.labels
            and self.schema.labels[0].missing == "allowed"
        ):
            raise InputError(
                f"schema.labels: main label {self.schema.labels[0].name} must be in every row, got "
                "missing: allowed. Set missing: fault."
            )
        if self.schema.group and self.model.LABELLED and not self.predicts_clicks:
            raise InputError(
                "schema.group: must be None if the main label is not a click, got "
                f"{self.schema.group}. Omit it."
            )
        if self.schema.sample and not self.predicts_clicks:
            raise InputError(
                f"schema.sample: must be None for {name}, which predicts no clicks, got label "
                f"{self.schema.sample.label}. Omit it."
            )
        if self.teacher.checkpoint and not self.predicts_clicks:
            raise InputError(
                f"teacher.checkpoint: must be None for {name}, which predicts no clicks, got "
                f"{self.teacher.checkpoint}. Omit it."
            )

    def _check_clipping(self) -> None:
        if self.max_gradient_norm is None:
            return
        if not self.sparse_optimizer.has_custom_update:
            raise InputError(
                f"workload.max_gradient_norm: {self.sparse_optimizer.kind} updates tables during "
                "the backward pass, before the norm of all gradients is known. Set "
                "sparse_optimizer.kind to adam, adamw or sparse_adam, or clip the network alone "
                "with dense_optimizer.max_gradient_norm."
            )
        if self.dense_optimizer.max_gradient_norm is not None:
            raise InputError(
                "workload.max_gradient_norm and dense_optimizer.max_gradient_norm: the first "
                "clips both. Set one."
            )

    @property
    def predicts_clicks(self) -> bool:
        """Whether the main output is the logit of a binary label."""
        return isinstance(
            self.model.output_heads(ModelInputs.from_schema(self.schema))[0],
            BinaryHead,
        )

    @property
    def logit_offset(self) -> float:
        """Logit of a click among the rows that train, minus that among all rows of the log."""
        return self.schema.sample.logit_offset if self.schema.sample else 0.0

    @property
    def table_schema(self) -> Schema:
        return self.schema if self.schema.sequence is None else self.schema.events

    def split_rows(self, path: str, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Return the row range [start, stop) of each set in a training log. Preprocessed data
        stores them.
        """
        data = LogSource.at(path).dataset()
        return (data and data.sets) or self.preset.split.rows(index)

    def evaluation_data(self, config: TrainConfig) -> DataConfig:
        return config.evaluated_data

    def evaluation_rows(self, config: TrainConfig, index: LogIndex) -> tuple[str, tuple[int, int]]:
        """Return the name and the row range [start, stop) of a run's test rows, or of its
        validation rows if it has no test rows.

        `index` is that of `evaluation_data`.
        """
        if config.eval_data.path is not None:
            return "validation", (0, index.rows)
        assert config.train_data.path is not None
        sets = self.split_rows(config.train_data.path, index)
        name = "test" if "test" in sets else "validation"
        return name, sets[name]

    def unpooled(self, inputs: Schema) -> tuple[str, ...]:
        """Return the columns with unpooled embedding lookups in training."""
        return unpooled_features(self.model, ModelInputs.from_schema(inputs))


def check_grouped(schema: Schema, path: str | None) -> None:
    """Check that evaluation rows are raw if the schema has a group: in preprocessed rows, rare
    categories share an id.
    """
    if schema.group is not None and path is not None and LogSource.at(path).is_preprocessed:
        raise InputError(
            f"schema.group: {path} is preprocessed and has no values of {schema.group}. Evaluate "
            "on a raw log (--eval-data.path), or leave out group."
        )
