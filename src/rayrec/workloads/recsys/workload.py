"""Click model workload: sharded embedding tables with a replicated network."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import (
    PREPROCESSOR_FOLDER,
    Preprocessor,
    stored_schema,
)
from rayrec.data.encoding.presets import Preset
from rayrec.data.engine import Shared, TaskContext
from rayrec.data.log_source import LogSource, index_log
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.splits import Split
from rayrec.ingest.block_order import BlockOrder
from rayrec.schema import PlaceholderSchema, Schema
from rayrec.workloads.base import RunContext, TrainConfig, WarmStart, WorkerContext, WorkerSetup
from rayrec.workloads.recsys.boosting_settings import reject_plan, with_rounds
from rayrec.workloads.recsys.candidates import TargetCheck, check_candidates
from rayrec.workloads.recsys.distillation import RECORD as TEACHER_RECORD
from rayrec.workloads.recsys.distillation import Teacher, open_teacher
from rayrec.workloads.recsys.row_sample import RECORD as SAMPLE_RECORD
from rayrec.workloads.recsys.row_sample import sample_order
from rayrec.workloads.recsys.settings import ClickSettings, Prepared, check_grouped
from rayrec.workloads.run_config import DataConfig

if TYPE_CHECKING:
    from rayrec.checkpoint import Checkpoint
    from rayrec.data.encoding.counts import CountingIndexer
    from rayrec.data.log_source import TextIndexer
    from rayrec.workloads.base import (
        LocalTrainer,
        MeasuredSpeed,
        ScoringContext,
        Target,
        TrainLoader,
    )
    from rayrec.workloads.scoring import Scoring


@dataclass(frozen=True, kw_only=True)
class ClickWorkload(ClickSettings):
    """Training of a click model on a click log."""

    WORKER_MODULES: ClassVar[tuple[str, ...]] = ("rayrec.workloads.recsys.worker",)

    # -- on the driver

    def adapted(self, config: TrainConfig) -> TrainConfig:
        """Use the schema of adopted data, whose encoding differs from the recipe's preset, and
        `tokens` and order of the log. Set the version of a table, and the steps of boosted trees.
        """
        config = with_rounds(_with_versions(config), self.model)
        path = config.train_data.path
        if path is None:
            return config
        source = LogSource.at(path, config.train_data.files)
        schema = self.schema
        data_preprocessor = source.preprocessor()
        if data_preprocessor is None:
            schema = schema.with_ages(reads_ages=self.model.reads_ages)
        else:  # The rows have ages or not
            schema = schema.with_ages_of(stored_schema(data_preprocessor))
        if schema.sequence is not None:
            split = Split(kind="named_files")  # The parts of the lists
            preset = self.preset.replace(split=split)
            return config.replace(workload=self.replace(schema=schema, preset=preset))
        # A placeholder stays one, so that `check` rejects it
        if not isinstance(schema, PlaceholderSchema):
            schema = source.schema(schema, preprocessor=self.preprocessor)
        if schema.to_dict() != self.schema.to_dict():  # Equality leaves out the order
            return config.replace(workload=self.replace(schema=schema))
        data = source.dataset()
        if data is None or not data.adopted:
            return config
        schema = Preprocessor.load(data.preprocessor).schema.replace(
            group=self.schema.group,
            sample=self.schema.sample,
        )
        preset = Preset(
            name=data.manifest["preset"],
            dense="identity",
            dense_standardized=False,
            split=self.preset.split,
        )
        return config.replace(workload=self.replace(schema=schema, preset=preset))

    def check_data(self, config: TrainConfig) -> None:
        if config.train_data.path is not None and isinstance(self.schema, PlaceholderSchema):
            self.schema.reject(config.train_data.path)
        check_grouped(self.schema, config.evaluated_data.path)
        if self.schema.sequence is not None and config.eval_data.path is not None:
            raise InputError(
                "eval_data.path: must be None with events, whose split holds out the rows to "
                f"evaluate, got {config.eval_data.path}. Leave it out, or set split of the schema"
            )
        if self.preprocessor is not None:
            Preprocessor.load(self.preprocessor)
        for data in (config.train_data, config.eval_data):
            if data.path is not None:
                LogSource.at(data.path, data.files).check_head(
                    self.schema,
                    max_bad_fraction=config.max_bad_fraction,
                )

    def list_data(self, path: str, names: Sequence[str]) -> list[storage.File]:
        source = LogSource.at(path, names)
        lists = None if self.schema.sequence is None else source.existing_lists()
        return (lists or source).list_files()

    def prepare(self, context: RunContext) -> Prepared:
        from rayrec.data.encoding.counts import CountingIndexer

        if importlib.util.find_spec("torchrec") is None:
            raise InputError(
                "torchrec is not installed, which click models require. `rayrec doctor` prints "
                "the fix."
            )
        config = context.config
        assert config.train_data.path is not None
        self.preset.check(self.schema)
        if config.train_data.shuffle == "full":
            data = LogSource.at(config.train_data.path).dataset()
            if data is None or data.manifest["shuffle"] != "full":
                raise InputError(
                    f"train_data.shuffle: must be window, because {config.train_data.path} is not "
                    f"fully shuffled, got full. Run `rayrec preprocess {config.train_data.path} "
                    "--shuffle full --split ... --out DIR` and train on its output, or set window."
                )
        folder = storage.join(context.folder, PREPROCESSOR_FOLDER)
        with CountingIndexer(
            self.preset.counting(self._schema_to_fit(config)),
            lambda index: self._counted_rows(index, config),
            memory_bytes=self.vocabulary_memory_bytes,
        ) as counting:
            return self._prepare(context, folder, counting)

    def _schema_to_fit(self, config: TrainConfig) -> Schema:
        """Return the schema with the constants of a checkpoint to continue, whose weights are of
        its categories and numbers.
        """
        if config.init_from is None or not self.schema.program.unfitted:
            return self.schema
        from rayrec.checkpoint import open_checkpoint
        from rayrec.data.encoding.fitting import with_constants_of

        return with_constants_of(self.schema, stored_schema(open_checkpoint(config.init_from).path))

    def _prepare(self, context: RunContext, folder: str, counting: CountingIndexer) -> Prepared:
        from rayrec.data.encoding.preprocessor import put_preprocessor

        config = context.config
        assert config.train_data.path is not None
        teacher = open_teacher(self.teacher, run=context.folder)
        has_preprocessor = self.preprocessor or teacher or _resumes(folder)
        index = self.open_index(
            config.train_data,
            context,
            index_text=index_log if has_preprocessor else counting.index,
        )
        bad_rows = index.faults.total
        if config.eval_data.path is None:
            rows = self.split_rows(config.train_data.path, index)
            evaluated = index
            best_auroc = _best_auroc(config.train_data.path, index, rows.get("test"))
        else:
            evaluated = self.open_index(config.eval_data, context, index_text=index_log)
            bad_rows += evaluated.faults.total
            rows = {"train": (0, index.rows), "validation": (0, evaluated.rows)}
            best_auroc = None
        in_order = config.eval_data.replace(shuffle="none")
        eval_sets = {
            name: _order(evaluated, rows[name], in_order, 0) for name in rows if name != "train"
        }
        train = _order(index, rows["train"], config.train_data, config.seed)
        preprocessor = self._preprocessor(folder, index, context, teacher, counting)
        context.stopwatch.lap("vocabulary")
        self.check_categories(preprocessor.inputs)
        if preprocessor.schema != self.schema:
            raise InputError(
                f"the Preprocessor's {self.schema.difference(preprocessor.schema)}. Use its schema "
                "and tables, or count the vocabulary again"
            )
        preprocessor = preprocessor.grouped_by(self.schema.group)
        all_rows = train.rows
        train = self._sampled(train, index, preprocessor.schema, context)
        check_candidates(self.model, preprocessor, note=context.note)
        shared = put_preprocessor(preprocessor, context.engine)
        self._check_targets(context, shared, {"train": train, **eval_sets})
        return Prepared(
            preprocessor=shared,
            preprocessor_hash=preprocessor.hash(),
            inputs=preprocessor.inputs,
            num_embeddings=preprocessor.num_embeddings,
            sets={"train": train, **eval_sets},
            bad_rows=bad_rows,
            folder=folder,
            best_auroc=best_auroc,
            teacher=teacher,
            sampled_out=all_rows - train.rows,
        )

    def _sampled(
        self,
        train: BlockOrder,
        index: LogIndex,
        schema: Schema,
        context: RunContext,
    ) -> BlockOrder:
        """Return the order of the training rows that train."""
        if self.schema.sample is None:
            return train
        order = sample_order(
            train,
            index,
            self.schema.sample,
            schema=schema,
            engine=context.engine,
            folder=context.folder,
            progress=context.progress,
        )
        context.stopwatch.lap("sample")
        context.note(
            f"{context.config.train_data.path}: training on {order.rows:,} of {train.rows:,} rows, "
            f"{self.schema.sample.keep:.4g} of those with label {self.schema.sample.label}"
        )
        return order

    def _check_targets(
        self,
        context: RunContext,
        preprocessor: Shared[Preprocessor],
        sets: Mapping[str, BlockOrder],
    ) -> None:
        targets = TargetCheck(self.model, preprocessor)
        config = context.config
        for name, order in sets.items():
            path = (
                config.train_data.path
                if name == "train"
                else config.eval_data.path or config.train_data.path
            )
            targets.check(order, name=name, path=str(path), engine=context.engine)

    def discard(self, folder: str) -> None:
        storage.remove_folder(storage.join(folder, PREPROCESSOR_FOLDER))
        for record in (TEACHER_RECORD, SAMPLE_RECORD):
            storage.remove_file(storage.join(folder, record))

    def open_index(
        self,
        data: DataConfig,
        context: RunContext,
        *,
        index_text: TextIndexer,
    ) -> LogIndex:
        """Return the index of a log, cached in the storage path."""
        assert data.path is not None
        cache_folder = storage.join(storage.absolute(context.config.storage_path), ".cache")
        index = LogSource.at(data.path, data.files).index(
            self.schema,
            segment_bytes=data.segment_bytes,
            context=TaskContext(
                context.engine,
                cache_folder,
                context.note,
                context.progress,
                context.warn,
            ),
            max_bad_fraction=context.config.max_bad_fraction,
            index_text=index_text,
        )
        context.stopwatch.lap("index")
        return index

    def _counted_rows(self, index: LogIndex, config: TrainConfig) -> tuple[int, int]:
        """Return the training row range [start, stop) to build the vocabulary from."""
        assert config.train_data.path is not None
        if self.preset.counted == "all" or config.eval_data.path is not None:
            return 0, index.rows
        return self.split_rows(config.train_data.path, index)["train"]

    def _preprocessor(
        self,
        folder: str,
        index: LogIndex,
        context: RunContext,
        teacher: Teacher | None,
        counting: CountingIndexer,
    ) -> Preprocessor:
        path = context.config.train_data.path
        assert path is not None
        if _resumes(folder):
            return Preprocessor.load(folder)
        preprocessor = self._configured_preprocessor(path, teacher) or self._build_preprocessor(
            index,
            context,
            counting,
        )
        preprocessor = self._with_names(preprocessor, index, context)
        preprocessor.save(folder)
        return preprocessor

    def _with_names(
        self,
        preprocessor: Preprocessor,
        index: LogIndex,
        context: RunContext,
    ) -> Preprocessor:
        """Return the Preprocessor of a retrieval model with the texts of its candidates."""
        from rayrec.data.encoding.name_search import find_names
        from rayrec.workloads.recsys.candidates import named_column

        column = named_column(self.model, preprocessor)
        if column is None or index.is_preprocessed:
            return preprocessor
        rows = self._counted_rows(index, context.config)
        parts = tuple(index.parts(*rows))
        names = find_names(preprocessor, column, parts, engine=context.engine)
        if names is None:
            context.note(
                f"{context.config.train_data.path}: has not all categories of column {column} in "
                "the vocabulary, so predictions have the tokens of items, not their texts"
            )
            return preprocessor
        return preprocessor.with_names(names)

    def _configured_preprocessor(self, path: str, teacher: Teacher | None) -> Preprocessor | None:
        """Return the Preprocessor of preprocessed data, teacher or configuration, or None. Raises
        InputError if they differ.
        """
        data_preprocessor = LogSource.at(path).preprocessor()
        folders = {} if data_preprocessor is None else {path: data_preprocessor}
        if teacher is not None:
            folders[teacher.checkpoint] = storage.join(teacher.checkpoint, PREPROCESSOR_FOLDER)
        if self.preprocessor is not None:
            folders[self.preprocessor] = self.preprocessor
        first = ""
        preprocessor = None
        for source, folder in folders.items():
            other = Preprocessor.load(folder)
            if preprocessor is None:
                first = source
                preprocessor = other
            elif other.hash() != preprocessor.hash():
                raise InputError(
                    f"{source}: Preprocessor {other.hash()} does not match {preprocessor.hash()} "
                    f"of {first}. Leave out --workload.preprocessor, or preprocess the log again."
                )
        if preprocessor is None or data_preprocessor is not None:
            return preprocessor
        return preprocessor.with_ages_of(self.schema)

    def _build_preprocessor(
        self,
        index: LogIndex,
        context: RunContext,
        counting: CountingIndexer,
    ) -> Preprocessor:
        from rayrec.data.encoding.counts import find_problems, find_trends
        from rayrec.data.encoding.presets import make_preprocessor

        start, stop = self._counted_rows(index, context.config)
        with counting.counts(
            index,
            engine=context.engine,
            progress=lambda rows: context.progress("vocabulary", rows, stop - start),
        ) as counts:
            for problem in find_problems(counts, self.preset.inputs(self.schema)):
                context.note(f"{context.config.train_data.path}: {problem}")
            if spilled := counts.spilled():
                context.note(f"{spilled}. --workload.vocabulary-memory-bytes sets the limit.")
            preprocessor = make_preprocessor(self.preset, counting.schema, counts)
            for trend in find_trends(counts, self.preset.inputs(self.schema)):
                context.note(f"{context.config.train_data.path}: {trend}")
        if context.config.init_from is None:
            return preprocessor
        return self._continued(preprocessor, context.config.init_from, context)

    def _continued(
        self,
        preprocessor: Preprocessor,
        init_from: str,
        context: RunContext,
    ) -> Preprocessor:
        """Return the Preprocessor with the inputs of the network in `init_from`, whose weights have
        no place for others.
        """
        from rayrec.checkpoint import open_checkpoint
        from rayrec.data.encoding.extension import add_indicators
        from rayrec.workloads.recsys.scorer import load_preprocessor

        continued, lost = add_indicators(
            load_preprocessor(open_checkpoint(init_from).path),
            preprocessor,
        )
        if lost:
            context.note(
                f"init_from {init_from}: the model has no inputs for missing numbers of "
                f"{', '.join(lost)}, which are their mean. Train without init_from to add the "
                "inputs."
            )
        return continued

    def summarize(self, prepared: Prepared, metrics: dict[str, float]) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "bad_rows": prepared.bad_rows,
            "preprocessor": prepared.preprocessor_hash,
            "rows_of_sets": {name: order.rows for name, order in prepared.sets.items()},
        }
        if self.schema.sample is not None:
            summary["sampled_out"] = prepared.sampled_out
        if prepared.best_auroc is not None and "auroc" in metrics:
            summary["best_auroc"] = prepared.best_auroc
            summary["share_of_best_auroc"] = (metrics["auroc"] - 0.5) / (prepared.best_auroc - 0.5)
        return summary

    def checkpoint_files(self, prepared: Prepared) -> dict[str, bytes | str]:
        files = storage.files_in(prepared.folder)
        return {
            storage.join(PREPROCESSOR_FOLDER, storage.name_of(file.path)): file.path
            for file in files
        }

    def plan(
        self,
        config: TrainConfig,
        *,
        target: Target | None = None,
        tables: Sequence[int] | None = None,
    ) -> str:
        from rayrec.workloads.recsys.planning import plan

        reject_plan(self.model)
        preprocessor = None if tables is not None else self._available_preprocessor(config)
        if preprocessor is not None:
            return plan(
                self,
                config,
                preprocessor.num_embeddings,
                inputs=preprocessor.inputs,
                hotness=preprocessor.hotness,
                target=target,
            )
        tables = tables or self.preset.num_embeddings
        if tables is not None:
            inputs = self.preset.inputs(self.schema)
            if len(tables) != len(inputs.sparse):
                raise InputError(
                    f"plan: must have one table size per sparse column ({len(inputs.sparse)}), "
                    f"got {len(tables)}"
                )
            return plan(self, config, list(tables), inputs=inputs, target=target)
        raise InputError(
            "plan: table sizes require a Preprocessor. Create one with `rayrec vocabulary PATH "
            "--out DIR` and pass --workload.preprocessor DIR, or set the sizes (rows) with "
            "--tables mlperf or --tables 1000,200,..."
        )

    def _available_preprocessor(self, config: TrainConfig) -> Preprocessor | None:
        """Return the configured Preprocessor, or the Preprocessor of preprocessed data."""
        path = config.train_data.path
        folder = self.preprocessor or (LogSource.at(path).preprocessor() if path else None)
        return None if folder is None else Preprocessor.load(folder)

    def probe_speed(
        self,
        config: TrainConfig,
        *,
        target: Target,
        local_workers: int,
        cuda: bool,
        train: LocalTrainer,
    ) -> MeasuredSpeed:
        from rayrec.workloads.recsys.planning import probe_speed

        reject_plan(self.model)
        return probe_speed(
            self,
            config,
            target=target,
            local_workers=local_workers,
            cuda=cuda,
            train=train,
        )

    def warm_start(
        self,
        context: RunContext,
        prepared: Prepared,
        checkpoint: Checkpoint,
    ) -> WarmStart:
        from rayrec.workloads.recsys.warm_start import warm_start

        return warm_start(self, context, prepared, checkpoint)

    # -- on each worker

    def make_loader(
        self,
        context: WorkerContext,
        prepared: Prepared,
        *,
        state: dict[str, Any] | None,
        step: int,
    ) -> TrainLoader:
        from rayrec.workloads.recsys.worker import train_loader

        return train_loader(context, prepared, state=state, step=step)

    def set_up(self, context: WorkerContext, prepared: Prepared) -> WorkerSetup:
        from rayrec.workloads.recsys.worker import set_up

        return set_up(self, context, prepared)

    # -- for scoring

    def open_scoring(self, context: ScoringContext) -> Scoring:
        from rayrec.workloads.recsys.scoring import open_scoring

        return open_scoring(self, context)


def _with_versions(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the current versions of tables in its paths, which a resumed
    run reads again.
    """
    for name in ("train_data", "eval_data"):
        data = getattr(config, name)
        if data.path is not None:
            path = LogSource.at(data.path, data.files).pinned()
            config = config if path == data.path else config.updated({name: {"path": path}})
    return config


def _resumes(folder: str) -> bool:
    """Return whether the run already has a Preprocessor."""
    return storage.exists(storage.join(folder, "preprocessor.json"))


def _order(index: LogIndex, rows: tuple[int, int], data: DataConfig, seed: int) -> BlockOrder:
    return BlockOrder(tuple(index.parts(*rows)), data.shuffle, seed, data.segments_per_block)


def _best_auroc(path: str, index: LogIndex, test: tuple[int, int] | None) -> float | None:
    """Return the best AUROC of the test rows from truth.json next to a generated log, or None if
    unknown.
    """
    for folder in () if index.format == "random" else (path, storage.parent_folder(path)):
        path_of_truth = storage.join(folder, "truth.json")
        if storage.exists(path_of_truth):
            truth = storage.read_json(path_of_truth)
            test_truth = truth["split"]["test"]
            return (
                test_truth["auroc"]
                if (index.rows - test_truth["rows"], truth["rows"]) == test
                else None
            )
    return None
