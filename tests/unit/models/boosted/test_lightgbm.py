"""Trees as tensors: the sums of LightGBM's own predictions, and damaged trees."""

from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from builders.faults import rejects

from rayrec.layers.kernels.trees import BoostedTrees, Tree
from rayrec.models.boosted.lightgbm import LightGBMConfig, tree_columns
from rayrec.workloads.recsys.boosting import parse_tree

SIZES: dict[str, Any] = {"trees": 12, "leaves": 9, "max_depth": 5, "columns": 4}


def grown(rows: int = 3000) -> tuple[lightgbm.Booster, BoostedTrees, np.ndarray]:
    """LightGBM's model, ours with its trees, and their float32 rows."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=(rows, 4)).astype(np.float32).round(2)
    label = (values[:, 0] * values[:, 1] + draw.normal(size=rows) > 0).astype(float)
    settings = {"objective": "cross_entropy", "num_leaves": 9, "max_depth": 5, "verbosity": -1}
    booster = lightgbm.train(
        {**settings, "use_missing": False}, lightgbm.Dataset(values, label), num_boost_round=10
    )
    trees = BoostedTrees(**SIZES)
    for number in range(10):
        text = booster.model_to_string(num_iteration=1, start_iteration=number)
        trees.append(parse_tree(text))
    return booster, trees, values


def test_sums_are_lightgbms_bit_for_bit() -> None:
    booster, trees, values = grown()
    expected = booster.predict(values, raw_score=True)
    assert trees.count == 10
    np.testing.assert_array_equal(trees(torch.from_numpy(values)).numpy(), expected)


def test_threshold_decides_float32_as_float64() -> None:
    booster, trees, _ = grown()
    dump = booster.trees_to_dataframe()
    thresholds = dump["threshold"].dropna().to_numpy()
    beside = [np.nextafter(np.float32(t), np.float32(s)) for t in thresholds for s in (-9, 9)]
    rows = np.repeat(np.array([*beside, *thresholds.astype(np.float32)])[:, None], 4, axis=1)
    expected = booster.predict(rows, raw_score=True)
    np.testing.assert_array_equal(trees(torch.from_numpy(rows)).numpy(), expected)


def test_exported_program_and_kernel_agree() -> None:
    _, trees, values = grown()
    loaded = BoostedTrees(**SIZES)
    loaded.load_state_dict(trees.state_dict())
    rows = torch.from_numpy(values)
    shapes = ({0: torch.export.Dim("rows", min=1)},)
    program = torch.export.export(loaded, (rows[:7],), dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(rows), trees(rows), rtol=1e-14, atol=1e-14)


def test_tree_without_split_is_constant() -> None:
    trees = BoostedTrees(**SIZES)
    none = np.empty(0, np.int64)
    trees.append(Tree(none, np.empty(0), none, none, np.array([0.25])))
    assert trees(torch.zeros(3, 4)).tolist() == [0.25] * 3
    trees.check()


def endless(trees: BoostedTrees) -> None:
    trees.left[3, 0] = 0


def beyond_the_columns(trees: BoostedTrees) -> None:
    trees.column[9, 0] = 4


def beyond_the_nodes(trees: BoostedTrees) -> None:
    trees.right[3, 0] = 17


def not_finite(trees: BoostedTrees) -> None:
    trees.value[2, 1] = float("nan")


def too_many(trees: BoostedTrees) -> None:
    trees.grown[0] = 13


def root_beyond_the_nodes(trees: BoostedTrees) -> None:
    trees.root[1] = 99


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (endless, "nodes of tree 3"),
        (beyond_the_columns, "nodes of tree 9"),
        (beyond_the_nodes, "nodes of tree 3"),
        (not_finite, "nodes of tree 2"),
        (root_beyond_the_nodes, "nodes of tree 1"),
        (too_many, "13 of 12 trees"),
    ],
)
def test_damaged_trees_are_rejected(damage: Callable[[BoostedTrees], None], message: str) -> None:
    _, trees, _ = grown()
    damage(trees)
    loaded = BoostedTrees(**SIZES)
    rejects(rf"trees are damaged \({message}\)", loaded.load_state_dict, trees.state_dict())


def test_too_deep_trees_are_rejected() -> None:
    _, trees, _ = grown()
    shallow = BoostedTrees(**{**SIZES, "max_depth": 2})
    rejects("trees are damaged", shallow.load_state_dict, trees.state_dict())


def test_list_columns_are_means_and_length() -> None:
    summed = torch.tensor([[[3.0, 6.0, 3.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    columns = tree_columns(torch.tensor([[7.0], [8.0]]), summed)
    assert columns.tolist() == [[7.0, 1.0, 2.0, 3.0], [8.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("field", "value"), [("members", 2), ("embedding_penalty", 0.1)])
def test_gradient_settings_are_rejected(field: str, value: float) -> None:
    rejects(rf"LightGBMConfig.{field}: must be .*no gradients", LightGBMConfig, **{field: value})


def test_categorical_tree_is_rejected() -> None:
    text = "tree\n\nTree=0\nnum_leaves=2\nsplit_feature=0\nthreshold=0\ndecision_type=1\n"
    with pytest.raises(ValueError, match="must only compare numbers"):
        parse_tree(text + "left_child=-1\nright_child=-2\nleaf_value=1 2\n")
