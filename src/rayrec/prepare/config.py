"""Options and engine startup shared by the commands that prepare logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge

from rayrec import host_resources, storage
from rayrec.bounds import Count
from rayrec.config import Config, InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset, by_name
from rayrec.data.engine import Engine, TaskContext, TaskPlacement, ThreadEngine
from rayrec.data.log_source import LogSource, TextIndexer, index_log
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.splits import Kind, Split, SplitParts, check_parts
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.spark_engine import SparkConfig
from rayrec.observe.console import Console
from rayrec.schema import PlaceholderSchema, Schema
from rayrec.storage import cache


@dataclass(frozen=True, kw_only=True)
class PreparationConfig(Config):
    """Options for reading and preparing a log."""

    RENAMED: ClassVar[Mapping[str, str]] = {"profile": "preset"}

    preset: str = "rayrec"
    """Preset name: rules for missing values, numbers, categories and the split."""
    min_count: int | None = None
    """Minimum count of a category; rarer ones share an ID. None uses the preset's value."""
    max_num_embeddings: int | None = None
    """Maximum rows of a table. None uses the preset's value."""
    token_modulo: int | None = None
    """Modulo applied to categories first. None uses the preset's value."""
    schema: Schema = SCHEMA
    """Columns of the log. Criteo's by default."""
    files: tuple[str, ...] = ()
    """Names of the files to read, in this order, each plain, .gz or .parquet. Empty reads all files
    of the folder.
    """
    split: Literal["none"] | Kind = "none"
    """Which rows to hold out. Presets that count only training rows skip them. none holds out no
    rows. For events, `split` of the schema decides.
    """
    parts: SplitParts = field(default_factory=SplitParts)
    """Sizes of the parts, for --split fraction, days and named_days."""
    engine: Literal["auto", "threads", "ray", "spark", "spark-on-ray"] = "auto"
    """Execution engine, with identical results. auto: threads of this process, or ray if an
    address, RAY_ADDRESS or a connection of this process specifies a Ray cluster.
    """
    spark: SparkConfig = field(default_factory=SparkConfig)
    """Options of the Spark engines."""
    memory_bytes: int | None = None
    """Memory for category counts, in bytes; more are spilled to disk. None: a quarter of the
    available memory.
    """
    block_bytes: Annotated[int, Ge(1 << 16)] = 32 << 20
    """Bytes per block, as in training. The same value yields the same batches from preprocessed
    data as from the raw log.
    """
    segments_per_block: Count = 16
    """Number of log segments per block, as in training."""
    max_bad_fraction: float = 0.001
    """Maximum fraction of invalid rows."""
    address: str | None = None
    """Address of a running Ray cluster. None: RAY_ADDRESS, else, with engine ray, a local Ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "threads" and self.address is not None:
            raise InputError(
                "engine threads: must not be used with address, because it runs in this process"
            )
        check_parts(self.split, self.parts)
        if self.memory_bytes is not None and self.memory_bytes < 16 << 20:
            raise InputError(
                f"memory_bytes: {self.memory_bytes} is below 16 MiB, which counting needs at least"
            )

    def adapted(self, path: str, *, preprocessor: str | None = None) -> PreparationConfig:
        """Return a copy with `tokens` and column order of a log, see `LogSource.schema`, other than
        of events. Raises InputError for the placeholder of a recipe.
        """
        if isinstance(self.schema, PlaceholderSchema):
            self.schema.reject(path)
        if self.schema.sequence is not None:
            return self  # As in training, since lists have another order than their events
        return self.replace(
            schema=LogSource.at(path, self.files).schema(self.schema, preprocessor=preprocessor)
        )

    @property
    def rules(self) -> Preset:
        """Return the preset with the overrides of this config."""
        preset = self._named_preset()
        changes = {
            name: value
            for name in ("min_count", "max_num_embeddings", "token_modulo")
            if (value := getattr(self, name)) is not None
        }
        if self.split_of_lists is not None:
            changes["split"] = self.split_of_lists
        return preset.replace(**changes)

    @property
    def split_of_lists(self) -> Split | None:
        """Return the rule for held-out rows. None if there are none."""
        if self.schema.sequence is not None:
            return Split(kind="named_files")  # The parts of the lists
        if self.split == "none":
            return None
        test_first = self._named_preset().split.test_first
        return Split(kind=self.split, test_first=test_first, **vars(self.parts))

    def _named_preset(self) -> Preset:
        return by_name(self.preset)

    @property
    def segment_bytes(self) -> int:
        return max(self.block_bytes // self.segments_per_block, 1)


@dataclass(frozen=True, kw_only=True)
class RecipePreparation(PreparationConfig):
    """Options of a recipe, whose preset may differ from the one with its name."""

    rules_of_recipe: Preset
    """Preset of the recipe."""

    @classmethod
    def from_preset(cls, preset: Preset, **options: Any) -> Self:
        """Return the options for the preset of a recipe and its split."""
        split = preset.split
        parts = SplitParts(
            **{field.name: getattr(split, field.name) for field in fields(SplitParts)}
        )
        return cls(
            rules_of_recipe=preset, preset=preset.name, split=split.kind, parts=parts, **options
        )

    def _named_preset(self) -> Preset:
        return (
            self.rules_of_recipe
            if self.preset == self.rules_of_recipe.name
            else by_name(self.preset)
        )


@contextmanager
def engine(
    config: PreparationConfig, console: Console, *, paths: Sequence[str] = ()
) -> Iterator[Engine]:
    """Start the engine that `config` selects, and stop what was started. Raises InputError if the
    nodes of a running Ray cluster cannot reach the stores of `paths`, which tasks read or write.
    """
    from rayrec.cluster import connection

    if config.engine == "threads" or (
        config.engine == "auto" and connection.is_in_process(config.address)
    ):
        yield ThreadEngine(host_resources.usable_cpus())
        return
    if config.engine in ("auto", "ray"):
        from rayrec.cluster.node_storage import require_reachable
        from rayrec.ingest.ray_engine import RayEngine

        connection.connect(config.address)
        if not connection.is_local_ray():
            require_reachable((*paths, cache.folder()))
        yield RayEngine(TaskPlacement())
        return
    from rayrec.ingest.spark_engine import SparkEngine

    address = connection.connect(config.address) if config.engine == "spark-on-ray" else None
    with SparkEngine.started(
        config.spark,
        ray_address=address,
        cache_folder=storage.absolute(cache.folder()),
        note=console.note,
    ) as spark:
        yield spark


def raw_index(
    path: str,
    config: PreparationConfig,
    engine: Engine,
    console: Console,
    *,
    labelled: bool = True,
    index_text: TextIndexer = index_log,
) -> LogIndex:
    """Index a raw log, using `index_text` for text that is not in the cache. Raises InputError for
    an unusable log.
    """
    source = LogSource.at(path, config.files)
    source.require_raw()
    return source.index(
        config.schema if labelled else config.schema.unlabelled(),
        segment_bytes=config.segment_bytes,
        context=task_context(engine, console),
        max_bad_fraction=config.max_bad_fraction,
        index_text=index_text,
    )


def reject_options(options: object, default: object, why: str, *, but: Sequence[str] = ()) -> None:
    """Reject options that differ from their defaults, except those in `but`, which the command
    reads. Raises InputError.
    """
    for name, value in vars(options).items():
        if name not in but and value != getattr(default, name):
            raise InputError(f"--{name.replace('_', '-')}: {why}. Remove it")


def load_matching_preprocessor(folder: str | None, schema: Schema) -> Preprocessor | None:
    """Load the Preprocessor in a folder, if specified. Raises InputError if its schema differs from
    the log's.
    """
    preprocessor = Preprocessor.load(folder) if folder else None
    if preprocessor is not None and preprocessor.schema != schema:
        raise InputError(f"{folder}: {schema.difference(preprocessor.schema)}")
    return preprocessor


def task_context(engine: Engine, console: Console) -> TaskContext:
    """Return the task context of a command outside a run."""
    return TaskContext(
        engine, storage.absolute(cache.folder()), console.note, console.progress, console.warn
    )
