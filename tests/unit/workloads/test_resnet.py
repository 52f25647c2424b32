"""Tests of ResNet: torchvision's names, shapes, arithmetic, initial values and weights."""

import math
from typing import Any

import pytest
import torch
from builders.faults import rejects
from ranks.checkpoint import same
from torch.nn import functional

from rayrec.config import InputError
from rayrec.layers.operation_count import counted
from rayrec.workloads.vision import ResNetConfig
from rayrec.workloads.vision_model import BatchNorm, ResNet, load_weights

# Of torchvision 0.28's resnet18(), but for the first layer's channels and the last one's classes.
CONVOLUTIONS = {"conv1": (64, 1, 7, 7)}
NORMALISATIONS = {"bn1": 64}
for stage, width in enumerate((64, 128, 256, 512), start=1):
    for block, narrower in ((0, max(width // 2, 64)), (1, width)):
        name = f"layer{stage}.{block}"
        CONVOLUTIONS |= {f"{name}.conv1": (width, narrower, 3, 3), f"{name}.conv2": (width, width, 3, 3)}
        NORMALISATIONS |= {f"{name}.bn1": width, f"{name}.bn2": width}
        if narrower < width:
            CONVOLUTIONS[f"{name}.downsample.0"] = (width, narrower, 1, 1)
            NORMALISATIONS[f"{name}.downsample.1"] = width


def built(**fields: Any) -> ResNet:
    torch.manual_seed(0)
    return ResNetConfig(**fields).build()


def test_names_shapes_and_initial_values_match_torchvision() -> None:
    expected = {f"{name}.weight": shape for name, shape in CONVOLUTIONS.items()}
    for name, width in NORMALISATIONS.items():
        expected |= {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
        expected[f"{name}.num_batches_tracked"] = ()
    expected |= {"fc.weight": (10, 512), "fc.bias": (10,)}
    model = built()
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    assert len(expected) == 122
    # 11,689,512 of the one for 3 channels and 1,000 classes.
    assert sum(parameter.numel() for parameter in built(num_channels=3, num_classes=1000).parameters()) == 11_689_512
    deeper = ResNetConfig(blocks=(3, 4, 6, 3), num_channels=3, num_classes=1000).build()
    assert sum(parameter.numel() for parameter in deeper.parameters()) == 21_797_672  # resnet34
    assert same(model.state_dict(), built().state_dict())
    torch.manual_seed(1)
    assert not torch.equal(ResNetConfig().build().conv1.weight, model.conv1.weight)
    state = model.state_dict()
    for name, (width, _, height, _) in CONVOLUTIONS.items():
        weight = state[f"{name}.weight"]
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (width * height**2)), rel=0.06), name
        assert abs(weight.mean().item()) < 0.1 * weight.std().item()
    for name in NORMALISATIONS:
        assert (state[f"{name}.weight"] == 1).all()
        assert (state[f"{name}.bias"] == 0).all()
    assert state["fc.weight"].abs().max() <= 1 / math.sqrt(512)


def spelt_out(state: dict[str, torch.Tensor], images: torch.Tensor, *, training: bool) -> torch.Tensor:
    """Compute the network from its weights alone."""

    def normalised(name: str, values: torch.Tensor) -> torch.Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            mean, variance = values.mean((0, 2, 3)), values.var((0, 2, 3), correction=0)
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        scale = (weight / torch.sqrt(variance + 1e-5))[:, None, None]
        return (values - mean[:, None, None]) * scale + bias[:, None, None]

    def block(name: str, inputs: torch.Tensor, stride: int) -> torch.Tensor:
        outputs = functional.conv2d(inputs, state[f"{name}.conv1.weight"], stride=stride, padding=1)
        outputs = normalised(f"{name}.bn1", outputs).clamp(min=0)
        outputs = functional.conv2d(outputs, state[f"{name}.conv2.weight"], padding=1)
        outputs = normalised(f"{name}.bn2", outputs)
        if f"{name}.downsample.0.weight" in state:
            inputs = functional.conv2d(inputs, state[f"{name}.downsample.0.weight"], stride=stride)
            inputs = normalised(f"{name}.downsample.1", inputs)
        return (outputs + inputs).clamp(min=0)

    values = functional.conv2d(images, state["conv1.weight"], stride=2, padding=3)
    values = functional.max_pool2d(normalised("bn1", values).clamp(min=0), 3, stride=2, padding=1)
    for stage in range(1, 5):
        values = block(f"layer{stage}.0", values, 1 if stage == 1 else 2)
        values = block(f"layer{stage}.1", values, 1)
    return functional.adaptive_avg_pool2d(values, 1).flatten(1) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("training", [True, False])
def test_forward_matches_explicit_network(training: bool) -> None:
    model = built()
    generator = torch.Generator().manual_seed(3)
    for name, value in model.state_dict().items():  # other than 0 and 1
        if name.endswith(("running_mean", "running_var")) or (value.ndim == 1 and "fc" not in name):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(5, 1, 28, 28, generator=generator)
    with torch.no_grad():
        logits = model.train(training)(images)
        torch.testing.assert_close(logits, spelt_out(state, images, training=training), rtol=1e-4, atol=1e-4)
    assert model.bn1.num_batches_tracked.item() == (1 if training else 0)


@pytest.mark.parametrize("rows", [1, 2])
def test_batch_norm_accepts_one_row(rows: int) -> None:
    """Torch rejects a single value per channel, as in the last stage on small images."""
    model = built().train()
    before = model.layer4[1].bn2.running_var.clone()
    model(torch.randn(rows, 1, 28, 28)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert torch.equal(model.layer4[1].bn2.running_var, before) == (rows == 1)
    plain, ours = torch.nn.BatchNorm2d(3), BatchNorm(3)
    values = torch.randn(2, 3, 2, 2)
    assert torch.equal(plain(values), ours(values))
    assert torch.equal(plain.running_var, ours.running_var)


def test_three_channel_weights_load_for_gray() -> None:
    coloured = built(num_channels=3).eval()
    gray = ResNetConfig().build().eval()
    load_weights(gray, coloured.state_dict(), where="a.pt")
    images = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(gray(images), coloured(images.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)
    # Files of the first years have no counters.
    load_weights(gray, {name: value for name, value in coloured.state_dict().items() if "num_batches" not in name}, where="a.pt")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_classes": 1000}, r"a\.pt: fc\.weight must have shape \(10, 512\), got \(1000, 512\)\. Choose weights"),
        ({"blocks": (3, 4, 6, 3)}, r"a.pt: must match a ResNet with blocks \(2, 2.*, got unknown layer1.2.conv1.weight, .* more"),
        ({"blocks": (1, 1, 1, 1)}, r"a\.pt: must match a ResNet .*, got no layer1\.1\.conv1\.weight, .* more"),
    ],
)
def test_load_weights_rejects_other_networks(other: dict[str, Any], message: str) -> None:
    model, weights = built(), ResNetConfig(**other).build().state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rejects(message, load_weights, model, weights, where="a.pt")
    assert same(model.state_dict(), before)
    with pytest.raises(InputError, match=r"conv1\.weight must have shape \(64, 3, 7, 7\), got \(64, 1, 7, 7\)"):
        load_weights(built(num_channels=3), before, where="a.pt")


@pytest.mark.parametrize(("channels", "classes", "size", "expected"), [(3, 1000, 224, 1_814_073_344), (1, 10, 28, 33_010_944)])
def test_multiply_adds_match_layers(channels: int, classes: int, size: int, expected: int) -> None:
    model = ResNetConfig(num_channels=channels, num_classes=classes).build()
    assert counted(model, lambda: model(torch.zeros(1, channels, size, size))) == expected


@pytest.mark.parametrize("changes", [{"blocks": (2, 2, 0, 2)}, {"num_channels": 0}, {"num_classes": 0}])
def test_settings_reject_impossible_values(changes: dict[str, Any]) -> None:
    rejects(r"ResNetConfig\.\w+: .* at least 1", ResNetConfig, **changes)
