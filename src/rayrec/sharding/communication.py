"""Communication volume of a click model's workers per step, and the rows/s that their links
support.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rayrec.humanize import estimate_text, size_text
from rayrec.optim.config import FLOAT_BYTES
from rayrec.sharding.placement import TablePlacement

Exchange = Literal["ids", "embeddings", "gradients", "all_reduce"]
_NAMES: Final[dict[Exchange, str]] = {
    "ids": "ids",
    "embeddings": "embeddings",
    "gradients": "gradients of embeddings",
    "all_reduce": "gradients of what every worker holds",
}
_LENGTH_BYTES: Final = 4
_EXAMPLES_GBIT: Final = (10.0, 100.0, 400.0)


@dataclass(frozen=True)
class LinkBandwidth:
    """Bandwidth between workers in Gbit/s per direction. None is unlimited."""

    network_gbit: float | None = None
    """Bandwidth of each node to other nodes."""
    inside_gbit: float | None = None
    """Bandwidth of each worker to others in its node."""


@dataclass(frozen=True)
class Lookup:
    """Lookup of one feature in a table."""

    ids: float = 1.0
    """Average number of ids per row."""
    pooled: bool = True
    """Whether embeddings are summed before they are sent."""
    weighted: bool = False
    """Whether each id has a float32 weight."""


# Exchanges of a step for each table, per pair of workers:
#
#   ids            worker of a row -> owner of the table
#   embeddings     owner -> worker of the row: pooled sums, or one per id
#   gradients      worker -> owner, as large as the embeddings
#   all_reduce     a ring over all workers: dense weights and data_parallel tables
#
# Links inside a node and between nodes are counted apart, since one of them is the bottleneck.
class ExchangeBytes:
    """Payload bytes of one exchange in a step. Workers are numbered by rank. A node has consecutive
    ranks.
    """

    def __init__(self, num_workers: int, workers_per_node: int) -> None:
        self._nodes = [rank // workers_per_node for rank in range(num_workers)]
        self._sizes = [self._nodes.count(node) for node in range(self._nodes[-1] + 1)]
        self.sent_inside = [0.0] * num_workers
        """Bytes from each worker to others in its node."""
        self.received_inside = [0.0] * num_workers
        self.sent_between = [0.0] * len(self._sizes)
        """Bytes from each node to other nodes."""
        self.received_between = [0.0] * len(self._sizes)

    def add_all_to_all(
        self, rank_bytes: Sequence[float], *, to_owner: bool, inside: bool = True
    ) -> None:
        """Add an exchange in which each worker receives `rank_bytes[rank]` from each other `rank`,
        or sends them with `to_owner`. Without `inside`, only counts workers in other nodes.
        """
        workers = len(self._nodes)
        total = sum(rank_bytes)
        bytes_by_node = [0.0] * len(self._sizes)
        for node, size in zip(self._nodes, rank_bytes, strict=True):
            bytes_by_node[node] += size
        outward, inward = (self.sent_between, self.received_between)[:: -1 if to_owner else 1]
        for node, (size, node_bytes) in enumerate(zip(self._sizes, bytes_by_node, strict=True)):
            outward[node] += node_bytes * (workers - size)
            inward[node] += (total - node_bytes) * size
        if not inside:
            return
        outward, inward = (self.sent_inside, self.received_inside)[:: -1 if to_owner else 1]
        for rank, node in enumerate(self._nodes):
            outward[rank] += rank_bytes[rank] * (self._sizes[node] - 1)
            inward[rank] += bytes_by_node[node] - rank_bytes[rank]

    def add_ring(self, size: float) -> None:
        """Add an exchange in which each worker sends `size` bytes to the next one, and the last one
        to the first.
        """
        workers = len(self._nodes)
        for rank in range(workers if workers > 1 else 0):
            other = (rank + 1) % workers
            node = self._nodes[rank]
            other_node = self._nodes[other]
            if node == other_node:
                self.sent_inside[rank] += size
                self.received_inside[other] += size
            else:
                self.sent_between[node] += size
                self.received_between[other_node] += size

    def add_rings_inside(self, size: float, ranks: Sequence[int]) -> None:
        """Add an exchange in which each of `ranks`, all in one node, sends `size` bytes to the next
        one.
        """
        for rank in ranks:
            self.sent_inside[rank] += size
            self.received_inside[rank] += size

    def seconds(self, links: LinkBandwidth) -> float:
        """Return the duration for the busiest worker and node."""
        duration = 0.0
        if links.network_gbit is not None:
            duration = max(*self.sent_between, *self.received_between) * 8e-9 / links.network_gbit
        if links.inside_gbit is not None:
            duration = max(
                duration, max(*self.sent_inside, *self.received_inside) * 8e-9 / links.inside_gbit
            )
        return duration


@dataclass(frozen=True)
class CommunicationVolume:
    """Communication of all workers in a step: payload, without network protocol headers."""

    rows: int
    """Row count of all workers in a step."""
    flows: Mapping[Exchange, ExchangeBytes]

    def bytes_per_row(self, *names: Exchange) -> tuple[float, float]:
        """Return the bytes that all workers send per row (inside nodes, between nodes) in the named
        exchanges. Default: all.
        """
        flows = [self.flows[name] for name in names or self.flows]
        return sum(sum(flow.sent_inside) for flow in flows) / self.rows, sum(
            sum(flow.sent_between) for flow in flows
        ) / self.rows

    def rows_per_s(self, links: LinkBandwidth) -> float | None:
        """Return the maximum rows/s of all workers, if only exchanges took time, or None without
        limit.
        """
        seconds = self._seconds(links)
        return self.rows / seconds if seconds else None

    def limit(
        self, model_rows_per_s: float, links: LinkBandwidth
    ) -> tuple[float, Literal["model", "network"]]:
        """Return the rows/s of all workers, given the rate with unlimited links, and the larger
        part of the step time. Assumes no overlap between computation and exchange: a step needs
        embeddings before its network computes, and sends their gradients and the gradients of the
        first layers after it.
        """
        computed_s = self.rows / model_rows_per_s
        exchanged_s = self._seconds(links)
        return self.rows / (
            computed_s + exchanged_s
        ), "model" if computed_s >= exchanged_s else "network"

    def _seconds(self, links: LinkBandwidth) -> float:
        """Return the duration of a step's exchanges, sequentially."""
        return sum(flow.seconds(links) for flow in self.flows.values())

    def text(self, links: LinkBandwidth, model_rows_per_s: float | None = None) -> str:
        """Return a summary: bytes per row, the links' rows/s and, if the model's speed is given,
        the training rate.
        """
        if len(self.flows["ids"].sent_inside) == 1:
            return "One worker exchanges nothing."
        inside, between = self.bytes_per_row()
        parts = [
            f"{size_text(sum(self.bytes_per_row(name)))} {_NAMES[name]}" for name in self.flows
        ]
        lines = [
            f"Workers send {size_text(inside + between)} a row ({', '.join(parts)}): "
            f"{size_text(inside)} inside nodes, {size_text(between)} between them."
        ]
        rate_limit = self.rows_per_s(links)
        if rate_limit is not None:
            bandwidths = {"network_gbit": links.network_gbit, "inside_gbit": links.inside_gbit}
            named = ", ".join(
                f"{name}={value:g}" for name, value in bandwidths.items() if value is not None
            )
            lines.append(f"  {'network':8} {estimate_text(rate_limit)} rows/s in all, by {named}")
            if model_rows_per_s is not None:
                rate, limit = self.limit(model_rows_per_s, links)
                lines.append(
                    f"About {estimate_text(rate)} rows/s of the {estimate_text(model_rows_per_s)} "
                    f"that GPUs of gpu_rows_per_s would train; the {limit} takes more of a step."
                )
        if links.network_gbit is None and between:
            rates = ", ".join(
                f"{gbit:g} Gbit/s {estimate_text(self.rows / self._seconds(LinkBandwidth(gbit)))}"
                for gbit in _EXAMPLES_GBIT
            )
            lines.append(
                "The network between nodes is taken for no limit; network_gbit=N in --cluster "
                f"gives each node's link. Links carry, rows/s in all: {rates}."
            )
        return "\n".join(lines)


