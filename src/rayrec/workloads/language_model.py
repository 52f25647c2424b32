"""Computations of language models: row losses, text generation, pretrained weights."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from rayrec import storage
from rayrec.checkpoint.plan import drop_tied_tensors
from rayrec.checkpoint.safetensors import read_weights
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows
from rayrec.humanize import one_line
from rayrec.layers.kernels.kernel_threads import uses_kernels
from rayrec.layers.mlp import apply_linear, onednn_is_faster

if TYPE_CHECKING:
    from rayrec.data.text.tokenizer import TextTokenizer

PROMPTS = "prompts"
LENGTHS = "lengths"
"""Keys of a prediction batch: right-aligned prompts, int64 [rows, max_length], and their lengths,
int64 [rows].
"""
_IGNORED: Final = -100
_SAMPLING_SEED: Final = 0


def row_losses(
    model: torch.nn.Module, tokens: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute each row's mean cross entropy of tokens 1, 2, ... given the tokens before, float32
    [rows]. `tokens` is int64 [rows, length], `lengths` the token counts of padded rows, int64
    [rows]. For rows of equal length, the mean is the loss of transformers' model with labels equal
    to its input.
    """
    # Without a mask or a cache, transformers searches the rows for several texts, and attention
    # reads a mask of all pairs. Padding comes after all tokens, so that none attends to it.
    outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    logits = outputs.logits.float()
    # The last position predicts nothing. Masking its target is cheaper than copying the logits
    # without it.
    targets = functional.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
    if lengths is not None:
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        targets = targets.masked_fill(positions >= lengths[:, None], _IGNORED)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED
    )
    return losses.view_as(tokens).sum(dim=1) / (
        tokens.shape[1] - 1 if lengths is None else (lengths - 1).clamp(min=1)
    )


# -- Generation


def continue_prompts(
    model: torch.nn.Module,
    prompts: np.ndarray,
    lengths: np.ndarray,
    *,
    tokenizer: TextTokenizer,
    window: int,
    max_new_tokens: int,
    temperature: float,
    device: torch.device,
) -> dict[str, list[str]]:
    """Return the columns `prompt` and `text`: a continuation of each prompt (see PROMPTS), up to
    the end-of-text token or `max_new_tokens`. Sampling depends only on the prompt. A wrapped model
    is called equally often on all workers with the same prompts.
    """
    rows = [row[len(row) - length :] for row, length in zip(prompts, lengths, strict=True)]
    chances = np.stack([_chances(row, max_new_tokens) for row in rows])
    model.eval()
    tokens = generate(
        model,
        torch.from_numpy(prompts).to(device),
        torch.from_numpy(lengths).to(device),
        chances=torch.from_numpy(chances).to(device),
        window=window,
        temperature=temperature,
        end_token=tokenizer.end_token,
    )
    texts = [tokenizer.decode(_before(row, tokenizer.end_token)) for row in tokens.tolist()]
    return {"prompt": [tokenizer.decode(row.tolist()) for row in rows], "text": texts}


