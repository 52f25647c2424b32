"""Token rows of text: complete, in order, with a separate validation set, and the same bytes after
interruptions.
"""

import gzip
import json
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.engines import Died, LoopEngine
from builders.faults import fails_with, rejects
from builders.runs import QUIET, files_in

import rayrec
from rayrec.data.text.mds import TokenRows
from rayrec.data.text.text_blocks import open_tokens, text_rows
from rayrec.data.text.tokenizer import load_tokenizer
from rayrec.prepare import text as preparing

LINES = [
    f"{number} bottles of beer on the wall, {number} bottles — hé!\n"
    for number in range(400, 0, -1)
]
TEXT = "".join(LINES)


@pytest.fixture
def here(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> LoopEngine:
    engine = LoopEngine()
    monkeypatch.setattr(preparing, "engine", lambda *_, **__: nullcontext(engine))
    return engine


@pytest.fixture
def beer(here: LoopEngine, tmp_path: Path) -> Path:
    (tmp_path / "beer.txt").write_text(TEXT)
    return tmp_path / "beer.txt"


def prepared(path: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    return rayrec.preprocess(
        str(path),
        out=str(out),
        console=QUIET,
        **{
            "format": "mds",
            "block_size": 16,
            "part_bytes": 2048,
            "shard_bytes": 4096,
            "vocabulary_size": None if "tokenizer" in options else 300,
            **options,
        },
    )


def tokens_of(folder: Path, name: str) -> np.ndarray:
    with closing(TokenRows(open_tokens(str(folder)).set_path(name))) as rows:
        return rows.read(np.arange(len(rows)))["tokens"].reshape(-1)


# -- what is written
def test_token_rows_match_text(here: LoopEngine, beer: Path, tmp_path: Path) -> None:
    made = prepared(beer, tmp_path / "out")
    written = open_tokens(str(tmp_path / "out"))
    assert (written.block_size, written.vocabulary_size, written.end_token) == (16, 300, 0)
    assert written.sets == {name: described["blocks"] for name, described in made["sets"].items()}
    assert (written.hash, written.tokenizer_hash) == (made["hash"], made["tokenizer"])
    tokenizer = load_tokenizer(str(tmp_path / "out" / "tokenizer"))
    train, validation = (tokens_of(tmp_path / "out", name) for name in ("train", "validation"))
    held_out = "".join(
        LINES[-LINES[::-1].index(tokenizer.decode(validation[:80]).splitlines()[0] + "\n") - 1 :]
    )
    assert held_out.startswith(tokenizer.decode(validation))
    assert TEXT.removesuffix(held_out).startswith(tokenizer.decode(train))
    assert len(held_out.encode()) / len(TEXT.encode()) == pytest.approx(0.1, abs=0.01)
    assert made["sets"]["train"]["blocks"] * 16 == len(train)
    left_out = len(tokenizer.encode(TEXT.removesuffix(held_out)[len(tokenizer.decode(train)) :]))
    # a token cut in two may be another two
    assert abs(left_out - made["sets"]["train"]["tokens_left_out"]) <= 1
    assert made["sets"]["train"]["tokens_left_out"] < 16
    assert made["vocabulary_size"] == tokenizer.vocabulary_size == 300
    assert here.tasks > 10


def test_transformers_loads_tokenizer(beer: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for kind, options in (("bytes_bpe", {}), ("characters", {"tokenizer": "characters"})):
        prepared(beer, tmp_path / kind, **options)
        theirs = AutoTokenizer.from_pretrained(
            str(tmp_path / kind / "tokenizer"),
            local_files_only=True,
        )
        ours = load_tokenizer(str(tmp_path / kind / "tokenizer"))
        assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ours.encode(TEXT).tolist()
        assert theirs.decode(ours.encode(TEXT)) == ours.decode(ours.encode(TEXT)) == TEXT
        assert (len(theirs), theirs.eos_token_id) == (ours.vocabulary_size, ours.end_token)
    rejects(r"tokenizer: cannot tokenise.*\['Ω'\]", ours.encode, "1 Ω")  # of characters


def test_custom_tokenizer_is_used(beer: Path, tmp_path: Path) -> None:
    first = prepared(beer, tmp_path / "first")
    own = tmp_path / "first" / "tokenizer"
    (own / "model.safetensors").write_bytes(b"weights")
    again = prepared(beer, tmp_path / "again", tokenizer=str(own))
    assert (again["hash"], again["tokenizer"]) == (first["hash"], first["tokenizer"])
    assert {file.name for file in (tmp_path / "again" / "tokenizer").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    old = tmp_path / "old"
    old.mkdir()
    model = json.loads((own / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (old / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert prepared(beer, tmp_path / "converted", tokenizer=str(old))["sets"] == first["sets"]
    np.testing.assert_array_equal(
        tokens_of(tmp_path / "converted", "train"),
        tokens_of(tmp_path / "first", "train"),
    )


def test_ids_above_16_bits_are_stored(beer: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(70_000)]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text(tokenizer.to_str())
    beer.write_text("\n".join(words[60_000:]))
    assert (
        prepared(beer, tmp_path / "out", tokenizer=str(tmp_path / "own"))["vocabulary_size"]
        == 70_000
    )
    train = tokens_of(tmp_path / "out", "train")
    np.testing.assert_array_equal(train, np.arange(60_000, 60_000 + len(train)))
    assert train.max() > 1 << 16


def test_files_are_separated_by_end_tokens(beer: Path, tmp_path: Path) -> None:
    prepared(beer, tmp_path / "one")
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    own = str(tmp_path / "one" / "tokenizer")
    options = {"tokenizer": own, "validation_fraction": 0.0}
    made = prepared(folder, tmp_path / "two", **options)
    assert list(made["sets"]) == ["train"]
    tokens = tokens_of(tmp_path / "two", "train")
    (ends,) = np.flatnonzero(tokens == 0)
    assert load_tokenizer(own).decode(tokens[:ends]) == TEXT
    assert TEXT.startswith(load_tokenizer(own).decode(tokens[ends + 1 :]))
    assert prepared(f"{folder}/*", tmp_path / "three", **options)["hash"] == made["hash"]
    single = prepared(folder, tmp_path / "four", files=("b",), **options)
    assert single["hash"] == prepared(folder / "a.txt", tmp_path / "five", **options)["hash"]


def test_in_memory_text_matches_shards(beer: Path, tmp_path: Path) -> None:
    text = TEXT.replace("\n", "\n\n\n")  # a cut between empty lines leaves other tokens
    beer.write_text(text)
    prepared(beer, tmp_path / "first", validation_fraction=0.0)
    own = str(tmp_path / "first" / "tokenizer")

    def in_memory(path: Path, part_bytes: int) -> np.ndarray:
        rows = text_rows(
            str(path),
            tokenizer=own,
            block_size=16,
            part_bytes=part_bytes,
        )
        return rows.read(np.arange(len(rows)))["tokens"].reshape(-1)

    (tmp_path / "beer.txt.gz").write_bytes(gzip.compress(text.encode()))
    made = {}
    for part_bytes in (1024, 4 << 20):
        out = tmp_path / str(part_bytes)
        prepared(
            beer,
            out,
            tokenizer=own,
            validation_fraction=0.0,
            part_bytes=part_bytes,
        )
        assert open_tokens(str(out)).part_bytes == part_bytes
        made[part_bytes] = tokens_of(out, "train")
        np.testing.assert_array_equal(in_memory(beer, part_bytes), made[part_bytes])
        np.testing.assert_array_equal(
            in_memory(tmp_path / "beer.txt.gz", part_bytes),
            made[part_bytes],
        )
    assert not np.array_equal(*(tokens[:1000] for tokens in made.values()))
    beer.write_text("too short")
    rejects(r"^[^\n]*less than one row of 16\. Use more text\.$", in_memory, beer, 1024)


# -- what happens on the way
@pytest.mark.parametrize(("tokenizer", "tasks_a_call"), [("bytes_bpe", 5), ("characters", 15)])
def test_interrupted_text_job_ends_alike(
    here: LoopEngine,
    beer: Path,
    tmp_path: Path,
    tokenizer: str,
    tasks_a_call: int,
) -> None:
    prepared(beer, tmp_path / "whole", tokenizer=tokenizer)
    tasks, here.tasks = here.tasks, 0
    calls = 0
    while not (tmp_path / "parts").exists():
        calls += 1
        here.left = tasks_a_call  # enough to find all characters, which is started again
        try:
            prepared(beer, tmp_path / "parts", tokenizer=tokenizer)
        except Died:
            assert not (tmp_path / "parts").exists()
            train = tmp_path / "parts.partial" / "train"
            train.mkdir(parents=True, exist_ok=True)
            (train / f"shard.00000.mds.{'0f' * 16}.partial").write_text("of a killed task")
    assert calls > 1
    assert here.tasks == tasks
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    assert not (tmp_path / "parts.partial").exists()


def test_text_job_rejects_changed_inputs(here: LoopEngine, beer: Path, tmp_path: Path) -> None:
    here.left = 5
    fails_with(Died, "", prepared, beer, tmp_path / "out")
    here.left = None
    rejects(
        r"out\.partial: incomplete output of a call.*different block_size",
        prepared,
        beer,
        tmp_path / "out",
        block_size=8,
    )
    beer.write_text(TEXT + "one more\n")
    rejects(r"^[^\n]*different text;[^\n]*$", prepared, beer, tmp_path / "out")


# -- misuse
@pytest.mark.parametrize(
    ("options", "reported"),
    [
        pytest.param({"tokenizer": "gpt2"}, "gpt2 not found", id="tokenizer-gpt2"),
        pytest.param(
            {"tokenizer": "characters", "vocabulary_size": 300},
            "must be used with tokenizer bytes_bpe only",
            id="tokenizer-characters",
        ),
        pytest.param({"vocabulary_size": 200}, "at least 257", id="vocabulary_size-200"),
        pytest.param(
            {"block_size": 100_000},
            "less than one row of 100000",
            id="block_size-100000",
        ),
        pytest.param({"validation_fraction": 1.0}, "below 1", id="validation_fraction-1.0"),
        pytest.param(
            {"validation_fraction": 0.00001},
            "the validation text has",
            id="validation_fraction-1e-05",
        ),
        pytest.param(
            {"preprocessor": "x"},
            "--preprocessor: an option for click logs, not for --format mds",
            id="preprocessor-x",
        ),
        pytest.param({"shuffle": "full"}, "--shuffle: an option for click logs", id="shuffle-full"),
        pytest.param({"min_count": 3}, "--min-count: an option for click logs", id="min_count-3"),
        pytest.param({"engine": "spark"}, "--engine: an option for click logs", id="engine-spark"),
        pytest.param({"format": "npy"}, "an option for text", id="format-npy"),
        pytest.param({"blocksize": 3}, "blocksize", id="blocksize-3"),
        pytest.param({"files": ("c",)}, ".", id="files-c"),
    ],
)
def test_text_options_are_rejected_in_one_line(
    options: dict[str, Any],
    reported: str,
    beer: Path,
    tmp_path: Path,
) -> None:
    path = beer.parent if "files" in options else beer
    out = tmp_path / "-".join(options)
    rejects(rf"^[^\n]*{reported}[^\n]*$", prepared, path, out, **options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, r"beer\.txt: no such file or folder"),
        (
            TEXT.encode()[:9_001] + b"\xff" + TEXT.encode(),
            r"beer\.txt: byte 9,001 is not UTF-8[^\n]*",
        ),
        (b"", r"beer\.txt: contains no text"),
        (b"text", r"out: exists already; [^\n]*"),
    ],
)
def test_invalid_text_is_rejected_in_one_line(
    beer: Path,
    tmp_path: Path,
    content: bytes | None,
    why: str,
) -> None:
    beer.unlink() if content is None else beer.write_bytes(content)
    if content == b"text":
        (tmp_path / "out").mkdir()
    rejects(rf"^[^\n]*{why}$", prepared, beer, tmp_path / "out", tokenizer="characters")


def test_open_tokens_rejects_other_folders(tmp_path: Path) -> None:
    rejects(
        r"^[^\n]*manifest\.json not found\. Make it with `rayrec preprocess[^\n]*$",
        open_tokens,
        str(tmp_path),
    )
    (tmp_path / "manifest.json").write_text('{"format": "rayrec-tokens", "version": 99}')
    rejects(r"^[^\n]*must be of prepared text, version 1\.[^\n]*$", open_tokens, str(tmp_path))
