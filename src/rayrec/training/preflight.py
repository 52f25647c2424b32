"""Checks on the driver before Ray starts, for certain mistakes in data, storage and workers."""

import os

from rayrec import storage
from rayrec.cluster import connection
from rayrec.cluster.layout import Layout, Node, TorchrunEnv, layout
from rayrec.config import InputError
from rayrec.workloads.base import TrainConfig


def check_settings(config: TrainConfig) -> None:
    """Check the settings that are independent of the data, such as a storage path that cannot be a folder. Raises InputError."""
    config.workload.check(config)
    config.trackers.check(os.environ)
    if storage.is_url(config.storage_path):
        storage.resolve(config.storage_path)
        return
    existing = storage.absolute(config.storage_path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise InputError(f"storage_path: must be a folder, got the file {existing}")
    if not os.access(existing, os.W_OK):
        raise InputError(f"storage_path: cannot write to {existing}. Choose another folder or change its permissions")


def preflight(config: TrainConfig) -> None:
    """Check that the data is readable and this machine, if no cluster is configured, has room. Raises InputError."""
    config.workload.check_data(config)
    if TorchrunEnv.from_environment() is not None:  # its processes are already running
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if address not in (None, "", "local", connection.IN_PROCESS) or connection.is_connected():
        return  # Ray knows the resources of a running cluster
    if config.scaling.resources_per_worker:
        return
    local_layout(config, cpus=config.cluster.num_cpus or os.cpu_count() or 1)


def local_layout(config: TrainConfig, *, cpus: int) -> Layout:
    """Allocate `cpus` of this machine to the run. Raises InputError if its workers do not fit."""
    resources = {"CPU": float(cpus)}
    if config.scaling.use_gpu:
        import torch

        resources["GPU"] = float(torch.cuda.device_count())
    return layout_of(config, [Node("this machine", resources)])


def layout_of(config: TrainConfig, nodes: list[Node]) -> Layout:
    scaling = config.scaling
    return layout(
        nodes,
        num_workers=scaling.num_workers,
        use_gpu=scaling.use_gpu,
        cpus_per_worker=scaling.cpus_per_worker,
        resources_per_worker=scaling.resources_per_worker,
        data_nodes=config.cluster.data_nodes,
        task_memory_bytes=config.cluster.data_task_memory_bytes,
    )
