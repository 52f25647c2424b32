"""GPT-2 on MDS shards by a plain script around HuggingFace's Trainer, without Ray.

Usage: python plain_huggingface.py JSON with `path` (folder of a set: index.json and shards),
`model` (arguments of transformers' GPT2Config), `arguments` (of TrainingArguments), `workers`,
`steps`, `warm_steps`, `seed`. Prints JSON: `losses` (per step a list, each worker's own),
`rows_per_s` of all workers behind the warm-up.
"""

import json
import os
import socket
import sys
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from rayrec.data.text.mds import load_streaming


class Blocks(Dataset):
    """Any block of the shards by its number; the order is Trainer's."""

    def __init__(self, path: str) -> None:
        self._shards = load_streaming().StreamingDataset(local=path, shuffle=False, batch_size=1)

    def __len__(self) -> int:
        return int(self._shards.num_samples)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._shards[number]["tokens"].astype("int64"))
        labels = tokens.clone()
        # Nothing predicts the first token, but Trainer would count it where it divides the loss by
        # the tokens.
        labels[0] = -100
        return {"input_ids": tokens, "labels": labels}


class Recording(Trainer):
    """Keeps the losses, which Trainer logs with four digits only."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[torch.Tensor] = []

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.detach())
        return loss


class Clock(TrainerCallback):
    def __init__(self, warm_steps: int) -> None:
        self._warm_steps = warm_steps
        self._start_s = 0.0
        self.elapsed_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._warm_steps:
            self._start_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.elapsed_s = time.perf_counter() - self._start_s


def train(rank: int, settings: dict[str, Any], scratch: str, port: int) -> None:
    """Train as one worker. Writes results into the scratch folder."""
    workers = settings["workers"]
    steps = settings["steps"]
    warm_steps = settings["warm_steps"]
    if workers > 1:
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
        }
        os.environ |= {name: str(value) for name, value in environment.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = TrainingArguments(
        output_dir=f"{scratch}/trainer",
        max_steps=steps,
        seed=settings["seed"],
        data_seed=settings["seed"],
        use_cpu=True,
        ddp_backend="gloo" if workers > 1 else None,
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings["arguments"],
    )
    torch.manual_seed(settings["seed"])
    model = GPT2LMHeadModel(GPT2Config(**settings["model"]))
    clock = Clock(warm_steps)
    trainer = Recording(
        model=model, args=arguments, train_dataset=Blocks(settings["path"]), callbacks=[clock]
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    trainer.train()
    # A worker's loss is the sum over its tokens by the tokens of all, times the workers: they
    # average to the global mean.
    rows = (steps - warm_steps) * arguments.per_device_train_batch_size
    result = {"losses": torch.stack(trainer.losses).tolist(), "rows_per_s": rows / clock.elapsed_s}
    with open(f"{scratch}/{rank}.json", "w") as file:
        json.dump(result, file)


def main(settings: dict[str, Any]) -> dict[str, Any]:
    workers = settings["workers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        if workers == 1:
            train(0, settings, scratch, port)
        else:
            torch.multiprocessing.spawn(train, (settings, scratch, port), nprocs=workers)
        results = []
        for rank in range(workers):
            with open(f"{scratch}/{rank}.json") as file:
                results.append(json.load(file))
    losses = [list(step) for step in zip(*(worker["losses"] for worker in results), strict=True)]
    return {"losses": losses, "rows_per_s": sum(worker["rows_per_s"] for worker in results)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
