"""Language model workload: GPT-2, or any causal model of transformers, on token blocks in MDS
shards, with either loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rayrec import storage
from rayrec.bounds import Count, Finite, Share
from rayrec.config import Config, InputError
from rayrec.data.text.mds import LENGTHS
from rayrec.data.text.text_blocks import (
    PART_BYTES,
    TokenFolder,
    find_shard_sets,
    is_tokens,
    open_tokens,
    text_rows,
)
from rayrec.data.text.tokenizer import load_tokenizer, read_tokenizer, write_tokenizer
from rayrec.imports import require
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext
from rayrec.workloads.data_parallel.workload import DataParallelWorkload
from rayrec.workloads.run_config import DataConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rayrec.data.numbered_rows import ArrayRows, RowSource


@dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """GPT-2 decoder (Radford et al. 2019). Fields are named as in HuggingFace's config.json."""

    n_layer: Count = 12
    """Number of layers."""
    n_head: Count = 12
    """Number of attention heads per layer."""
    n_embd: Count = 768
    """Embedding width, a multiple of n_head."""
    n_positions: Count = 1024
    """Maximum sequence length in tokens."""
    dropout: Share = 0.1
    """Dropout probability for embeddings, attention and residual connections."""
    config: str | None = None
    """Folder with the config.json of another causal model of transformers, local or a URL, which
    replaces these sizes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise InputError(
                f"GPT2Config.n_embd: must be a multiple of n_head {self.n_head}, got {self.n_embd}"
            )

    def num_parameters(self, vocabulary_size: int) -> int:
        """Return the number of trainable parameters. The output layer shares the token
        embedding.
        """
        embeddings = (vocabulary_size + self.n_positions) * self.n_embd
        return (
            embeddings + self.n_layer * (12 * self.n_embd**2 + 13 * self.n_embd) + 2 * self.n_embd
        )

    def to_huggingface(
        self, vocabulary_size: int, *, end_of_text: int | None = None
    ) -> dict[str, Any]:
        """Return the config.json values for a vocabulary size. `end_of_text` is the token that ends
        a document.
        """
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": vocabulary_size,
            **{
                name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd", "n_positions")
            },
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout),
            # The same function as GPT-2's gelu_new, in one kernel instead of eight.
            "activation_function": "gelu_pytorch_tanh",
            **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        }

    def build(self, vocabulary_size: int, *, end_of_text: int | None = None) -> PreTrainedModel:
        """Build the GPT-2 on CPU with initial values from torch's global generator. forward takes
        int64 tokens [rows, length]. The output layer shares its weight with the token embedding.
        Raises InputError without transformers.
        """
        require("transformers", extra="language")
        from rayrec.workloads.language_model import build_model

        return build_model(self.to_huggingface(vocabulary_size, end_of_text=end_of_text))


TOKENS = "tokens"
"""Batch key of the tokens, int64 [rows, block_size]."""
TOKENIZER_FOLDER = "tokenizer"
"""Tokenizer folder in a checkpoint."""
CONFIG_FILE = "config.json"
"""File in checkpoints and exports: transformers' model config with `block_size` and `part_bytes`
(missing in older ones).
"""
NUM_SAMPLES = 3
"""Number of texts to generate with the final weights."""
PROMPT_TOKENS = 32
"""Prompt length of each of these texts, from the validation set."""


# What workers need, in a few bytes: tokens stay in the folder, which each worker maps.
@dataclass(frozen=True)
class Prepared:
    """Driver results shared with all workers."""

    train: TokenFolder
    validation: TokenFolder
    validation_set: str
    """Set name in that folder."""
    network: Mapping[str, Any]
    """Model values of config.json."""
    num_parameters: int
    weights: str | None = None
    """Absolute folder of the initial weights, because Ray Train changes the working directory of
    workers.
    """


@dataclass(frozen=True, kw_only=True)
class LanguageWorkload(DataParallelWorkload):
    """Training of next-token prediction on text."""

    LOOPS: ClassVar[tuple[str, ...]] = ("rayrec", "huggingface")
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *DataParallelWorkload.FREE_ON_RESUME,
        "weights",
        "max_new_tokens",
        "temperature",
    )

    model: GPT2Config = field(default_factory=GPT2Config)
    """Network. The data determines its vocabulary."""
    weights: str | None = None
    """Folder of initial weights from `rayrec export` or HuggingFace (config.json,
    model.safetensors), local or a URL, reachable from every node. None initializes randomly.
    """
    max_new_tokens: Count = 200
    """Maximum length of a generated text in tokens."""
    temperature: Finite = 0.8
    """Sampling temperature. Below 1 favors likely tokens; 0 always picks the most likely."""

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return `loss`, in nats per token, and `perplexity`."""
        # larger values overflow a float
        return {**means, "perplexity": math.exp(min(means["loss"], 700.0))}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]

    def objective(self, metrics: Mapping[str, float]) -> str:
        return "-loss"

    # -- on the driver

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        require(extra="language")
        if self.data_tasks:
            raise InputError(
                "workload.data_tasks: must be false for token blocks, which are read in place, "
                "got true. Omit it."
            )
        data = config.train_data
        if data.path is None:
            raise InputError(
                "train_data.path: must be a folder of token blocks, got None. Create it with "
                "`rayrec preprocess TEXT --format mds --out DIR`, then pass --train-data.path DIR."
            )
        for name, path in (("train_data", data.path), ("eval_data", config.eval_data.path)):
            if path is not None:
                _must_be_tokens(name, path)

    def list_data(self, path: str, names: Sequence[str]) -> list[storage.File]:
        folder = open_tokens(path)
        folders = dict.fromkeys([folder.path, *map(folder.set_path, folder.sets)])
        return [file for each in folders for file in storage.files_in(each)]

    def prepare(self, context: RunContext) -> Prepared:
        config = context.config
        assert config.train_data.path is not None
        train = open_tokens(config.train_data.path)
        if not train.sets.get("train"):
            raise InputError(
                f"{train.path}: has no training blocks. Preprocess more text, or lower "
                "--validation-fraction."
            )
        validation = train if config.eval_data.path is None else open_tokens(config.eval_data.path)
        validation_set = _validation_set(validation, own=config.eval_data.path is not None)
        if self.model.config is None and train.block_size > self.model.n_positions:
            raise InputError(
                f"{train.path}: blocks of {train.block_size} tokens exceed the model's n_positions "
                f"{self.model.n_positions}. Raise --workload.model.n-positions, or preprocess with "
                "a smaller --block-size."
            )
        train_settings, validation_settings = (
            (folder.block_size, folder.tokenizer_hash, folder.vocabulary_size)
            for folder in (train, validation)
        )
        if train_settings != validation_settings:
            raise InputError(
                f"{validation.path}: block size, tokenizer or vocabulary does not match "
                f"{train.path}. Preprocess it with --tokenizer {train.tokenizer} and --block-size "
                f"{train.block_size}."
            )
        network = self.model.to_huggingface(train.vocabulary_size, end_of_text=train.end_token)
        num_parameters = self.model.num_parameters(train.vocabulary_size)
        if self.model.config is not None:
            from rayrec.workloads.language_model import read_config

            sizes = {"vocabulary_size": train.vocabulary_size, "block_size": train.block_size}
            network, num_parameters = read_config(self.model.config, **sizes)
        if self.weights is not None:
            from rayrec.workloads.language_model import check_weights

            check_weights(self.weights, network)
        weights = self.weights and storage.absolute(self.weights)
        return Prepared(train, validation, validation_set, network, num_parameters, weights)

    def data_hash(self, prepared: Prepared) -> str:
        """Return the hash of the training and evaluation tokens."""
        return hashlib.sha256(
            f"{prepared.train.hash}/{prepared.validation.hash}".encode()
        ).hexdigest()[:16]

    def set_rows(self, prepared: Prepared) -> dict[str, int]:
        return {
            "train": prepared.train.sets["train"],
            "validation": prepared.validation.sets[prepared.validation_set],
        }

    def summarize(self, prepared: Prepared, metrics: dict[str, float]) -> dict[str, Any]:
        train = prepared.train
        return {
            **super().summarize(prepared, metrics),
            "tokens_per_row": train.block_size,
            "vocabulary_size": train.vocabulary_size,
            "num_parameters": prepared.num_parameters,
            "tokenizer": train.tokenizer_hash,
            "tokens": train.hash,
        }

    def checkpoint_files(self, prepared: Prepared) -> dict[str, bytes | str]:
        train = prepared.train
        tokenizer = {
            storage.join(TOKENIZER_FOLDER, name): data
            for name, data in read_tokenizer(train.tokenizer).items()
        }
        config = {
            **prepared.network,
            "block_size": train.block_size,
            "part_bytes": train.part_bytes,
        }
        return {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(), **tokenizer}

    # -- on each worker

    def open_set(self, context: WorkerContext, prepared: Prepared, name: str) -> RowSource:
        if name == "train":
            return _rows(prepared.train, name, context.config.train_data)
        return _rows(prepared.validation, prepared.validation_set, context.config.eval_data)

    def build(self, prepared: Prepared) -> PreTrainedModel:
        from rayrec.workloads.language_model import build_model, load_weights

        model = build_model(prepared.network)
        if prepared.weights is not None:
            load_weights(model, prepared.weights)
        return model

    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `loss`: the mean cross entropy of each row's next tokens, excluding the first
        token.
        """
        from rayrec.workloads.language_model import row_losses

        return {"loss": row_losses(model, tensors[TOKENS], tensors.get(LENGTHS))}

    def samples(
        self,
        model: torch.nn.Module,
        *,
        prepared: Prepared,
        sets: Mapping[str, RowSource],
        device: torch.device,
    ) -> list[dict[str, Any]]:
        """Generate continuations of three validation blocks. Deterministic for given weights."""
        import numpy as np

        from rayrec.workloads.language_model import continue_prompts

        train = prepared.train
        source = sets["validation"]
        rows = np.linspace(0, len(source) - 1, num=min(NUM_SAMPLES, len(source)), dtype=np.int64)
        inputs = source.read(rows)
        length = max(1, min(PROMPT_TOKENS, train.block_size // 2, *inputs.get(LENGTHS, ())))
        columns = continue_prompts(
            model,
            inputs[TOKENS][:, :length],
            np.full(len(rows), length),
            tokenizer=load_tokenizer(train.tokenizer),
            window=train.block_size,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            device=device,
        )
        return [
            {"kind": "text", "prompt": prompt, "text": text}
            for prompt, text in zip(columns["prompt"], columns["text"], strict=True)
        ]

    # -- scoring and export

    def evaluation_data(self, config: TrainConfig) -> DataConfig:
        return config.evaluated_data

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """Open token blocks (their validation set, if any), or a plain text, cut into blocks with
        the checkpoint's tokenizer. Raises InputError for tokens of another tokenizer, and for a
        text shorter than a block.
        """
        tokenizer = storage.join(checkpoint, TOKENIZER_FOLDER)
        if not is_tokens(path):
            sizes = storage.read_json(storage.join(checkpoint, CONFIG_FILE))
            return text_rows(
                path,
                tokenizer=tokenizer,
                block_size=sizes["block_size"],
                part_bytes=sizes.get("part_bytes", PART_BYTES),
            )
        folder = open_tokens(path)
        if folder.tokenizer_hash != load_tokenizer(tokenizer).hash:
            raise InputError(
                f"{path}: tokenizer does not match the model. Preprocess the text with "
                f"--tokenizer {tokenizer}."
            )
        return _rows(folder, _validation_set(folder, own=True), config.eval_data)

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> ArrayRows:
        """Open a text with one prompt per line. An empty line means a line break. Prompts keep
        their end, at most a block.
        """
        from rayrec.workloads.language_model import read_prompts

        block_size = storage.read_json(storage.join(checkpoint, CONFIG_FILE))["block_size"]
        return read_prompts(
            path, load_tokenizer(storage.join(checkpoint, TOKENIZER_FOLDER)), window=block_size
        )

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> PreTrainedModel:
        require("transformers", extra="language")
        from rayrec.workloads.language_model import build_model

        model: Any = build_model(storage.read_json(storage.join(checkpoint, CONFIG_FILE)))
        model.text_tokenizer = load_tokenizer(storage.join(checkpoint, TOKENIZER_FOLDER))
        return model

    def predict(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, list[str]]:
        """Return the columns `prompt` (as seen by the model) and `text` (its continuation),
        independent of other prompts.
        """
        from rayrec.workloads.language_model import PROMPTS, continue_prompts

        loaded: Any = model  # by `build_from`
        return continue_prompts(
            model,
            tensors[PROMPTS].cpu().numpy(),
            tensors[LENGTHS].cpu().numpy(),
            tokenizer=loaded.text_tokenizer,
            window=loaded.config.block_size,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            device=tensors[PROMPTS].device,
        )

    def export(self, config: TrainConfig, *, checkpoint: str, out: str) -> dict[str, Any]:
        """Write config.json, model.safetensors and tokenizer files for AutoModelForCausalLM and
        AutoTokenizer.
        """
        from rayrec.checkpoint.reader import export_weights

        storage.make_folder(out)
        report = export_weights(checkpoint, out)
        storage.copy_file(storage.join(checkpoint, CONFIG_FILE), storage.join(out, CONFIG_FILE))
        write_tokenizer(read_tokenizer(storage.join(checkpoint, TOKENIZER_FOLDER)), out)
        return dict(report)


def _rows(folder: TokenFolder, name: str, data: DataConfig) -> RowSource:
    from rayrec.data.text.mds import TokenRows

    return TokenRows(
        folder.set_path(name), column=folder.columns.get(name), cache_bytes=data.cache_bytes
    )


def _must_be_tokens(name: str, path: str) -> None:
    if is_tokens(path):
        return
    if not storage.exists(path):
        raise InputError(f"{name}.path: {path}: no such file or folder")
    if find_shard_sets(path):
        raise InputError(
            f"{name}.path: {path} contains MDS shards of another program. Run `rayrec adopt "
            f"{shlex.quote(path)} --tokenizer DIR` (no copy)."
        )
    raise InputError(
        f"{name}.path: {path} must contain token blocks. Create them with `rayrec preprocess "
        f"{path} --format mds --out DIR`, then pass --{name.replace('_', '-')}.path DIR."
    )


def _validation_set(folder: TokenFolder, *, own: bool) -> str:
    """Return the evaluation set. `own` folders, which are not trained on, fall back to their
    training blocks.
    """
    for name in ("validation", "train") if own else ("validation",):
        if folder.sets.get(name):
            return name
    raise InputError(
        f"{folder.path}: no validation blocks. Preprocess with --validation-fraction, or pass "
        "--eval-data.path DIR."
    )
