"""The least that Ray Train can do: two workers, a tiny DDP model, nothing saved. Writes the Unix
time of every step to a file.

Usage: python bare_ray_train.py FILE; runs until it is killed, with one restart of its workers
allowed.
"""

import os
import sys
import tempfile
import time


def train(arguments: dict[str, str]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with open(arguments["file"], "a", buffering=1) as file:
        while True:
            optimizer.zero_grad()
            model(torch.randn(16, 8)).mean().backward()
            optimizer.step()
            if ray.train.get_context().get_world_rank() == 0:
                file.write(f"{time.time()}\n")
            time.sleep(0.02)


def main(path: str) -> None:
    # As rayrec sets it for its own runs.
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as scratch:
        TorchTrainer(
            train,
            train_loop_config={"file": path},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 0.5}
            ),
            run_config=ray.train.RunConfig(
                name="bare",
                storage_path=scratch,
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
