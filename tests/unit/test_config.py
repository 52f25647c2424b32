"""Tests of configurations: validation, updates by name, and YAML round trips."""

import dataclasses
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from builders.faults import rejects

import rayrec
from rayrec import recipes
from rayrec.config import TEXT, Config, InputError, error_line, nest
from rayrec.optim.config import LearningRateSchedule
from rayrec.recipes import criteo_demo
from rayrec.schema import PlaceholderSchema, Schema
from rayrec.workloads.recsys.workload import ClickWorkload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Config):
    name: str = "a"
    steps: int = 3
    limit: int | None = None
    kind: Literal["x", "y"] = "x"
    labels: dict[str, str] | None = None
    inner: Inner = Inner()
    other: Inner | None = None


def test_wrong_types_raise_with_field_name() -> None:
    for changes in (
        *({"steps": value} for value in ("3", 3.0, True, None)),
        *({"inner": value} for value in (3, None, {"rate": "fast"}, {"sizes": [1, "2"]})),
        *({"name": 3}, {"limit": "none"}, {"kind": "z"}, {"labels": {"a": 1}}, {"other": 4}),
    ):
        ((field, value),) = changes.items()
        name = (
            f"Inner.{next(iter(value))}"
            if field == "inner" and isinstance(value, dict)
            else f"Outer.{field}"
        )
        assert (
            "Outer.inner" not in rejects(name, Outer().replace, **changes) or name == "Outer.inner"
        )


