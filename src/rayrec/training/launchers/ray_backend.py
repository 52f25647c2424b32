"""Ray Train backend of a run's workers. The driver and controller import this module, and it must
not import torch: `TorchTrainer` would make both import it, which delays the start by seconds.
"""

import os
import socket
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

WORKER_MODULE: Final = "rayrec.training.launchers.ray_worker"
_SHUTDOWN_S: Final = 30.0


def train_worker(arguments: dict[str, ray.ObjectRef]) -> dict[str, Any]:
    from rayrec.training.launchers import ray_worker

    return ray_worker.train_worker(arguments)


@dataclass(frozen=True)
class ProcessGroup(BackendConfig):
    """Configuration of the workers' torch process group and torchrun variables."""

    backend: str
    timeout_s: int

    @property
    def backend_cls(self) -> type[Backend]:
        return _TorchBackend

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class _TorchBackend(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, ProcessGroup)
        host, port = worker_group.execute_single(0, _free_address)
        pending = [
            worker_group.execute_single_async(rank, _join, backend_config, host, port)
            for rank in range(len(worker_group))
        ]
        ray.get(pending)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        # Workers of a group with a killed worker may block; Ray ends their processes.
        ray.wait(
            worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=_SHUTDOWN_S
        )


def _free_address() -> tuple[str, int]:
    """Return the host and a free port of worker 0's node, for the rendezvous."""
    host = ray.util.get_node_ip_address()
    with closing(
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    ) as listener:
        listener.bind(("", 0))
        return host, listener.getsockname()[1]


def _join(group: ProcessGroup, host: str, port: int) -> None:
    import torch
    from ray.train.torch import get_device
    from torch import distributed

    from rayrec.collectives import group_arguments, use_device

    device = get_device() if group.backend == "nccl" else torch.device("cpu")
    use_device(device)
    context = ray.train.get_context()
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
        ACCELERATE_TORCH_DEVICE=str(device),  # otherwise guessed by HuggingFace Accelerate
    )
    distributed.init_process_group(
        init_method="env://", **group_arguments(device, timeout_s=group.timeout_s)
    )


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
