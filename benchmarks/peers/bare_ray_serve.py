"""The least that Ray Serve can do for a model: one replica that imports torch and answers with one
score.

Usage: python bare_ray_serve.py PORT; runs until it is killed.
"""

import signal
import sys
from typing import Any

import ray
from ray import serve


class Replica:
    """Model without weights."""

    def __init__(self) -> None:
        import torch

        self._scores = torch.zeros(1)

    async def __call__(self, request: Any) -> dict[str, list[float]]:
        return {"scores": self._scores.tolist()}


def main(port: int) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(Replica)
    serve.run(deployment.bind())
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
