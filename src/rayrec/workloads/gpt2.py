"""The sizes of GPT-2, and HuggingFace's model of them, made without any hub; importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayrec.config import Config, InputError
from rayrec.imports import require

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


@dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """A decoder of GPT-2's kind (Radford et al. 2019), its fields named as in HuggingFace's config.json."""

    n_layer: int = 12
    """Blocks."""
    n_head: int = 12
    """Attention heads of each block."""
    n_embd: int = 768
    """Width; a multiple of n_head."""
    n_positions: int = 1024
    """Longest sequence, in tokens."""
    dropout: float = 0.1
    """Of embeddings, attention and residuals alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_layer", "n_head", "n_embd", "n_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"GPT2Config.{name}: {getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise InputError(f"GPT2Config.n_embd: {self.n_embd} must be a multiple of n_head {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"GPT2Config.dropout: {self.dropout} must be at least 0 and below 1")

    def num_parameters(self, vocabulary_size: int) -> int:
        """Numbers to be learnt; the output layer's are those of the token embedding."""
        embeddings = (vocabulary_size + self.n_positions) * self.n_embd
        block = 12 * self.n_embd**2 + 13 * self.n_embd
        return embeddings + self.n_layer * block + 2 * self.n_embd

    def to_huggingface(self, vocabulary_size: int, *, end_of_text: int | None = None) -> dict[str, Any]:
        """What config.json says of a model for so many tokens, of which `end_of_text` ends a document."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": vocabulary_size,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "n_positions": self.n_positions,
            "embd_pdrop": self.dropout,
            "attn_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            # The same function as GPT-2's gelu_new, in one kernel where that takes eight.
            "activation_function": "gelu_pytorch_tanh",
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
        }

    def build(self, vocabulary_size: int, *, end_of_text: int | None = None) -> GPT2LMHeadModel:
        """The model on CPU, start values drawn from torch's global generator; forward takes int64 tokens (rows, length).

        The output layer shares its weight with the token embedding. Raises InputError without transformers.
        """
        require("transformers", extra="language")
        import transformers

        from rayrec.workloads.gpt2_module import through_onednn

        arguments = self.to_huggingface(vocabulary_size, end_of_text=end_of_text)
        return through_onednn(transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict(arguments)))