def test_values_are_converted_updated_by_name_and_round_trip() -> None:
    changed = Outer().replace(inner={"rate": 1, "sizes": [4, 5]}, limit=7)
    assert (changed.inner.rate, changed.inner.sizes, changed.limit) == (1, (4, 5), 7)
    rejects(r"step: Outer has no such field; did you mean 'steps'", Outer().replace, step=1)
    rejects(
        r"inner\.ratee: Inner has no such field; did you mean 'rate'",
        Outer().replace,
        inner={"ratee": 1.0},
    )
    rejects(r"qqq: Outer has no such field; it has name, steps", Outer().replace, qqq=1)
    before = Outer(inner=Inner(rate=0.5))
    after = before.replace(inner={"sizes": (9,)}, name="b")
    assert (after.inner.rate, after.inner.sizes, after.name) == (0.5, (9,), "b")
    assert (before.inner.sizes, before.name) == ((1, 2), "a")
    assert before.replace(inner=Inner(rate=0.7)).inner.rate == 0.7
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.name = "c"  # type: ignore[misc]
    config = Outer(
        name="ä: #1",
        limit=5,
        labels={"zone": "a"},
        inner=Inner(rate=1e-7, sizes=()),
        other=Inner(),
    )
    stored = yaml.safe_load(config.to_yaml())
    assert list(stored) == ["class", *(field.name for field in dataclasses.fields(Outer))]
    again = Outer(other=Inner(rate=3.0)).updated(stored)
    assert (again, again.config_hash(), again.to_yaml()) == (
        config,
        config.config_hash(),
        config.to_yaml(),
    )
    base = Outer()
    assert base.config_hash() == Outer().config_hash()
    changes: list[dict[str, Any]] = [
        {"steps": 4},
        {"limit": 1},
        {"inner": {"rate": 0.2}},
        {"other": Inner()},
    ]
    assert (
        len({base.config_hash(), *(base.replace(**change).config_hash() for change in changes)})
        == 5
    )
    code = (
        "from rayrec.schema import Schema\nprint(Schema(label='y', dense=('a',), "
        "sparse=('b',)).config_hash(), end='')"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output == Schema(label="y", dense=("a",), sparse=("b",)).config_hash()


def test_schema_is_validated() -> None:
    rejects(
        "column names must be unique",
        Schema,
        tokens="hexadecimal",
        label="a",
        dense=("a",),
        sparse=(),
    )
    rejects(
        "65 feature columns",
        Schema,
        tokens="hexadecimal",
        label=None,
        dense=tuple(f"d{i}" for i in range(65)),
        sparse=(),
    )
    rejects("no feature columns", Schema, tokens="hexadecimal", label="y", dense=(), sparse=())
    schema = Schema(tokens="hexadecimal", label="y", dense=("a",), sparse=("b",))
    assert schema.columns == ("y", "a", "b")
    assert schema.unlabelled().columns == ("a", "b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSchedule(LearningRateSchedule):
    """Custom schedule."""

    cycle: int = 10


def test_custom_class_is_stored_and_required() -> None:
    plain = criteo_demo("log")
    own = plain.replace(workload={"schedule": OwnSchedule()})
    assert "class" not in yaml.safe_load(plain.to_yaml())["workload"]["schedule"]
    stored = yaml.safe_load(own.to_yaml())
    assert stored["workload"]["schedule"]["class"] == f"{OwnSchedule.__module__}.OwnSchedule"
    assert own.config_hash() != plain.config_hash()
    assert own.updated(stored) == own
    rejects(
        r"^workload\.schedule\.class: .*OwnSchedule, and the recipe has LearningRateSchedule",
        plain.updated,
        stored,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved(Config):
    RENAMED: ClassVar[Mapping[str, str]] = {"before": "now"}

    now: int = 1


def test_old_names_warn_and_tuple_items_are_validated() -> None:
    with pytest.warns(
        FutureWarning,
        match=r"Moved\.before is now now; the old name will be removed in the next release",
    ):
        assert Moved().replace(before=2) == Moved(now=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what a file of an earlier version says needs no notice
        assert Moved().updated({"before": 3}) == Moved(now=3)
    rejects(
        "before: is the old name of now, which is set too", Moved().updated, {"before": 2, "now": 3}
    )
    with pytest.warns(
        FutureWarning, match=r"rayrec\.ReplicatedWorkload is now rayrec\.DataParallelWorkload"
    ):
        assert rayrec.ReplicatedWorkload is rayrec.DataParallelWorkload
    assert Several().updated({"items": [{"now": 2}]}) == Several(items=(Moved(now=2),))
    rejects(
        r"items\[0\]\.later: Moved has no such field", Several().updated, {"items": [{"later": 2}]}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several(Config):
    items: tuple[Moved, ...] = ()


@pytest.mark.parametrize("value", [5, "ab", {"now": 2}], ids=["number", "text", "mapping"])
def test_tuple_of_items_rejects_other_values(value: object) -> None:
    rejects(
        rf"items: has the wrong type .*, got {re.escape(repr(value))}$",
        Several().updated,
        {"items": value},
    )


# -- Finding recipes by name or file, and loading of configurations
OWN = """
from rayrec import recipes

NUMBER = 3

def small():
    return recipes.criteo_demo().replace(recipe="small", batch_size=7)

def wrong():
    return {"recipe": "wrong"}
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own_recipes_of_a_test.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop(path.stem, None)


def test_recipe_is_attribute_with_name_and_yaml_round_trip() -> None:
    for name, recipe in recipes.ALL.items():
        config = recipe()
        assert config.recipe == name
        assert recipes.load_config(config.to_yaml()) == config
        assert (recipe.__doc__ or "").strip()
        assert getattr(recipes, name) is recipe
    with pytest.raises(AttributeError, match="has no recipe 'click'"):
        recipes.click  # noqa: B018


def test_dumped_placeholder_declares_no_columns() -> None:
    dumped = recipes.load_config(recipes.clicks().replace(steps=3).to_yaml())
    assert isinstance(dumped.workload, ClickWorkload)
    assert isinstance(dumped.workload.schema, PlaceholderSchema)
    declared = recipes.load_config(
        recipes.clicks()
        .replace(workload={"schema": {"label": "label", "sparse": ["user", "item"]}})
        .to_yaml()
    )
    assert isinstance(declared.workload, ClickWorkload)
    assert type(declared.workload.schema) is Schema, "a log may have the example's columns"


def test_ray_dlrm_matches_template_settings() -> None:
    """The RecsysConfig of Ray's template, and the counts of its mapping tables."""
    config = recipes.ray_dlrm()
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    model: Any = workload.model
    assert (workload.preset.name, workload.preset.min_count, workload.preset.split.kind) == (
        "ray-template",
        3,
        "last_file",
    )
    assert (model.interaction, model.embedding_dim, model.bottom_mlp) == (
        "cross",
        128,
        (512, 256, 128),
    )
    assert model.top_mlp == (1024, 1024, 512, 256, 1)
    # The "original" one
    assert (
        config.replace(workload={"model": {"interaction": "dot"}}).workload.model.interaction
        == "dot"
    )
    for optimizer in (workload.sparse_optimizer, workload.dense_optimizer):
        assert (optimizer.kind, optimizer.learning_rate) == ("adagrad", 0.005)
    assert (config.batch_size, config.eval_batch_size) == (4096, 8192)
    assert (config.evaluate_every, config.log_every, config.scaling.num_workers) == (1000, 100, 8)
    assert (config.failure.max_failures, config.checkpoint.num_to_keep) == (2, 1)


@pytest.mark.parametrize("name", ["criteo_finalnet_x4", "criteo_finalmlp", "criteo_dcnv3"])
def test_published_recipes_match_settings(name: str) -> None:
    """Adam 1e-3, a penalty on full tables, joint clipping, lower rates after one bad epoch, stop
    after two.
    """
    config = recipes.ALL[name]()
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    assert (workload.sparse_optimizer.kind, workload.sparse_optimizer.weight_decay) == (
        "adam",
        1e-5,
    )
    assert workload.sparse_optimizer.learning_rate == workload.dense_optimizer.learning_rate == 1e-3
    assert (workload.max_gradient_norm, workload.table_start.std) == (10.0, 1e-4)
    assert (config.plateau.patience, config.early_stopping.patience) == (1, 2)
    assert (config.evaluate_every, config.evaluations_per_epoch) == (None, 1)
    assert workload.model.embedding_dim == 16
    assert getattr(workload.model, "tower_losses", False) is False
    assert recipes.PUBLISHED[name] == "criteo_kaggle"


def test_recipe_file_is_loaded_and_checked(own: Path) -> None:
    recipe = recipes.find(f"{own}:small")
    assert recipe().batch_size == 7
    assert recipes.find(f"{own}:small") is recipe  # the file is run once
    text = recipe().replace(seed=5).to_yaml()
    assert recipes.load_config(text, recipe=recipe).seed == 5
    rejects(r"no recipe 'small'.*FILE.py:FUNCTION", recipes.load_config, text)
    with pytest.raises(InputError, match="belongs to recipe 'criteo_demo', got recipe 'small'"):
        recipes.load_config(recipes.criteo_demo().to_yaml(), recipe=recipe)
    wrong = r"wrong\(\) must return a rayrec.TrainConfig"
    for name, message in {
        "NUMBER": "function 'NUMBER' not found",
        "none": "function 'none' not found",
        "wrong": wrong,
    }.items():
        rejects(message, recipes.find, f"{own}:{name}")


def test_recipe_file_error_has_line(own: Path) -> None:
    own.write_text("raise RuntimeError('in the file')")
    rejects(
        rf"{own.name}, line 1: RuntimeError: in the file\. Fix the file",
        recipes.find,
        f"{own}:small",
    )
    assert own.stem not in sys.modules


@pytest.mark.parametrize("name", ["json", "zipapp"])
def test_recipe_file_shadows_no_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "zipapp", raising=False)
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        (folder / f"{name}.py").write_text(OWN)
    for _ in range(2):
        assert recipes.find(f"{tmp_path}/one/{name}.py:small")().batch_size == 7
    assert not hasattr(importlib.import_module(name), "small")
    with pytest.raises(
        InputError, match=r"another file with this name was already imported. Rename the file"
    ):
        recipes.find(f"{tmp_path}/other/{name}.py:small")
    del sys.modules[f"recipe_file_{name}"]


@pytest.mark.parametrize(
    ("settings", "nested"),
    [
        pytest.param(
            {"a.b": 1, "a.c.d": 2, "e": 3}, {"a": {"b": 1, "c": {"d": 2}}, "e": 3}, id="dotted"
        ),
        pytest.param({"a.b": 1, "a": {"c": 2}}, {"a": {"b": 1, "c": 2}}, id="mapping last"),
        pytest.param({"a": {"c": 2}, "a.b": 1}, {"a": {"b": 1, "c": 2}}, id="mapping first"),
        pytest.param(
            {"a.b.c": 1, "a": {"b": {"d": 2}}},
            {"a": {"b": {"c": 1, "d": 2}}},
            id="mapping in mapping",
        ),
        pytest.param({"a.b": 1, "a": {"b": 2}}, {"a": {"b": 2}}, id="later value"),
        pytest.param({"a.b": 1, "a": "x"}, {"a": {"b": 1, TEXT: "x"}}, id="text last"),
        pytest.param({"a": "x", "a.b": 1}, {"a": {"b": 1, TEXT: "x"}}, id="text first"),
    ],
)
def test_dotted_settings_are_nested(settings: dict[str, Any], nested: dict[str, Any]) -> None:
    assert nest(settings) == nested


def test_nested_settings_are_copied() -> None:
    choice = {"c": {"d": 2}}
    assert nest({"a": choice, "a.b": 1, "a.c.e": 3}) == {"a": {"b": 1, "c": {"d": 2, "e": 3}}}
    assert choice == {"c": {"d": 2}}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(InputError("log: is\n  empty"), "log: is empty", id="input"),
        pytest.param(
            RuntimeError("Traceback\n  the cause \n\n"), "RuntimeError: the cause", id="last line"
        ),
        pytest.param(KeyError(), "KeyError", id="no text"),
    ],
)
def test_errors_are_shown_in_one_line(error: Exception, line: str) -> None:
    assert error_line(error) == line