def estimate_communication(
    tables: Sequence[TablePlacement],
    lookups: Mapping[str, Sequence[Lookup]],
    *,
    num_workers: int,
    workers_per_node: int,
    batch_size: int,
    dense_weights: int,
    exchange_bytes: int = FLOAT_BYTES,
    id_bytes: int = 4,
) -> CommunicationVolume:
    """Estimate the communication of a step with `batch_size` rows per worker. Pure. `lookups`: of
    each table's features. `dense_weights`: weight count of the replicated part. `exchange_bytes`:
    size of an exchanged value of an embedding or its gradient; other gradients are float32. Sums
    over workers use a ring, as in gloo and NCCL. Assumes an even distribution of ids over the parts
    of a row_wise table. Excludes batch norm sums and message sizes, some kB per step.
    """
    flows: dict[Exchange, ExchangeBytes] = {
        name: ExchangeBytes(num_workers, workers_per_node) for name in _NAMES
    }
    ring_factor = 2 * (num_workers - 1) / num_workers
    shared = flows["all_reduce"]
    shared.add_ring(ring_factor * dense_weights * FLOAT_BYTES)
    for table in tables:
        if table.sharding_type == "data_parallel":
            shared.add_ring(ring_factor * table.gradient_bytes)
            continue
        features = lookups[table.table]
        ranks = sorted(table.bytes_of_rank)
        # Parts of a row's ids
        parts = len(ranks) if table.sharding_type in ("row_wise", "table_row_wise") else 1
        # Every part gets lengths
        id_bytes_of_row = sum(
            _LENGTH_BYTES + one.ids / parts * (id_bytes + FLOAT_BYTES * one.weighted)
            for one in features
        )
        flows["ids"].add_all_to_all(
            _values_by_rank(num_workers, dict.fromkeys(ranks, id_bytes_of_row * batch_size)),
            to_owner=True,
        )
        dim = table.embedding_dim * exchange_bytes * batch_size
        pooled = sum(one.pooled for one in features) * dim
        vectors = pooled + sum(one.ids for one in features if not one.pooled) * dim
        _add_vectors(flows["embeddings"], table, pooled, vectors, num_workers, to_owner=False)
        _add_vectors(flows["gradients"], table, pooled, vectors, num_workers, to_owner=True)
    return CommunicationVolume(num_workers * batch_size, flows)


