"""Tests of GPT-2 models against HuggingFace, and of their oneDNN layers."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from builders.faults import rejects
from ranks.data_parallel import products_by_onednn

from rayrec.workloads import language_model
from rayrec.workloads.language import GPT2Config

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=24, dropout=0.0)


def test_num_parameters_matches_model() -> None:
    model = SMALL.build(50, end_of_text=49)
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL.num_parameters(50)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.config.eos_token_id, model.config.n_positions) == (49, 24)


def test_function_matches_huggingface_settings() -> None:
    """The fused activation equals GPT-2's. All other settings are transformers' defaults."""
    from transformers import GPT2Config as HuggingFaceConfig
    from transformers import GPT2LMHeadModel

    model = SMALL.build(50)
    other = GPT2LMHeadModel(
        HuggingFaceConfig(
            vocab_size=50, n_layer=2, n_head=2, n_embd=16, n_positions=24, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 50, (3, 24))
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)


WIDE = GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=24, dropout=0.0)
"""Config wide enough for oneDNN, also in the backward pass."""


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build our model and HuggingFace's model with the same weights."""
    from transformers import GPT2Config as HuggingFaceConfig
    from transformers import GPT2LMHeadModel

    model = WIDE.build(50)
    other = GPT2LMHeadModel(HuggingFaceConfig.from_dict(WIDE.to_huggingface(50)))
    other.load_state_dict(model.state_dict())
    return model, other


def test_loss_and_gradients_match_huggingface(monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_by_onednn(monkeypatch)
    tokens = torch.randint(0, 50, (4, 24))
    model, other = pair()
    assert [*model.state_dict()] == [*other.state_dict()]
    shapes, expected = ({name: value.shape for name, value in each.named_parameters()} for each in (model, other))
    assert shapes == expected
    losses = [each(tokens, labels=tokens).loss for each in (model, other)]
    assert len(products) == 4 * WIDE.n_layer + 1  # and none in the other
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    gradients = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, other.eval()(tokens).logits)
        torch.testing.assert_close(model(tokens[:1, :3]).logits, other(tokens[:1, :3]).logits)


def test_bf16_and_small_products_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_by_onednn(monkeypatch)
    tokens = torch.randint(0, 50, (2, 24))
    with torch.autocast("cpu", torch.bfloat16):
        ours, others = (each(tokens).logits for each in pair())
    assert not products
    assert torch.equal(ours, others)
    monkeypatch.setattr(language_model, "_MIN_MULTIPLY_ADDS", 2 * 24 * 64 * 4 * 64)
    model, other = pair()
    tokens = torch.randint(0, 50, (2, 24))
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)
    assert len(products) == 2 * WIDE.n_layer  # the two wide ones of each block


def test_onednn_layers_support_copy_pickle_and_checkpointing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    products_by_onednn(monkeypatch)
    tokens = torch.randint(0, 50, (2, 24))
    model, _ = pair()
    model(tokens, labels=tokens).loss.backward()
    model.eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)
    model.train()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 0}, "n_layer: must be at least 1, got 0"),
        ({"n_embd": 10, "n_head": 3}, "must be a multiple of n_head 3"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_gpt2_config_rejects_invalid_sizes(fields: dict[str, float], message: str) -> None:
    rejects(message, GPT2Config, **fields)
