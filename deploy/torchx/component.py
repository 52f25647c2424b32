"""torchx component; docs/torchrun.md.

torchx run -s slurm deploy/torchx/component.py:rayrec --num_trainers 16 -- train mlperf_dlrm
--train-data.path /data/criteo
"""

from torchx import specs
from torchx.components.dist import ddp

GPUS_PER_HOST = 8


def rayrec(
    *arguments: str,
    num_trainers: int = 8,
    image: str = "",
    cpu: int = 96,
    gpu: int = GPUS_PER_HOST,
    memory_mb: int = -1,
) -> specs.AppDef:
    """Start `rayrec` in processes of torchrun, at most eight to a host.

    Args:
        arguments: the command, such as train RECIPE, and its flags
        num_trainers: number of processes, a multiple of 8 if more than 8
        image: image or folder, as the scheduler expects it
        cpu: CPUs of a host
        gpu: GPUs of a host
        memory_mb: memory of a host; -1 for all
    """
    hosts = max(num_trainers // GPUS_PER_HOST, 1)
    if num_trainers < 1 or num_trainers > hosts * GPUS_PER_HOST:
        raise ValueError(
            f"num_trainers: must be from 1 to {GPUS_PER_HOST}, or a multiple of it, got "
            f"{num_trainers}"
        )
    shape = f"{hosts}x{min(num_trainers, GPUS_PER_HOST)}"
    return ddp(
        *arguments,
        m="rayrec",
        name="rayrec",
        image=image,
        j=shape,
        cpu=cpu,
        gpu=gpu,
        memMB=memory_mb,
    )
