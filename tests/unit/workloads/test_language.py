"""Tests of the language workload: row losses, generation, weights, and invalid input."""

import copy
import json
import math
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects, watched
from ranks.checkpoint import same
from ranks.data_parallel import products_by_onednn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
from transformers import GPT2Config as HuggingFaceConfig

from rayrec import checkpoint
from rayrec.checkpoint.writer import ExtraFiles
from rayrec.data.engine import ThreadEngine
from rayrec.data.numbered_rows import ArrayRows
from rayrec.data.text import text_blocks
from rayrec.data.text.text_blocks import TokenFolder, open_tokens
from rayrec.data.text.tokenizer import (
    Files,
    TextTokenizer,
    bytes_bpe,
    characters,
    load_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from rayrec.recipes.gpt2 import gpt2, gpt2_tiny
from rayrec.workloads import language_model
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext
from rayrec.workloads.data_parallel.scoring import load_model
from rayrec.workloads.data_parallel.worker import multiply_adds_per_row
from rayrec.workloads.language import GPT2Config, LanguageWorkload, Prepared
from rayrec.workloads.language_model import (
    LENGTHS,
    PROMPTS,
    continue_prompts,
    generate,
    load_weights,
    read_prompts,
    row_losses,
)

BLOCK = 16
PART_BYTES = 1024
TEXT = "the quick brown fox jumps over the lazy dog.\n"
SMALL = GPT2Config(
    n_layer=2,
    n_head=2,
    n_embd=16,
    n_positions=BLOCK,
    dropout=0.0,
)
Saved = tuple[TrainConfig, str, Any]
FILES = characters(set(TEXT))
ROWS = {"train": 20, "validation": 4}
TOKENIZER = TextTokenizer(FILES, "tokenizer")


def folder_of(
    path: Path, *, files: Files = FILES, block_size: int = BLOCK, sets: Any = ROWS, text: str = ""
) -> TokenFolder:
    path.mkdir(exist_ok=True)
    tokenizer = TextTokenizer(files, "tokenizer")
    write_tokenizer(files, str(path / "tokenizer"))
    manifest = {
        "format": "rayrec-tokens",
        "version": 1,
        "block_size": block_size,
        "part_bytes": PART_BYTES,
    }
    manifest |= {
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer": tokenizer.hash,
        "end_token": tokenizer.end_token,
    }
    manifest |= {
        "sets": {name: {"blocks": count} for name, count in sets.items()},
        "hash": f"{block_size}{text}",
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return open_tokens(str(path))


def small(path: Path | None, **workload: Any) -> TrainConfig:
    model = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": BLOCK,
    }
    return gpt2_tiny(path and str(path)).replace(
        workload={"model": model, "max_new_tokens": 12, **workload}
    )


def prepare(config: TrainConfig, folder: Path) -> Prepared:
    config.workload.check(config)
    context = RunContext(
        config, str(folder), ThreadEngine(1), lambda text: None, lambda label, done, total: None
    )
    return config.workload.prepare(context)


def model_of(vocabulary_size: int = 30, *, seed: int = 0, scale: float = 5.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    model = SMALL.build(vocabulary_size).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(scale)
    return model


# -- the arithmetic
def test_row_losses_match_model_and_cost_counts_products() -> None:
    model = model_of(scale=1.0)
    text_blocks = torch.randint(0, 30, (5, BLOCK))
    losses = row_losses(model, text_blocks)
    assert losses.shape == (5,)
    assert losses.mean().item() == pytest.approx(
        model(text_blocks, labels=text_blocks).loss.item(), rel=1e-6
    )
    for row, loss in zip(text_blocks, losses, strict=True):
        assert loss.item() == pytest.approx(
            model(row[None], labels=row[None]).loss.item(), rel=1e-5
        )
    workload = LanguageWorkload()
    assert workload.metrics({"loss": 2.0}) == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2.0)),
    }
    assert math.isfinite(workload.metrics({"loss": 1e6})["perplexity"])
    assert workload.score({"loss": 1.0}) > workload.score({"loss": 2.0})
    # so that the largest are oneDNN's
    width = 512
    layers = 2
    vocabulary_size = 40
    config = small(None, model={"n_layer": layers, "n_embd": width})
    torch.manual_seed(0)
    model = config.workload.model.build(vocabulary_size)
    rows = ArrayRows({"tokens": np.zeros((3, BLOCK), np.int64)})
    context = WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1))
    cost = multiply_adds_per_row(config.workload, model, {"validation": rows}, context)
    assert cost == BLOCK * (
        layers * (12 * width * width + 2 * BLOCK * width) + vocabulary_size * width
    )


