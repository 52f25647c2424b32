"""A log in a ready-made format, which training, evaluation and prediction use in its place."""

from __future__ import annotations

from typing import Any, Literal

from rayrec.config import InputError
from rayrec.data import preprocess as writing
from rayrec.data.labels import has_labels
from rayrec.data.preprocessor import Preprocessor
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine, raw_index
from rayrec.prepare.vocabulary import count, sets_of


def preprocess(
    path: str,
    *,
    out: str,
    format: Literal["parquet", "npy", "binary", "npz"],
    preprocessor: str | None = None,
    shuffle: Literal["none", "full"] = "none",
    seed: int = 0,
    config: PreparationConfig,
    console: Console,
) -> dict[str, Any]:
    """Writes the log's rows as model inputs into folder `out`, which appears complete or not at all; called again after
    it was interrupted, it goes on where it stopped. The Preprocessor is that of a folder, or counted from the log.

    Raises InputError for an unusable log, a Preprocessor of another schema, a format that cannot hold the rows, or where
    `out` exists.
    """
    given = Preprocessor.load(preprocessor) if preprocessor else None
    if given is not None and given.schema != config.schema:
        raise InputError(
            f"{preprocessor}: made for columns {given.schema.columns}, the log has {config.schema.columns}"
        )
    with console.preparing(), engine(config, console) as running:
        labelled = has_labels(path, config.schema, files=config.files)
        if not labelled and given is None:
            raise InputError(
                f"{path}: has no labels, so it is not for counting categories; name the training log's Preprocessor with "
                "--preprocessor"
            )
        index = raw_index(path, config, running, console, labelled=labelled)
        sets = sets_of(index, config)
        used = given or count(index, sets, config, running, console)
        result = writing.preprocess(
            index,
            preprocessor=used,
            out=out,
            format=format,
            engine=running,
            sets=sets,
            segments_per_task=config.segments_per_block,
            shuffle=shuffle,
            seed=seed,
            labelled=labelled,
            progress=lambda rows: console.progress("preprocess (rows)", rows, index.rows),
            note=console.note,
        )
    return {**result, "preprocessor": used.hash(), "bad_rows": index.faults.total}
