"""Extended Preprocessors: old categories keep their ids, new ones get further ids."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from builders.logs import made_from, open_index

from rayrec.config import InputError
from rayrec.data.encoding.counts import Counts
from rayrec.data.encoding.extension import extend
from rayrec.data.encoding.known_categories import OOVCounter
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import ALL, FUXICTR_X4, MLPERF_V1, NVT, RAY_TEMPLATE, RAYREC, TORCHREC, Preset
from rayrec.data.logs.text_log import read_segments
from rayrec.data.raw_block import RawBlock
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig
from rayrec.prepare.preprocess import vocabulary
from rayrec.schema import Feature, Schema

make_vocabulary = functools.partial(vocabulary, console=Console(quiet=True))
SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("A",), sparse=("C", "D"))


def lines(*columns: str) -> bytes:
    """Return Criteo text of rows with one-digit tokens in column C, `.` if empty; D repeats C."""
    return b"".join(
        f"0\t3\t{token}\t{token}\n".replace(".", "").encode()
        for column in columns
        for token in (digit if digit == "." else digit * 8 for digit in column)
    )


def read(text: bytes, folder: Path) -> RawBlock:
    folder.mkdir(parents=True)
    (folder / "day_0").write_bytes(text)
    return read_segments(open_index(folder, SCHEMA).segments, SCHEMA)


def counted(preset: Preset, text: bytes, folder: Path) -> Counts:
    job, raw = preset.counting(SCHEMA), read(text, folder)
    counts = job.empty()
    counts.add_source(raw, f"{folder}/day_0")
    counts.add_rows(job.derivation.counted(raw), 0)
    return counts


def extended(preset: Preset, old: str, new: str, folder: Path) -> tuple[Preprocessor, Preprocessor]:
    """Extend by column C as read by `lines`, and check that no old id has changed."""
    before = made_from(read(lines(old), folder / "old"), SCHEMA, preset)
    extension = extend(before, preset, counted(preset, lines(new), folder / "new"))
    after = extension.preprocessor
    raw = read(lines("".join(sorted(set(old + new)))), folder / "both")
    old_ids, new_ids = before.encode(raw).ids[0], after.encode(raw).ids[0]
    known = OOVCounter(before).count(raw, before.encode(raw))[:, 0] == 0
    assert known.any()
    if before.sparse[0].missing_id == before.sparse[0].unknown_id:  # an empty field may become a category
        known &= ~raw.is_missing("C")
    assert (old_ids[known] == new_ids[known]).all()
    assert before.sparse[0].unknown_id == after.sparse[0].unknown_id
    assert max(new_ids) < after.num_embeddings[0]
    assert extension.existing["C"] == before.sparse[0].num_tokens
    assert extension.appended["C"] == after.sparse[0].num_tokens - before.sparse[0].num_tokens
    assert before.dense == after.dense
    assert after.constants["extends"] == before.hash() != after.hash()
    assert after.inputs == before.inputs
    after.save(str(folder / "saved"))
    assert Preprocessor.load(str(folder / "saved")).hash() == after.hash()
    return before, after


def hexadecimal(preprocessor: Preprocessor) -> str:
    return "".join(f"{token:08x}"[0] for token in preprocessor.vocabulary(0).tolist())


def test_extension_appends_by_falling_count_or_in_row_order(tmp_path: Path) -> None:
    before, after = extended(RAYREC, "aabbb", "ccddda.efeaaaa", tmp_path)
    assert (hexadecimal(before), hexadecimal(after)) == ("ba", "badce")
    assert (after.num_embeddings, after.constants["rows"]) == ([7, 7], 5 + 14)
    before, after = extended(TORCHREC, "bbbaaa", "cdcdcddbbb", tmp_path / "torchrec")
    assert (hexadecimal(before), hexadecimal(after)) == ("ba", "bacd")
    assert after.file_minimum == before.file_minimum


@pytest.mark.parametrize("preset", [MLPERF_V1, FUXICTR_X4.replace(min_count=1, dense="identity")])
def test_extension_keeps_last_row_of_unknown_categories(tmp_path: Path, preset: Preset) -> None:
    before, after = extended(preset, "aab", "ccd", tmp_path)
    unknown = before.sparse[0].unknown_id
    assert unknown == before.num_embeddings[0] - 1
    assert after.sparse[0].ids().tolist() == [*before.sparse[0].ids().tolist(), unknown + 1, unknown + 2]
    assert after.num_embeddings[0] == before.num_embeddings[0] + 2
    again = extend(after, preset, counted(preset, lines("e"), tmp_path / "more")).preprocessor
    assert again.sparse[0].ids().tolist() == [*after.sparse[0].ids().tolist(), unknown + 3]


def test_extension_adds_frequent_empty_field(tmp_path: Path) -> None:
    before, after = extended(RAY_TEMPLATE, "aaabbb", "cccc...ddd", tmp_path)
    assert before.sparse[0].missing_id == before.sparse[0].unknown_id
    assert after.sparse[0].ids().tolist() == [2, 3, 4, 6]  # the empty field comes before those as frequent
    assert after.sparse[0].missing_id == 5
    before, after = extended(MLPERF_V1, "aab", "c..d", tmp_path / "zero")
    assert before.sparse[0].missing_id == before.sparse[0].unknown_id
    assert after.vocabulary(0)[after.sparse[0].ids() == after.sparse[0].missing_id].tolist() == [0]


def test_hashed_columns_stay(tmp_path: Path) -> None:
    nvt = NVT.replace(num_embeddings=(11, 7))
    before = made_from(read(lines("aab"), tmp_path / "old"), SCHEMA, nvt)
    after = extend(before, nvt, counted(nvt, lines("ccdd"), tmp_path / "new"))
    assert after.preprocessor.sparse == before.sparse
    assert after.existing == after.appended == {}


def test_extension_omits_rare_categories_beyond_limit(tmp_path: Path) -> None:
    preset = RAYREC.replace(max_num_embeddings=5)
    before = made_from(read(lines("aabb"), tmp_path / "first"), SCHEMA, preset)
    extension = extend(before, preset, counted(preset, lines("ccddda"), tmp_path / "log"))
    assert list(hexadecimal(extension.preprocessor)) == ["a", "b", "d"]
    assert extension.left_out == {"C": 1, "D": 1}
    _, after = extended(preset.replace(beyond_limit="modulo"), "aabb", "ccddda", tmp_path / "modulo")
    assert (after.num_embeddings[0], after.sparse[0].ids().tolist()) == (5, [2, 3, 4, 0])


@pytest.mark.parametrize("name", [name for name in ALL if name != "nvt"])
def test_extension_keeps_ids_for_all_presets(click_log: Path, tmp_path: Path, name: str) -> None:
    text = (click_log / "train.txt").read_bytes().splitlines(keepends=True)
    (tmp_path / "first.txt").write_bytes(b"".join(text[:3000]))
    (tmp_path / "second.txt").write_bytes(b"".join(text[12000:15000]))
    config = PreparationConfig(preset=name, engine="threads")
    make_vocabulary(str(tmp_path / "first.txt"), out=str(tmp_path / "old"), config=config)
    second, extending = str(tmp_path / "second.txt"), PreparationConfig(engine="threads")
    made = make_vocabulary(second, out=str(tmp_path / "new"), extend=str(tmp_path / "old"), config=extending)
    alone = make_vocabulary(second, out=str(tmp_path / "alone"), config=config)
    old, new, other = (Preprocessor.load(str(tmp_path / folder)) for folder in ("old", "new", "alone"))
    assert (made["extends"], made["hash"]) == (old.hash(), new.hash())
    assert made["rows"] == 6000 == old.constants["rows"] + alone["rows"]
    for place, column in enumerate(old.inputs.sparse):
        before, after = (dict(zip(p.vocabulary(place).tolist(), p.sparse[place].ids().tolist(), strict=True)) for p in (old, new))
        assert before.items() <= after.items()
        assert list(after)[: len(before)] == list(before)
        fresh = [token for token in other.vocabulary(place).tolist() if token not in before]
        assert list(after)[len(before) :] == fresh
        assert len(set(after.values())) == len(after)
        assert {after[token] for token in fresh}.isdisjoint({new.sparse[place].unknown_id})
        assert (made["kept"][column], made["appended"][column]) == (len(before), len(fresh))
    assert new.dense == old.dense


ANY = Schema(label="label", dense=("a",), sparse=("b", "c"), features=(Feature(name="c", vocabulary="b"),), tokens="any")
CONFIG = PreparationConfig(schema=ANY, engine="threads", min_count=2)


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a log whose categories are to extend those of a first one, in `old`."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "first.csv").write_text("label,a,b,c\n1,2,x,y\n0,3,x,y\n0,5,z,z\n")
    (tmp_path / "second.csv").write_text("label,a,b,c\n1,9,w,x\n0,3,w,v\n0,5,v,v\n")
    make_vocabulary(str(tmp_path / "first.csv"), out=str(tmp_path / "old"), config=CONFIG)
    return str(tmp_path / "second.csv")


def test_extension_is_shared_with_vocabulary(tmp_path: Path, second: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "old").rename(tmp_path / "run" / "preprocessor")  # a run's folder will do
    made = make_vocabulary(second, out=str(tmp_path / "new"), extend=str(tmp_path / "run"), config=CONFIG)
    assert (made["appended"], made["num_embeddings"]["b"]) == ({"b": 2}, made["num_embeddings"]["c"])
    new = Preprocessor.load(str(tmp_path / "new"))
    assert new.sparse[0] == new.sparse[1]
    assert json.loads((tmp_path / "new" / "preprocessor.json").read_text())["hash"] == made["hash"]


@pytest.mark.parametrize(
    ("old", "changes", "message"),
    [
        ("old", {"schema": ANY.replace(dense=())}, "columns must match"),
        ("old", {"preset": "ray-template"}, "--preset: must be rayrec, .* got ray-template"),
        ("old", {"min_count": 3}, "--min-count: must be 2, .* got 3"),
        ("", {}, "has no Preprocessor"),
    ],
)
def test_extension_rejects_other_rules(tmp_path: Path, second: str, old: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_vocabulary(second, out=str(tmp_path / "new"), extend=str(tmp_path / old), config=CONFIG.replace(**changes))
    assert not (tmp_path / "new").exists()