# -- generation
def prompts_of(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-align prompts, padded with a token that must not matter."""
    width = max(map(len, rows))
    return torch.tensor([[7] * (width - len(row)) + row for row in rows]), torch.tensor(
        [len(row) for row in rows]
    )


def made(
    model: torch.nn.Module, *rows: list[int], count: int, temperature: float = 0.0, **how: Any
) -> list[list[int]]:
    prompts, lengths = prompts_of(*rows)
    chances = how.pop("chances", torch.full((len(rows), count), 0.5))
    how = {"window": BLOCK, "end_token": None, **how}
    return generate(
        model, prompts, lengths, chances=chances, temperature=temperature, **how
    ).tolist()


def test_greedy_text_matches_transformers_and_without_cache() -> None:
    model = model_of()
    prompt = torch.tensor([[3, 1, 4]])
    greedy = {"max_new_tokens": BLOCK - 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)[
        0, 3:
    ].tolist()
    assert made(model, [3, 1, 4], count=BLOCK - 3) == [expected]

    tokens = [3, 1, 4]
    texts = []
    for _ in range(40):
        if len(tokens) > BLOCK:
            tokens = tokens[-BLOCK // 2 :]
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(logits[0, -1].argmax().item())
        texts.append(tokens[-1])
    assert made(model, [3, 1, 4], count=40) == [texts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuation_is_independent_of_padding(temperature: float) -> None:
    model = model_of()
    chances = torch.rand(3, 40, generator=torch.Generator().manual_seed(1))
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [2]]
    together = made(
        model,
        *rows,
        count=40,
        temperature=temperature,
        chances=chances,
    )
    for number, row in enumerate(rows):
        # The longest has no padding in either; the others go on alike up to where windows end at
        # other tokens.
        count = 40 if number == 1 else 10
        own = chances[number : number + 1, :count]
        assert (
            made(
                model,
                row,
                count=count,
                temperature=temperature,
                chances=own,
            )[0]
            == together[number][:count]
        )


def test_sampling_follows_probabilities_and_prompt_only() -> None:
    model = model_of(scale=2.0)
    probabilities = model(torch.tensor([[3, 1, 4]])).logits[0, -1].softmax(dim=0)
    rows = 4000
    chances = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0))
    drawn = torch.tensor(
        made(
            model,
            *[[3, 1, 4]] * rows,
            count=1,
            temperature=1.0,
            chances=chances,
        )
    ).flatten()
    assert (torch.bincount(drawn, minlength=30) / rows - probabilities).abs().max() < 0.03
    assert (
        made(
            model,
            [3, 1, 4],
            count=1,
            temperature=1.0,
            chances=torch.tensor([[0.0]]),
        )[0][0]
        >= 0
    )
    assert (
        made(
            model,
            [3, 1, 4],
            count=1,
            temperature=1.0,
            chances=torch.tensor([[1 - 2**-24]]),
        )[0][0]
        < 30
    )
    model = model_of(TOKENIZER.vocabulary_size, scale=1.0)
    settings: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "window": BLOCK,
        "max_new_tokens": 8,
        "temperature": 1.0,
    }

    def texts(*prompts: str) -> list[str]:
        rows, lengths = prompts_of(*(TOKENIZER.encode(prompt).tolist() for prompt in prompts))
        return continue_prompts(
            model, rows.numpy(), lengths.numpy(), device=torch.device("cpu"), **settings
        )["text"]

    together = texts("the dog", "fox", "the dog")
    assert together[0] == together[2] == texts("the dog")[0]
    assert together[1] == texts("fox")[0]
    assert together[0] != together[1]
    assert all(len(text) == 8 for text in together)


def test_prompts_are_lines_and_generation_stops_at_end_token(tmp_path: Path) -> None:
    model = model_of(TextTokenizer(bytes_bpe([TEXT * 20], 280), "tokenizer").vocabulary_size)
    free = made(model, [3, 1, 4], [5, 9], count=30)
    end = free[0][4]
    stopped = made(model, [3, 1, 4], [5, 9], count=30, end_token=end)
    first = free[0].index(end)
    assert (stopped[0][: first + 1], set(stopped[0][first:])) == (free[0][: first + 1], {end})
    # nothing is made after it
    assert len(made(model, [3, 1, 4], count=30, end_token=end)[0]) == first + 1
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"the fox\r\n\n" + b"the lazy dog " * 3)
    arrays = read_prompts(str(path), TOKENIZER, window=BLOCK).read(np.arange(3))
    assert arrays[LENGTHS].tolist() == [7, 1, BLOCK]
    pairs = zip(arrays[PROMPTS], arrays[LENGTHS], strict=True)
    texts = [TOKENIZER.decode(row[len(row) - length :]) for row, length in pairs]
    assert texts == ["the fox", "\n", ("the lazy dog " * 3)[-BLOCK:]]
    for content, message in ((b"the\xe9\n", "got an invalid byte at 3"), (b"", "has no prompts")):
        path.write_bytes(content)
        rejects(message, read_prompts, str(path), TOKENIZER, window=BLOCK)


# -- checkpoints, exports and initial weights
def built_and_saved(config: TrainConfig, prepared: Prepared, folder: Path) -> tuple[str, Any]:
    """Return the path of a checkpoint, and its model."""
    torch.manual_seed(0)
    model = config.workload.build(prepared)
    step = str(folder / "step")
    tensors = {
        f"model.{name}": value
        for name, value in checkpoint.drop_tied_tensors(model.state_dict()).items()
    }
    checkpoint.save(
        step,
        tensors,
        state={},
        extra_files=ExtraFiles(config.workload.checkpoint_files(prepared)).write,
    )
    return step, model


@pytest.fixture(scope="module", params=["characters", "bytes_bpe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    files = FILES if request.param == "characters" else bytes_bpe([TEXT * 20], 280)
    config = small(folder / "tokens")
    folder_of(folder / "tokens", files=files)
    return config, *built_and_saved(config, prepare(config, folder), folder)


def test_tied_weights_are_stored_once_and_export_loads_elsewhere(
    saved: Saved, tmp_path: Path
) -> None:
    config, folder, model = saved
    names = list(checkpoint.Checkpoint(folder).manifest()["tensors"])
    assert "model.transformer.wte.weight" in names
    assert "model.lm_head.weight" not in names
    reported = config.workload.export(config, checkpoint=folder, out=str(tmp_path / "out"))
    assert reported["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    other, problems = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(problems.values())
    text_blocks = torch.randint(0, model.config.vocab_size, (2, BLOCK))
    for again in (load_model(config.workload, config, checkpoint=folder), other):
        assert torch.equal(again(text_blocks).logits, model.eval()(text_blocks).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(f"{folder}/tokenizer")
    assert tokenizer("the lazy fox")["input_ids"] == ours.encode("the lazy fox").tolist()
    assert tokenizer.eos_token_id == ours.end_token == other.config.eos_token_id


def test_predictions_continue_prompts(saved: Saved, tmp_path: Path) -> None:
    config, folder, _ = saved
    path = tmp_path / "prompts.txt"
    path.write_text("the fox\n\nquick\n")
    source = config.workload.open_inputs(config, checkpoint=folder, path=str(path))
    model = load_model(config.workload, config, checkpoint=folder)

    def predicted(*numbers: int) -> dict[str, list[str]]:
        tensors = {
            name: torch.from_numpy(array) for name, array in source.read(np.array(numbers)).items()
        }
        with torch.inference_mode():
            return config.workload.predict(model, tensors)

    columns = predicted(0, 1, 2)
    assert columns["prompt"] == ["the fox", "\n", "quick"]
    assert columns == {
        name: [predicted(number)[name][0] for number in range(3)] for name in columns
    }
    assert all(columns["text"])


def test_scoring_uses_tokenizer_and_cut_of_training(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder, _ = saved
    (tmp_path / "more.txt").write_text(TEXT * 3)
    source = config.workload.open_labelled(
        config, checkpoint=folder, path=str(tmp_path / "more.txt")
    )
    rows = source.read(np.arange(len(source)))["tokens"]
    assert rows.shape[1] == BLOCK
    assert (TEXT * 3).startswith(load_tokenizer(f"{folder}/tokenizer").decode(rows.reshape(-1)))
    folder_of(tmp_path / "other", files=characters(set("other characters")))
    open_labelled = partial(config.workload.open_labelled, config, checkpoint=folder)
    rejects("tokenizer does not match the model", open_labelled, path=str(tmp_path / "other"))
    reads = watched(monkeypatch, text_blocks, "read_texts")
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    described = json.loads((older / "config.json").read_text())
    del described["part_bytes"]
    (older / "config.json").write_text(json.dumps(described))
    for checkpoint_folder in (folder, str(older)):
        config.workload.open_labelled(
            config, checkpoint=checkpoint_folder, path=str(tmp_path / "more.txt")
        )
    assert [part_bytes for _, part_bytes, _ in reads] == [PART_BYTES, 4 << 20]


def test_training_starts_from_matching_pretrained_weights(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers exports, save_pretrained, and hub weights without the name prefix and with masks."""
    from safetensors.torch import load_file, save_file

    config, folder, model = saved
    export = tmp_path / "export"
    config.workload.export(config, checkpoint=folder, out=str(export))
    model.save_pretrained(tmp_path / "saved")
    hub = tmp_path / "hub"
    hub.mkdir()
    stored = load_file(export / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file({**plain, "h.0.attn.bias": torch.ones(1, 1, BLOCK, BLOCK)}, hub / "model.safetensors")
    for place in (export, tmp_path / "saved", hub):
        other = SMALL.build(model.config.vocab_size)
        load_weights(other, str(place))
        assert same(other.state_dict(), model.state_dict()), place
    del plain["ln_f.bias"]
    save_file(plain, hub / "model.safetensors")
    rejects(
        r"ln_f.bias must have shape \[16\], as in the model, got None",
        load_weights,
        other,
        str(hub),
    )
    (hub / "model.safetensors").rename(hub / "pytorch_model.bin")
    rejects(
        "model.safetensors not found. Other formats may contain code", load_weights, other, str(hub)
    )
    for path in (str(export), "export"):
        begun = config.replace(workload={"weights": path})
        # the relative path is of the driver's directory, which is not the workers'
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            prepared = prepare(begun, tmp_path)
        torch.manual_seed(5)
        assert torch.equal(
            begun.workload.build(prepared).transformer.wte.weight, model.transformer.wte.weight
        )
    wider = config.replace(workload={"weights": str(export), "model": {"n_embd": 32}})
    rejects("n_embd must be 32, as in the model, got 16", prepare, wider, tmp_path)


SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "gpt_neox": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},  # without position_ids
}