def _chances(prompt: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers in [0, 1) that select the next tokens, float32 [count]."""
    return np.random.default_rng([_SAMPLING_SEED, zlib.crc32(prompt.tobytes())]).random(
        count, dtype=np.float32
    )


def _before(tokens: list[int], end_token: int | None) -> list[int]:
    return tokens[: tokens.index(end_token)] if end_token in tokens else tokens


def generate(
    model: torch.nn.Module,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    chances: torch.Tensor,
    window: int,
    temperature: float,
    end_token: int | None,
) -> torch.Tensor:
    """Generate the tokens after each prompt, padded with `end_token` after it, int64 [rows, new].
    `chances`, float [rows, max_new_tokens], has random numbers in [0, 1). The model sees at most
    `window` tokens: when a text outgrows it, generation continues from the latter half.
    """
    network: Any = getattr(model, "module", model)  # of DDP
    # Not as an argument, which transformers completes with the end token of the model's config.
    network.generation_config = GenerationConfig()
    sampler = _InverseSampler(chances, temperature, end_token)
    tokens = prompts[:, -window:]
    mask = torch.arange(tokens.shape[1], 0, -1, device=tokens.device) <= lengths[:, None]
    new_tokens = tokens[:, :0]
    while new_tokens.shape[1] < chances.shape[1] and not bool(sampler.ended.all()):
        if tokens.shape[1] > window:
            num_recent = max(1, window // 2)
            tokens = tokens[:, -num_recent:]
            mask = mask[:, -num_recent:]
        num_inputs = tokens.shape[1]
        tokens = network.generate(
            tokens,
            attention_mask=mask.long(),
            max_new_tokens=min(window + 1 - num_inputs, chances.shape[1] - new_tokens.shape[1]),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([lambda *_: sampler.ended]),
        )
        mask = functional.pad(mask, (0, tokens.shape[1] - num_inputs), value=True)
        new_tokens = torch.cat([new_tokens, tokens[:, num_inputs:]], dim=1)
    return new_tokens


@final
class _InverseSampler(LogitsProcessor):
    """Choice of next tokens by random numbers, one per row, for transformers' greedy search."""

    def __init__(self, chances: torch.Tensor, temperature: float, end_token: int | None) -> None:
        self.ended = torch.zeros(len(chances), dtype=torch.bool, device=chances.device)
        """Whether each row has its end token, bool [rows]."""
        self._chances = iter(chances.unbind(dim=1))
        self._temperature = temperature
        self._end_token = -1 if end_token is None else end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [rows, tokens], 1 for the chosen token of each row: the first whose
        cumulative probability exceeds the row's chance (inverse transform sampling).
        """
        chance = next(self._chances)
        if self._temperature == 0:
            chosen = scores.argmax(dim=1)
        else:
            reached = (scores / self._temperature).softmax(dim=1).cumsum(dim=1)
            below = reached <= chance[:, None] * reached[:, -1:]
            chosen = below.sum(dim=1).clamp(max=scores.shape[1] - 1)
        chosen = torch.where(self.ended, self._end_token, chosen)
        self.ended |= chosen == self._end_token
        return torch.zeros_like(scores).scatter_(1, chosen[:, None], 1.0)


def read_prompts(path: str, tokenizer: TextTokenizer, *, window: int) -> ArrayRows:
    """Read PROMPTS and LENGTHS from the lines of a text. Raises InputError if missing, empty, not
    UTF-8 or not encodable.
    """
    try:
        lines = storage.read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: must be UTF-8 text with one prompt per line, got an invalid byte at "
            f"{error.start:,}"
        ) from None
    if not lines:
        raise InputError(f"{path}: has no prompts. Write one per line.")
    encoded = [np.asarray(tokenizer.encode(line or "\n"), np.int64)[-window:] for line in lines]
    lengths = np.array([len(tokens) for tokens in encoded], np.int64)
    prompts = np.zeros((len(encoded), int(lengths.max())), np.int64)
    for row, tokens in zip(prompts, encoded, strict=True):
        row[len(row) - len(tokens) :] = tokens
    return ArrayRows({PROMPTS: prompts, LENGTHS: lengths})


# -- Models of config.json, pretrained weights


def build_model(values: Mapping[str, Any]) -> PreTrainedModel:
    """Build the causal model of config.json values on CPU, in float32, with initial values from
    torch's global generator.
    """
    build = partial(AutoModelForCausalLM.from_config, dtype=torch.float32)
    try:
        model = build(AutoConfig.for_model(**values), attn_implementation="sdpa")
    except ValueError:  # Its attention is of a kind that torch's function does not offer
        return through_onednn(build(AutoConfig.for_model(**values)))
    if model.is_backend_compatible():
        model.set_attn_implementation(_ATTENTION)
    return through_onednn(model)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention as transformers' `sdpa`, but on CPUs in float32 instead of bfloat16, for
    which torch's backward pass takes eight times as long on Xeons (Emerald Rapids).
    """
    if not query.is_cpu or query.dtype != torch.bfloat16:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        output, weights = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **settings
        )
    return output.to(query.dtype), weights


