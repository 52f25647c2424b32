"""Golden Preprocessors, batches and positions, bit-identical for all formats, shuffles and kinds of columns.

Regenerate knowingly: RAYREC_WRITE_GOLDEN=1.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import golden_inputs as data
from builders.golden import FOLDER, check_golden
from builders.golden_inputs import SCHEMAS, Log, digests, log_of, order_of

SHUFFLES = ("none", "files", "window", "full")

# Preprocessors --------------------------------------------------------------------------------------------------------
PREPROCESSORS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # case: log, schema, preset, changes of its rules
    **{f"criteo {preset}": ("text", "criteo", preset, {}) for preset in data.PRESETS},
    "criteo hashed": ("text", "criteo", "rayrec", {"max_num_embeddings": 16}),
    "criteo modulo": ("text", "criteo", "mlperf-v1", {"token_modulo": 50}),
    "plain": ("csv", "plain", "rayrec", {}),
    "lists": ("parquet", "lists", "ray-template", {}),
    "shared": ("csv", "shared", "mlperf-v1", {}),
    "everything": ("parquet", "everything", "fuxictr-x1", {}),
    "texts": ("csv", "texts", "torchrec-2024", {"max_num_embeddings": 16}),
    "hashed": ("parquet", "lists", "rayrec", {"max_num_embeddings": 12}),
    "aligned": ("csv", "aligned", "rayrec", {}),
}


@pytest.mark.parametrize("case", PREPROCESSORS)
def test_preprocessor_matches_golden(case: str, tmp_path: Path) -> None:
    kind, schema, preset, changes = PREPROCESSORS[case]
    check_golden("preprocessors", data.encoded(log_of(tmp_path, kind, SCHEMAS[schema](), preset, **changes)), case=case)


# Batches --------------------------------------------------------------------------------------------------------------
SOURCES: dict[str, Callable[[Path], Log]] = {
    "text": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]().replace(group="cat_3")),
    "csv": lambda folder: log_of(folder, "csv", SCHEMAS["everything"]()),
    "parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["everything"]()),
    "binary": lambda folder: log_of(folder, "text", SCHEMAS["criteo"]()),
    "npy": lambda folder: log_of(folder, "parquet", SCHEMAS["plain"]()),
    "npz": lambda folder: data.adopted(folder / "arrays"),
    "preprocessed parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["everything"]().replace(group=None)),
    "hexadecimal csv": lambda folder: log_of(folder, "csv", SCHEMAS["criteo"]()),
    "hexadecimal parquet": lambda folder: log_of(folder, "parquet", SCHEMAS["criteo"]()),
    "buckets": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), "fuxictr-x4"),
    "bags": lambda folder: log_of(folder, "text", SCHEMAS["criteo"](), multi_hot=data.bags()),
}
WRITTEN = {"binary": "binary", "npy": "npy", "preprocessed parquet": "parquet", "buckets": "npy"}
"""Sources that are written in a preprocessed format first."""
PAIRS = [(source, shuffle, 1 + (i + j) % 3) for i, source in enumerate(list(SOURCES)[:7]) for j, shuffle in enumerate(SHUFFLES)]
"""Each format in each order, and each of both with 1, 2 and 3 workers."""
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "hexadecimal csv, large batch": ("hexadecimal csv", {"batch_size": 1000}),
    "hexadecimal parquet, small batches": ("hexadecimal parquet", {"batch_size": 3}),
    "buckets in memory": ("buckets", {"in_memory": True}),
    "bags, two epochs": ("bags", {"epochs": 2}),
    "csv, some unpooled, nine steps": ("csv", {"unpooled": ("history",), "epochs": 3, "max_steps": 9}),
    "parquet, all unpooled": ("parquet", {"unpooled": ("user", "item", "shop", "history", "tags")}),
}


@pytest.fixture(scope="module")
def source_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Log]:
    """Write each log of SOURCES once, and once per written order."""
    made: dict[tuple[str, str], Log] = {}

    def make(source: str, shuffle: str) -> Log:
        if (source, "") not in made:
            made[source, ""] = SOURCES[source](tmp_path_factory.mktemp("log"))
        key = (source, "full" if shuffle == "full" else "none") if source in WRITTEN else (source, "")
        if key not in made:
            out = tmp_path_factory.mktemp("prepared") / "out"
            made[key] = data.prepared(made[source, ""], out, format=WRITTEN[source], shuffle=shuffle)
        return made[key]

    return make


def check_batches(log: Log, case: str, shuffle: str, workers: int, **changes: Any) -> None:
    order = order_of(log, shuffle)
    loaders = [data.click_loader(log, order, rank, workers, **changes) for rank in range(workers)]
    check_golden("batches", digests(loaders), case=case)


@pytest.mark.parametrize(("source", "shuffle", "workers"), PAIRS)
def test_batches_match_golden(source_log: Callable[[str, str], Log], source: str, shuffle: str, workers: int) -> None:
    check_batches(source_log(source, shuffle), f"{source} {shuffle} {workers}", shuffle, workers)


@pytest.mark.parametrize("case", LOADERS)
def test_batches_of_other_loaders_match_golden(source_log: Callable[[str, str], Log], case: str) -> None:
    source, changes = LOADERS[case]
    check_batches(source_log(source, "window"), case, "window", 2, **changes)


# Positions ------------------------------------------------------------------------------------------------------------
MOVES = ((2, 2), (3, 1), (3, 1), (1, 3))
"""Workers and the steps that they take from where those before stopped."""


def resumed(make: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    """Return states, tallies and batches of workers that resume with varying numbers of workers."""
    state, moves = None, []
    for workers, steps in MOVES:
        loaders = [make(rank, workers, state=state, max_steps=steps, **changes) for rank in range(workers)]
        rows = [loaders[0].rows(step) for step in range(steps + 1)]
        batches = digests(loaders)["batches"]
        states = [loader.state() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
        tally = loaders[0].trained_rows()
        moves.append({"state": state, "rows": rows, "behind": [tally.rows, *tally.checksums], "batches": batches})
    whole = make(0, 2, state=state)
    return {"moves": moves, "left": [whole.steps, whole.steps_per_epoch, whole.rows(whole.steps)]}


RESUMED = [("text", "window"), ("text", "none"), ("parquet", "files"), ("npy", "full"), ("csv", "window")]


@pytest.mark.parametrize(("source", "shuffle"), RESUMED)
def test_click_positions_match_golden(source_log: Callable[[str, str], Log], source: str, shuffle: str) -> None:
    log = source_log(source, shuffle)
    order = order_of(log, shuffle)

    def make(rank: int, workers: int, **changes: Any) -> Any:
        return data.click_loader(log, order, rank, workers, batch_size=25 + workers // 3, epochs=2, **changes)

    check_golden("positions", {"order": order.identity, **resumed(make)}, case=f"{source} {shuffle}")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_row_positions_match_golden(shuffle: str) -> None:
    evaluated = digests([data.row_loader(shuffle, rank, 3, epochs=1, small_steps=True) for rank in range(3)])
    check_golden("positions", {"evaluated": evaluated, **resumed(partial(data.row_loader, shuffle))}, case=f"rows {shuffle}")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_identity_of_order_matches_golden(shuffle: str) -> None:
    order = data.made_up_order(shuffle)
    blocks = [[block.order().tolist() for block in order.blocks(epoch)] for epoch in range(2)]
    check_golden("positions", {"order": order.identity, "blocks": blocks}, case=f"made-up {shuffle}")


CASES = {
    "preprocessors": set(PREPROCESSORS),
    "batches": {*(f"{source} {shuffle} {workers}" for source, shuffle, workers in PAIRS), *LOADERS},
    "positions": {
        *(f"{source} {shuffle}" for source, shuffle in RESUMED),
        *(f"{kind} {shuffle}" for kind in ("rows", "made-up") for shuffle in SHUFFLES),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_golden_has_present_cases_only(name: str) -> None:
    assert set(json.loads((FOLDER / f"{name}.json").read_text())) == CASES[name]
