"""Ray Train's tutorial of DDP, ResNet18 on MNIST: its loop trains the same model, and its cells 3.8 and 3.9 take our result."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders.digits import write_digits
from builders.runs import LEAN, train
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rayrec import recipes
from rayrec.checkpoint import full_tensors, open_checkpoint
from rayrec.data.numbered_rows import read_part
from rayrec.training.result import CheckpointPath
from rayrec.workloads.vision import ResNetConfig

SMALL = ResNetConfig(blocks=(1, 1, 1, 1))


class ModelWorker:
    """The tutorial's actor, which loads the trained model and predicts."""

    def __init__(self, checkpoint: CheckpointPath) -> None:
        with checkpoint.as_directory() as ckpt_dir:
            # The tutorial: state_dict = torch.load(os.path.join(ckpt_dir, "model.pt"), weights_only=True)
            stored = full_tensors(open_checkpoint(ckpt_dir), "model.")
            state_dict = {name.removeprefix("model."): value for name, value in stored}
        self.model = SMALL.build()
        self.model.load_state_dict(state_dict)
        self.model.eval()

    @torch.inference_mode()
    def predict(self, batch: torch.Tensor) -> list[int]:
        return self.model(batch).argmax(1).tolist()


def train_loop(data: TensorDataset, num_epochs: int, global_batch_size: int) -> list[float]:
    """Run the tutorial's training functions on one worker -> the mean loss of each epoch."""
    torch.manual_seed(0)
    model, sampler = SMALL.build(), DistributedSampler(data, num_replicas=1, rank=0)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=global_batch_size, sampler=sampler):
            loss = torch.nn.CrossEntropyLoss()(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return np.reshape(losses, (num_epochs, -1)).mean(1).tolist()


def test_result_cells_of_ddp_tutorial(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", train=200, test=50)
    config = recipes.mnist_resnet18(str(digits)).replace(
        name="distributed-mnist-resnet18",
        storage_path=str(tmp_path / "training"),
        global_batch_size=20,
        scaling={"num_workers": 1, "threads_per_worker": 1},
        log_every=10,
        workload={"model": SMALL, "optimizer": {"learning_rate": 1e-3}},
        **LEAN,
    )
    result = train(config)

    # 3.8: `result`, `result.metrics_dataframe`
    assert result.path == str(tmp_path / "training" / "distributed-mnist-resnet18")
    assert result.error is None
    assert all(str(result.checkpoint) in shown for shown in (repr(result), result._repr_html_()))
    frame = result.metrics_dataframe
    assert frame[["epoch", "step"]].to_numpy().tolist() == [[1.0, 10], [2.0, 20]]
    rows = {name: torch.from_numpy(value) for name, value in read_part(str(digits), "train", num_classes=10).items()}
    data = TensorDataset((rows["images"][:, None] / 255 - 0.5) / 0.5, rows["labels"])
    assert frame["loss"].tolist() == pytest.approx(train_loop(data, 2, 20), abs=5e-3)
    (_, first), (last, metrics) = result.best_checkpoints
    assert frame["validation_accuracy"].tolist() == [first["accuracy"], metrics["accuracy"]]
    assert last == result.checkpoint

    # 3.9: the model of the checkpoint predicts
    test = read_part(str(digits), "t10k", num_classes=10)
    batch = (torch.from_numpy(test["images"])[:, None] / 255 - 0.5) / 0.5
    predictions = torch.tensor(ModelWorker(result.checkpoint).predict(batch))
    assert int((predictions == torch.from_numpy(test["labels"])).sum()) == round(50 * result.metrics["accuracy"]) > 5
