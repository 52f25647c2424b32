"""Tests of finding recipes by name or file, and of loading configurations."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.faults import fails_with, rejects

from rayrec import recipes
from rayrec.config import InputError
from rayrec.workloads.recsys.workload import ClickWorkload

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
    """Includes recipes with the name of their file, such as `clicks`."""
    for name, recipe in recipes.ALL.items():
        config = recipe()
        assert config.recipe == name
        assert recipes.load_config(config.to_yaml()) == config
        assert (recipe.__doc__ or "").strip()
        assert getattr(recipes, name) is recipe
    with pytest.raises(AttributeError, match="has no recipe 'click'"):
        recipes.click  # noqa: B018


@pytest.mark.parametrize("name", ["criteo_finalnet_x4", "criteo_finalmlp", "criteo_dcnv3"])
def test_published_recipes_match_settings(name: str) -> None:
    """Adam 1e-3, a penalty on full tables, joint clipping, lower rates after one bad epoch, stop after two."""
    config = recipes.ALL[name]()
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    assert (workload.sparse_optimizer.kind, workload.sparse_optimizer.weight_decay) == ("adam", 1e-5)
    assert workload.sparse_optimizer.learning_rate == workload.dense_optimizer.learning_rate == 1e-3
    assert (workload.max_gradient_norm, workload.table_start.std) == (10.0, 1e-4)
    assert (config.plateau.patience, config.early_stopping.patience) == (1, 2)
    assert (config.evaluate_every, config.evaluations_per_epoch) == (None, 1)
    assert workload.model.embedding_dim == 16
    assert getattr(workload.model, "tower_losses", False) is False
    assert recipes.PUBLISHED[name] == "criteo_kaggle"


def test_custom_recipe_loads_from_file(own: Path) -> None:
    recipe = recipes.find(f"{own}:small")
    assert recipe().batch_size == 7
    assert recipes.find(f"{own}:small") is recipe  # the file is run once
    text = recipe().replace(seed=5).to_yaml()
    assert recipes.load_config(text, recipe=recipe).seed == 5
    rejects(r"no recipe 'small'.*FILE.py:FUNCTION", recipes.load_config, text)
    with pytest.raises(InputError, match="belongs to recipe 'criteo_demo', got recipe 'small'"):
        recipes.load_config(recipes.criteo_demo().to_yaml(), recipe=recipe)


def test_find_rejects_invalid_recipes(own: Path) -> None:
    wrong = r"wrong\(\) must return a rayrec.TrainConfig"
    for name, message in {"NUMBER": "function 'NUMBER' not found", "none": "function 'none' not found", "wrong": wrong}.items():
        rejects(message, recipes.find, f"{own}:{name}")


@pytest.mark.parametrize("name", ["json", "zipapp"])
def test_recipe_file_shadows_no_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers modules imported before and after."""
    monkeypatch.delitem(sys.modules, "zipapp", raising=False)
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        (folder / f"{name}.py").write_text(OWN)
    for _ in range(2):
        assert recipes.find(f"{tmp_path}/one/{name}.py:small")().batch_size == 7
    assert not hasattr(importlib.import_module(name), "small")
    with pytest.raises(InputError, match=r"another file with this name was already imported. Rename the file"):
        recipes.find(f"{tmp_path}/other/{name}.py:small")
    del sys.modules[f"recipe_file_{name}"]


def test_recipe_file_error_propagates(own: Path) -> None:
    own.write_text("raise RuntimeError('in the file')")
    fails_with(RuntimeError, "in the file", recipes.find, f"{own}:small")
    assert own.stem not in sys.modules