def described(folder: Path, kind: str, **values: Any) -> str:
    folder.mkdir(parents=True)
    sizes = {
        "model_type": kind,
        "vocab_size": 40,
        "torch_dtype": "bfloat16",
        **SIZES.get(kind, {}),
        **values,
    }
    (folder / "config.json").write_text(
        json.dumps({**sizes, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}})
    )
    return str(folder)


@pytest.mark.parametrize("kind", SIZES)
def test_config_folder_builds_any_causal_model(tmp_path: Path, kind: str) -> None:
    """Built, saved, scored, continued, exported, and trained from the export's weights; code that
    it names is not looked for.
    """
    folder_of(tmp_path / "tokens")
    config = small(tmp_path / "tokens", model={"config": described(tmp_path / "config", kind)})
    prepared = prepare(config, tmp_path)
    step, model = built_and_saved(config, prepared, tmp_path)
    model.eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert prepared.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    out = str(tmp_path / "out")
    loaded = load_model(config.workload, config, checkpoint=step)
    config.workload.export(config, checkpoint=step, out=out)
    tokens = torch.randint(0, 28, (2, BLOCK))
    for other in (loaded, AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)):
        assert type(other) is type(model)
        assert torch.equal(other(tokens).logits, model(tokens).logits)
    (tmp_path / "prompts.txt").write_text("the fox\nquick\n")
    source = config.workload.open_inputs(
        config, checkpoint=step, path=str(tmp_path / "prompts.txt")
    )
    inputs = {name: torch.from_numpy(array) for name, array in source.read(np.arange(2)).items()}
    with torch.inference_mode():
        both = config.workload.predict(loaded, inputs)["text"]
        alone = [
            config.workload.predict(
                loaded, {name: each[row, None] for name, each in inputs.items()}
            )
            for row in range(2)
        ]
    assert both == [columns["text"][0] for columns in alone]
    tuned = config.replace(workload={"weights": out})
    torch.manual_seed(1)
    assert same(tuned.workload.build(prepare(tuned, tmp_path)).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("vit", {}, "model_type must be a causal model of transformers, got vit"),
        (
            "mamba",
            {"hidden_size": 16, "num_hidden_layers": 1},
            "must cache keys and values for generation, got mamba",
        ),
        ("llama", {"vocab_size": 5}, r"vocab_size must be at least \d+, as in the tokens, got 5"),
        (
            "llama",
            {"max_position_embeddings": 4},
            f"max_position_embeddings must be at least {BLOCK}, .* got 4",
        ),
        ("llama", {"num_attention_heads": 0}, "transformers cannot build the model"),
    ],
)
def test_config_folder_rejects_unsuitable_models(
    tmp_path: Path, kind: str, values: dict[str, Any], message: str
) -> None:
    folder_of(tmp_path / "tokens")
    config = small(
        tmp_path / "tokens", model={"config": described(tmp_path / "config", kind, **values)}
    )
    rejects(message, prepare, config, tmp_path)


