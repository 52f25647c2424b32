"""Tests of communication volumes against numbers computed by hand."""

from typing import Any

import pytest

from rayrec import recipes
from rayrec.models.base import ModelInputs
from rayrec.sharding.communication import CommunicationVolume, LinkBandwidth, Lookup, estimate_communication
from rayrec.sharding.placement import TablePlacement
from rayrec.workloads.recsys.planning import lookups_of

ROWS = 10
"""Batch size per worker."""
ONE_ID = Lookup()


def table(name: str, kind: str, ranks: list[int], *, dim: int = 16, rows: int = 100) -> TablePlacement:
    of_rank = dict.fromkeys(ranks, rows * dim * 4 // (1 if kind == "data_parallel" else len(ranks)))
    return TablePlacement(table=name, num_embeddings=rows, embedding_dim=dim, sharding_type=kind, bytes_of_rank=of_rank)


def traffic(*tables: TablePlacement, lookup: Lookup = ONE_ID, **changes: Any) -> CommunicationVolume:
    settings = {"num_workers": 4, "workers_per_node": 2, "batch_size": ROWS, "dense_weights": 0, "exchange_bytes": 4, **changes}
    return estimate_communication(tables, {one.table: [lookup] for one in tables}, **settings)


def test_table_wise_table_is_requested_by_all_workers() -> None:
    found = traffic(table("a", "table_wise", [0]))
    ids, forward, backward = found.flows["ids"], found.flows["embeddings"], found.flows["gradients"]
    # 10 rows of 16 float32 to each worker: one in the node of worker 0, two in the other.
    assert (forward.sent_inside, forward.received_inside) == ([640, 0, 0, 0], [0, 640, 0, 0])
    assert (forward.sent_between, forward.received_between) == ([1280, 0], [0, 1280])
    assert (backward.sent_inside, backward.received_inside) == (forward.received_inside, forward.sent_inside)
    assert (backward.sent_between, backward.received_between) == ([0, 1280], [1280, 0])
    assert (ids.sent_inside, ids.sent_between) == ([0, 80, 0, 0], [0, 160])  # an id and a length of 4 bytes a row
    assert found.bytes_per_row() == ((640 + 640 + 80) / 40, (1280 + 1280 + 160) / 40)


COLUMNS, BY_ROWS = table("a", "column_wise", [0, 2]), table("a", "row_wise", [0, 1, 2, 3])
SEQUENCE = Lookup(ids=20.0, pooled=False)
RING = ([3 * 640, 0, 3 * 640, 0], [3 * 640] * 2, [3 * 640] * 2)  # each sends three of four parts


@pytest.mark.parametrize(
    ("tables", "lookup", "flow", "sent_inside", "sent_between", "received_between"),
    [
        ([table(str(rank), "table_wise", [rank]) for rank in range(4)], ONE_ID, "embeddings", [640] * 4, [2560] * 2, [2560] * 2),
        # 8 columns of 10 rows to two workers, and the ids from all workers to both.
        ([COLUMNS], ONE_ID, "embeddings", [320, 0, 320, 0], [640, 640], [640, 640]),
        ([COLUMNS], ONE_ID, "ids", [0, 80, 0, 80], [160, 160], [160, 160]),
        ([BY_ROWS], Lookup(ids=2.0), "embeddings", *RING),
        ([BY_ROWS], Lookup(ids=2.0), "gradients", *RING),
        # To each worker the length of each row, and a fourth of its two ids.
        ([BY_ROWS], Lookup(ids=2.0), "ids", [ROWS * (4 + 0.5 * 4)] * 4, [ROWS * (4 + 0.5 * 4) * 4] * 2, [ROWS * 6 * 4] * 2),
        # Half of the sums of 40 rows.
        ([table("a", "table_row_wise", [0, 1])], ONE_ID, "embeddings", [2 * 640, 2 * 640, 0, 0], [1280, 0], [0, 1280]),
        # Unpooled embeddings are sent for each id: by its worker, or a fourth of it by each, to two of the other node.
        ([table("a", "table_wise", [0])], SEQUENCE, "embeddings", [20 * 640, 0, 0, 0], [20 * 1280, 0], [0, 20 * 1280]),
        ([BY_ROWS], SEQUENCE, "embeddings", [20 * 160] * 4, [20 * 640] * 2, [20 * 640] * 2),
    ],
)
def test_exchanges_depend_on_sharding(
    tables: list[TablePlacement], lookup: Lookup, flow: str, sent_inside: Any, sent_between: Any, received_between: Any
) -> None:
    found = traffic(*tables, lookup=lookup).flows[flow]  # type: ignore[index]
    assert (found.sent_inside, found.sent_between, found.received_between) == (sent_inside, sent_between, received_between)


def test_replicated_weights_reduce_in_float32_ring() -> None:
    found = traffic(table("a", "data_parallel", [0, 1, 2, 3]), dense_weights=1000, exchange_bytes=2)
    size = 2 * 3 / 4 * 4 * (1000 + 100 * 16)
    assert found.flows["all_reduce"].sent_between == found.flows["all_reduce"].received_between == [size, size]
    assert found.flows["all_reduce"].sent_inside == [size, 0, size, 0]
    assert not any(found.flows["embeddings"].sent_between)


def test_half_precision_halves_embedding_bytes() -> None:
    found = traffic(table("a", "table_wise", [0]), lookup=Lookup(ids=3.0, weighted=True), exchange_bytes=2)
    assert found.flows["embeddings"].sent_between == [640, 0]
    assert found.flows["ids"].sent_between == [0, 2 * ROWS * (4 + 3 * 8)]


def test_one_worker_sends_no_bytes() -> None:
    found = traffic(table("a", "table_wise", [0]), num_workers=1, workers_per_node=1, dense_weights=1000)
    assert found.bytes_per_row() == (0, 0)
    assert found.rows_per_s(LinkBandwidth(10.0, 10.0)) is None
    assert found.limit(5000.0, LinkBandwidth(10.0)) == (5000.0, "model")
    assert found.text(LinkBandwidth(10.0)) == "One worker exchanges nothing."


def test_links_bound_rows_per_s() -> None:
    found = traffic(table("a", "table_wise", [0]))
    # A step of 40 rows: 1280 bytes forward, as many back, and 160 of ids, one exchange after the other.
    seconds = (1280 + 1280 + 160) * 8 / 1e9
    assert found.rows_per_s(LinkBandwidth(1.0)) == pytest.approx(40 / seconds)
    assert found.rows_per_s(LinkBandwidth(inside_gbit=1.0)) == pytest.approx(40 * 1e9 / 8 / (640 + 640 + 80))
    assert found.rows_per_s(LinkBandwidth(1.0, 1e-3)) == pytest.approx(40 * 1e6 / 8 / (640 + 640 + 80))
    assert found.rows_per_s(LinkBandwidth()) is None


def test_compute_and_exchange_alternate() -> None:
    found = traffic(table("a", "table_wise", [0]), dense_weights=1000)
    exchanged_s = (2560 + 160 + 6000) * 8 / 1e9
    rate, limit = found.limit(40 / (2 * exchanged_s), LinkBandwidth(1.0))
    assert (rate, limit) == (pytest.approx(40 / (3 * exchanged_s)), "model")
    rate, limit = found.limit(40 / (0.5 * exchanged_s), LinkBandwidth(1.0))
    assert (rate, limit) == (pytest.approx(40 / (1.5 * exchanged_s)), "network")
    assert found.limit(1000.0, LinkBandwidth()) == (1000.0, "model")


def test_text_describes_communication() -> None:
    found = traffic(table("a", "table_wise", [0]), dense_weights=1000)
    text = found.text(LinkBandwidth())
    assert "Workers send 702 B a row (6 B ids, 48 B embeddings, 48 B gradients of embeddings, 600 B gradients" in text
    assert "334 B inside nodes, 368 B between them." in text
    assert "is taken for no limit; network_gbit=N in --cluster" in text
    assert "10 Gbit/s 5.73M, 100 Gbit/s 57.3M, 400 Gbit/s 229M." in text
    text = found.text(LinkBandwidth(10.0), 1e6)
    assert "  network  5.73M rows/s in all, by network_gbit=10\n" in text
    assert "About 851k rows/s of the 1M that GPUs of gpu_rows_per_s would train; the model takes more" in text
    assert "no limit" not in text


def test_lookups_of_row() -> None:
    inputs = ModelInputs(2, ("a", "b", "c"), vocabularies=("a", "a", "c"), lists=(("b", 7), ("c", None)), weighted=True)
    workload = recipes.criteo_demo().workload
    found = lookups_of(workload, inputs, None)
    assert found == {"a": [Lookup(1, weighted=True), Lookup(7, weighted=True)], "c": [Lookup(20, weighted=True)]}
    assert lookups_of(workload, inputs, [3, None, 2])["a"] == [Lookup(3, weighted=True), Lookup(7, weighted=True)]