_ATTENTION: Final = "rayrec"
"""Name of this package's attention in transformers' tables."""
AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def read_config(
    folder: str, *, vocabulary_size: int, block_size: int
) -> tuple[dict[str, Any], int]:
    """Return config.json of a causal model, and its number of parameters. Code that it names is
    never loaded. Raises InputError if transformers does not have the model, it is too small for the
    vocabulary or blocks, or it cannot cache keys and values.
    """
    path = storage.join(folder, "config.json")
    values = storage.read_json(path)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"workload.model.config: {path}: model_type must be a causal model of transformers, "
            f"got {kind}"
        )
    values = {
        name: value
        for name, value in values.items()
        if name not in ("auto_map", "quantization_config")
    }
    try:
        with torch.device("meta"):
            model: Any = build_model(values)
    except Exception as error:  # depends on the model
        raise InputError(
            f"workload.model.config: {path}: transformers cannot build the model "
            f"({one_line(error)})"
        ) from None
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"workload.model.config: {path}: model must cache keys and values for generation, got "
            f"{kind}"
        )
    limits = {"vocab_size": model.get_input_embeddings().weight.shape[0]}
    limits["max_position_embeddings"] = getattr(model.config, "max_position_embeddings", block_size)
    for (name, limit), size in zip(limits.items(), (vocabulary_size, block_size), strict=True):
        if limit < size:
            raise InputError(
                f"workload.model.config: {path}: {name} must be at least {size}, as in the "
                f"tokens, got {limit}"
            )
    return values, sum(parameter.numel() for parameter in model.parameters())


def check_weights(folder: str, expected: Mapping[str, Any]) -> None:
    """Check that a folder's config.json describes the model `expected`. Raises InputError."""
    path = storage.join(folder, "config.json")
    stored_config = storage.read_json(path)
    for name in ("model_type", "vocab_size", "n_layer", "n_head", "n_embd", "n_positions"):
        if name in expected and (
            not isinstance(stored_config, dict) or stored_config.get(name) != expected[name]
        ):
            stored = stored_config.get(name) if isinstance(stored_config, dict) else None
            raise InputError(
                f"workload.weights: {path}: {name} must be {expected[name]}, as in the model, got "
                f"{stored}. Change the model, or, for the vocabulary, run `rayrec preprocess "
                "--tokenizer` with the tokenizer of the weights."
            )


def load_weights(model: PreTrainedModel, folder: str) -> None:
    """Load a folder's model.safetensors into the model, with or without the name prefix of its
    body, such as `transformer.`. Raises InputError for missing, extra or misshapen weights.
    """
    path = storage.join(folder, "model.safetensors")
    if not storage.exists(path):
        raise InputError(
            f"workload.weights: {path} not found. Other formats may contain code. Save with "
            "safe_serialization."
        )
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    parameters = drop_tied_tensors(state)
    tensors_by_name = {}
    for name, tensor in read_weights(path).items():
        full = name if name in state or name.startswith(prefix) else f"{prefix}{name}"
        # causal masks, rotations
        constant = full.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq"))
        if full in parameters or not (full in state or constant):
            tensors_by_name[full] = tensor
    for name in sorted(parameters.keys() | tensors_by_name.keys()):
        shapes = [
            list(tensors[name].shape) if name in tensors else None
            for tensors in (tensors_by_name, parameters)
        ]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"workload.weights: {path}: {name} must have shape {shapes[1]}, as in the model, "
                f"got {shapes[0]}"
            )
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(tensors_by_name[name])


_MIN_MULTIPLY_ADDS = 4_000_000
"""Minimum multiply-adds for which oneDNN's setup pays: 0.1 ms, forward and backward, as do half as
many multiply-adds.
"""


def through_onednn(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model's linear layers multiply with oneDNN, in place, if it is faster. Parameters
    and names stay. Rounding of sums changes.
    """
    if not onednn_is_faster():
        return model
    for module in model.modules():
        # Replacing modules would require knowing their places in transformers and tying the weights
        # again.
        if type(module) is Conv1D:
            module.__class__ = _Conv1D
        elif type(module) is nn.Linear:
            module.__class__ = _Linear
    return model


@final
class _Conv1D(Conv1D):
    """Linear layer of GPT-2 with weight [in_features, out_features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _pays(x, self.nf):
            return super().forward(x)
        return apply_linear(x, self.weight.t(), self.bias, dtype=torch.float32)


@final
class _Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not _pays(input, self.out_features):
            return super().forward(input)
        return apply_linear(input, self.weight, self.bias, dtype=torch.float32)


def _pays(inputs: torch.Tensor, out_features: int) -> bool:
    """Return whether torch would use MKL for a large enough product. In bf16, torch uses oneDNN
    anyway.
    """
    return (
        uses_kernels(inputs)
        and inputs.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and inputs.numel() * out_features >= _MIN_MULTIPLY_ADDS
    )
