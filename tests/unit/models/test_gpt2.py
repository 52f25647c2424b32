"""GPT-2's sizes: what is built is HuggingFace's model, with the parameters reckoned and the layers asked for."""

from __future__ import annotations

import pytest
import torch

from rayrec.config import InputError
from rayrec.models.gpt2 import GPT2Config

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=24, dropout=0.0)


def test_the_parameters_are_as_many_as_reckoned() -> None:
    model = SMALL.build(50, end_of_text=49)
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL.num_parameters(50)
    assert GPT2Config().num_parameters(50_257) == 124_439_808  # as published
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.config.eos_token_id, model.config.n_positions) == (49, 24)


def test_the_function_is_that_of_huggingfaces_own_settings() -> None:
    """The fused activation is GPT-2's, and everything else of the configuration is transformers' default."""
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


def test_start_values_come_of_torchs_seed() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(SMALL.build(50).state_dict()["transformer.h.1.attn.c_attn.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 0}, "n_layer: 0 must be at least 1"),
        ({"n_embd": 10, "n_head": 3}, "must be a multiple of n_head 3"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GPT2Config(**fields)
