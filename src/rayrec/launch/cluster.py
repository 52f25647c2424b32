"""Reaches a Ray cluster, or starts a local one, and decides what of it trains and what of it prepares data."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from rayrec.config import InputError
from rayrec.data.placement import TaskPlacement

_OBJECT_STORE_SHARE = 0.25
"""Part of the cluster's object store that ingest may fill ahead of training; the rest holds vocabularies and slack."""


@dataclass(frozen=True)
class Node:
    """One alive node of a cluster."""

    node_id: str
    resources: dict[str, float]


@dataclass(frozen=True)
class Layout:
    """How a run shares out a cluster."""

    cpus_per_worker: float
    worker_resources: dict[str, float]
    """What each training worker reserves."""
    per_worker: TaskPlacement
    """What each worker's data pipeline may use while training."""
    driver: TaskPlacement
    """What data tasks may use while no worker runs."""


def connect(address: str | None, *, num_cpus: int | None, object_store_bytes: int | None, log_to_driver: bool) -> str:
    """Connects this process to Ray and says where to: an existing connection, `address`, RAY_ADDRESS, or a new local
    Ray. Raises InputError where the address does not answer."""
    # Ray 2.60 turns token authentication on for clusters it starts; the token file serves this user alone.
    import ray

    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    address = address or os.environ.get("RAY_ADDRESS")
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address and address != "local":
        try:
            ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0]
            raise InputError(
                f"{address}: no Ray cluster answers there ({why}); start one or leave the address out"
            ) from None
    else:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    import ray.data  # sets up its own logger, which is then quietened

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray.get_runtime_context().gcs_address


def connect_for_data(address: str | None) -> TaskPlacement:
    """Connects to Ray for work that has no training beside it; returns where its data tasks may run."""
    connect(address, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    return TaskPlacement(num_cpus=1.0)


def alive_nodes() -> list[Node]:
    import ray

    return [Node(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def layout(
    nodes: list[Node],
    *,
    num_workers: int,
    use_gpu: bool,
    cpus_per_worker: float | None,
    resources_per_worker: dict[str, float],
    keep_data_off_workers: bool,
) -> Layout:
    """Shares out a cluster: what a worker reserves, where data tasks may run and how many CPUs each pipeline gets. Pure.

    Where some nodes have what workers need (GPUs, or the named resources) and others do not, data tasks go to the
    others. Raises InputError where workers do not fit, or where they would leave data tasks no CPU.
    """
    wanted = dict(resources_per_worker)
    if use_gpu:
        wanted.setdefault("GPU", 1.0)
    special = {name for name in wanted if name != "CPU"}
    training = [node for node in nodes if all(node.resources.get(name, 0) >= wanted[name] for name in special)]
    if not training:
        have = {name: sum(node.resources.get(name, 0) for node in nodes) for name in sorted(special)}
        raise InputError(
            f"scaling: a worker needs {wanted}, but the cluster has {have}; change scaling.use_gpu or resources_per_worker"
        )
    others = [node for node in nodes if node not in training] if special else []
    apart = bool(others) and keep_data_off_workers and sum(node.resources.get("CPU", 0) for node in others) > 0
    training_cpus = sum(node.resources.get("CPU", 0) for node in training)
    if cpus_per_worker is None:
        cpus_per_worker = 1.0 if use_gpu or apart else min(1.0, training_cpus / (2 * num_workers))
    for name in special:
        have_now = sum(node.resources[name] for node in training)
        if have_now < wanted[name] * num_workers:
            raise InputError(
                f"scaling: {num_workers} workers need {wanted[name] * num_workers:g} {name}, the cluster has {have_now:g}; "
                "lower --scaling.num-workers or add nodes"
            )
    if cpus_per_worker * num_workers > training_cpus:
        raise InputError(
            f"scaling: {num_workers} workers reserve {cpus_per_worker * num_workers:g} CPUs, the cluster has {training_cpus:g} "
            "for them; lower --scaling.num-workers or --scaling.cpus-per-worker"
        )
    data_nodes = others if apart else nodes
    cluster_cpus = sum(node.resources.get("CPU", 0) for node in nodes)
    all_data_cpus = sum(node.resources.get("CPU", 0) for node in data_nodes)
    free = all_data_cpus if apart else cluster_cpus - cpus_per_worker * num_workers
    if free <= 0:
        raise InputError(
            f"scaling: {num_workers} workers reserve all {cluster_cpus:g} CPUs and leave none for data tasks; "
            "lower --scaling.cpus-per-worker or --scaling.num-workers"
        )
    share = free / num_workers
    store = sum(node.resources.get("object_store_memory", 0) for node in data_nodes)
    selector = None
    if apart:
        ids = ",".join(sorted(node.node_id for node in training))
        selector = {"ray.io/node-id": f"!in({ids})"}  # also nodes that join later
    return Layout(
        cpus_per_worker=cpus_per_worker,
        worker_resources={"CPU": cpus_per_worker, **wanted},
        per_worker=TaskPlacement(
            num_cpus=min(1.0, share),
            max_cpus=share,
            max_object_store_bytes=int(store * _OBJECT_STORE_SHARE / num_workers) or None,
            label_selector=selector,
        ),
        driver=TaskPlacement(num_cpus=min(1.0, all_data_cpus), label_selector=selector),
    )