def _add_vectors(
    flow: ExchangeBytes,
    table: TablePlacement,
    pooled: float,
    vectors: float,
    num_workers: int,
    *,
    to_owner: bool,
) -> None:
    """Add the exchange of a table's embeddings, or of their gradients with `to_owner`. `pooled`:
    bytes of the sums. `vectors`: bytes of the sums and the single embeddings.
    """
    ranks = sorted(table.bytes_of_rank)
    if table.sharding_type == "row_wise" and pooled:
        flow.add_ring((num_workers - 1) * pooled)  # Reduce-scatter and all-gather of sums
        vectors -= pooled
    # Sums inside the node, then each worker sends its share to other nodes
    is_within_node = table.sharding_type == "table_row_wise"
    if is_within_node:
        flow.add_rings_inside((len(ranks) - 1) * num_workers / len(ranks) * pooled, ranks)
    vector_bytes = {
        rank: vectors * size / table.total_bytes for rank, size in table.bytes_of_rank.items()
    }
    flow.add_all_to_all(
        _values_by_rank(num_workers, vector_bytes), to_owner=to_owner, inside=not is_within_node
    )


def _values_by_rank(num_workers: int, sizes: Mapping[int, float]) -> list[float]:
    return [sizes.get(rank, 0.0) for rank in range(num_workers)]