# -- the run around it
def test_samples_continue_validation_text(tmp_path: Path) -> None:
    folder_of(tmp_path)
    config = small(tmp_path)
    prepared = prepare(config, tmp_path)
    rows = np.stack([TOKENIZER.encode(TEXT)[start : start + BLOCK] for start in range(4)]).astype(
        np.int64
    )
    model = config.workload.build(prepared)
    sets = {"validation": ArrayRows({"tokens": rows})}

    def samples() -> list[dict[str, Any]]:
        return config.workload.samples(
            model, prepared=prepared, sets=sets, device=torch.device("cpu")
        )

    made = samples()
    assert [sample["kind"] for sample in made] == ["text"] * 3
    assert [sample["prompt"] for sample in made] == [
        TEXT[start : start + BLOCK // 2] for start in (0, 1, 3)
    ]
    assert all(len(sample["text"]) == 12 for sample in made)
    assert samples() == made
    json.dumps(made)


def test_shard_cache_respects_limit(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayrec.data.text import mds

    _, checkpoint_folder, _ = saved
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    token_folder = tmp_path / "tokens"
    rows = np.arange(4 * BLOCK, dtype=np.uint16).reshape(4, BLOCK)
    folder_of(
        token_folder,
        files=read_tokenizer(f"{checkpoint_folder}/tokenizer"),
        sets={"train": 4, "validation": 4},
    )
    for name in ("train", "validation"):
        mds.write_index(
            str(token_folder / name),
            [mds.write_shard(rows, str(token_folder / name / "shard.00000.mds"))],
        )
    url = f"file://{token_folder}"

    def open_with(opened: str, **limits: int) -> None:
        config = gpt2_tiny(url).replace(
            **{data: {"cache_bytes": limit} for data, limit in limits.items()}
        )
        if opened == "labelled":
            source = config.workload.open_labelled(config, checkpoint=checkpoint_folder, path=url)
        else:
            folder = open_tokens(url)
            context = WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1))
            source = config.workload.open_set(
                context, Prepared(folder, folder, "validation", {}, 0), opened
            )
        np.testing.assert_array_equal(source.read(np.arange(4))["tokens"], rows)
        source.close()

    for opened in ("train", "validation", "labelled"):
        limited, other = sorted(("train_data", "eval_data"), reverse=opened == "train")
        open_with(opened, **{limited: 1 << 20, other: 1})
        rejects("cache_bytes 1 is too small", open_with, opened, **{limited: 1, other: 1 << 20})
    rejects(
        r"DataConfig.cache_bytes: must be at least 1, got 0",
        gpt2_tiny(url).replace,
        train_data={"cache_bytes": 0},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_size": 2 * BLOCK},
            "blocks of 32 tokens exceed the model's n_positions 16. Raise "
            "--workload.model.n-positions",
        ),
        ({"sets": {"train": 4}}, "no validation blocks. Preprocess with --validation-fraction, or"),
        ({"sets": {"train": 0, "validation": 4}}, "has no training blocks"),
    ],
)
def test_prepare_rejects_unusable_tokens(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder_of(tmp_path, **changes)
    rejects(message, prepare, small(tmp_path), tmp_path)


def test_plain_text_error_names_preprocess_command(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for path, message in (
        (
            text,
            rf"rayrec preprocess {text} --format mds --out DIR`, then pass --train-data.path DIR.$",
        ),
        (tmp_path / "none", f"{tmp_path}/none: no such file or folder$"),
        (None, "must be a folder of token blocks"),
    ):
        rejects(message, prepare, small(path), tmp_path)


def test_evaluation_rejects_other_tokens_and_uses_all_blocks(tmp_path: Path) -> None:
    folder_of(tmp_path / "tokens")
    folder_of(tmp_path / "same")
    folder_of(tmp_path / "other", files=characters(set("others")), text="others")
    configs = [small(tmp_path / name) for name in ("tokens", "same", "other")]
    tokens, same, other = (
        config.workload.data_hash(prepare(config, tmp_path)) for config in configs
    )
    assert tokens == same != other
    apart = configs[0].replace(eval_data={"path": str(tmp_path / "other")})
    rejects("block size, tokenizer or vocabulary does not match", prepare, apart, tmp_path)
    for name, sets in (("tokens", {"train": 8}), ("held_out", {"train": 5})):
        folder_of(tmp_path / name, sets=sets)
    config = small(tmp_path / "tokens").replace(eval_data={"path": str(tmp_path / "held_out")})
    assert config.workload.set_rows(prepare(config, tmp_path)) == {"train": 8, "validation": 5}


def test_recipes_match_descriptions() -> None:
    tiny = gpt2_tiny()
    full = gpt2()
    assert tiny.workload.model.num_parameters(65) == 818_048
    assert full.workload.model.num_parameters(50_257) == 124_439_808
    assert full.batch_size * full.scaling.max_workers * full.workload.model.n_positions == 491_520
    assert full.batch_size % full.workload.accumulate == 0
    for config in (tiny, full):
        assert config.replace(loop="huggingface").loop == "huggingface"


# -- GPT-2 models against HuggingFace, and their oneDNN layers
WIDE = GPT2Config(
    n_layer=2,
    n_head=2,
    n_embd=64,
    n_positions=24,
    dropout=0.0,
)
"""Config wide enough for oneDNN, also in the backward pass."""


def pair(activation: str = "gelu_new") -> tuple[GPT2LMHeadModel, GPT2LMHeadModel]:
    """Return ours and HuggingFace's, by default with GPT-2's activation. All other settings are
    transformers' defaults.
    """
    sizes = {
        "vocab_size": 50,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "n_positions": 24,
        "activation_function": activation,
    }
    model = WIDE.build(50, end_of_text=49)
    other = GPT2LMHeadModel(
        HuggingFaceConfig(
            **sizes,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )
    other.load_state_dict(model.state_dict())
    return model, other


def test_loss_and_gradients_match_huggingface(monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_by_onednn(monkeypatch)
    tokens = torch.randint(0, 50, (4, 24))
    model, other = pair()
    assert [*model.state_dict()] == [*other.state_dict()]
    assert (model.config.eos_token_id, model.config.n_positions) == (49, 24)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == WIDE.num_parameters(50)
    shapes, expected = (
        {name: value.shape for name, value in each.named_parameters()} for each in (model, other)
    )
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
        ours, others = (each(tokens).logits for each in pair("gelu_pytorch_tanh"))  # the fused one
    assert not products
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, others, atol=0.02, rtol=0.02)  # Attention is float32
    monkeypatch.setattr(language_model, "_MIN_MULTIPLY_ADDS", 2 * 24 * 64 * 4 * 64)
    model, other = pair()
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)
    assert len(products) == 2 * WIDE.n_layer  # the two wide ones of each block


@pytest.mark.parametrize("mask", [None, torch.bool, torch.bfloat16])
def test_bf16_attention_computes_in_float32(mask: torch.dtype | None) -> None:
    tensors = torch.randn(3, 2, 4, 6, 8).bfloat16()  # Query, key and value of 4 heads, 6 tokens
    kept = torch.rand(2, 1, 6, 6).tril() > 0.2
    kept[..., 0] = True
    masks: dict[torch.dtype | None, torch.Tensor | None] = {
        None: None,
        torch.bool: kept,
        torch.bfloat16: torch.zeros(kept.shape).masked_fill(~kept, -torch.inf).bfloat16(),
    }
    inputs = tensors.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = language_model._attend(torch.nn.Module(), *inputs, masks[mask])
    wide = tensors.float().requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *wide, attn_mask=None if mask is None else kept, is_causal=mask is None
    ).transpose(1, 2)
    assert torch.equal(output, expected.bfloat16())
    factors = torch.randn(output.shape).bfloat16()
    (output * factors).sum().backward()
    (expected * factors.float()).sum().backward()
    assert inputs.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(inputs.grad, wide.grad.bfloat16(), atol=1e-2, rtol=1e-2)


def test_rows_of_equal_length_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch, language_model, "sdpa_attention_forward")
    model, _ = pair()
    row_losses(model, torch.randint(0, 50, (4, 24)))
    assert len(calls) == WIDE.n_layer
    assert all(arguments[4] is None for arguments in calls)


def test_onednn_layers_support_copy_pickle_and_checkpointing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    products_by_onednn(monkeypatch)
    tokens = torch.randint(0, 50, (2, 24))
    model, _ = pair()
    model(tokens, labels=tokens).loss.backward()
    model.eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path)(tokens).logits, model(tokens).logits
    )
    model.train()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_settings_reject_invalid_values() -> None:
    for config, fields, message in (
        (GPT2Config, {"n_layer": 0}, "n_layer: must be at least 1, got 0"),
        (GPT2Config, {"n_embd": 10, "n_head": 3}, "must be a multiple of n_head 3"),
        (GPT2Config, {"dropout": 1.0}, "below 1"),
        (LanguageWorkload, {"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        *(
            (LanguageWorkload, {"temperature": t}, "must be at least 0 and below inf, got")
            for t in (-1.0, math.inf)
        ),
    ):
        rejects(message, config, **fields)
