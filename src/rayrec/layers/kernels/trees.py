"""Sums of decision trees, grown one at a time, with tensors as their only state.

A tree with two splits, in a model whose trees have up to three (four leaves):

    split 0: column 5 <= 1.5        node    0        1        3    4    5
      yes: split 1: column 2 <= 0   left    1        3
             yes: leaf 0            right   5        4
             no:  leaf 1            value                    0.2  0.1  -0.3
      no:  leaf 2

Leaf i is node 3 + i. A row starts at the root and follows its children to a leaf, whose value it
adds to its sum.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from rayrec.config import InputError
from rayrec.layers.kernels.kernel_threads import run_kernel
from rayrec.native import c_fields, library

_ROWS_AT_ONCE: Final = 64
"""Number of rows that a thread takes at a time, as in native/trees.c."""


@dataclass(frozen=True)
class Tree:
    """One decision tree. Nodes 0 to splits - 1 are splits, a negative node -1 - i is leaf i."""

    column: np.ndarray
    """Column that each split compares, int [splits]."""
    threshold: np.ndarray
    """Values of at most this go left, float64 [splits]."""
    left: np.ndarray
    """Child of each split, int [splits]."""
    right: np.ndarray
    """Child of each split, int [splits]."""
    value: np.ndarray
    """Value of each leaf, float64 [splits + 1]."""


# Nodes of all trees have one numbering: splits, then leaves, from `splits` on. A child's number is
# larger than its split's, so that every descent ends. Thresholds are rounded down to float32, which
# decides every float32 value as the float64 threshold does.
@final
class BoostedTrees(nn.Module):
    """Sum of up to `trees` trees over rows of `columns` values. Its tensors have a fixed size, so
    that checkpoints of any number of trees fit.
    """

    def __init__(self, *, trees: int, leaves: int, max_depth: int, columns: int) -> None:
        """Create without trees. Each may have `leaves` leaves below at most `max_depth` splits."""
        super().__init__()
        self._columns = columns
        self._splits = leaves - 1
        self._max_depth = max_depth
        self._used = trees
        shape = (trees, self._splits)
        self.grown = _constant(torch.zeros(1, dtype=torch.int64))
        self.root = _constant(torch.zeros(trees, dtype=torch.int32))
        self.column = _constant(torch.zeros(shape, dtype=torch.int32))
        self.threshold = _constant(torch.zeros(shape))
        self.left = _constant(torch.zeros(shape, dtype=torch.int32))
        self.right = _constant(torch.zeros(shape, dtype=torch.int32))
        self.value = _constant(torch.zeros(trees, leaves, dtype=torch.float64))
        self.register_load_state_dict_post_hook(_check_loaded)

    @property
    def count(self) -> int:
        """Number of trees so far."""
        return int(self.grown)

    @torch.no_grad()
    def append(self, tree: Tree) -> None:
        """Add a tree. Raises IndexError if there is no room for it."""
        number = self.count
        splits = len(tree.column)
        self.root[number] = 0 if splits else self._splits
        rows = (
            (self.column, tree.column),
            (self.threshold, _rounded_down(tree.threshold)),
            (self.left, self._nodes(tree.left)),
            (self.right, self._nodes(tree.right)),
        )
        for tensor, values in rows:
            tensor[number, :splits] = torch.from_numpy(values).to(tensor.dtype)
        self.value[number, : splits + 1] = torch.from_numpy(tree.value)
        self.grown.add_(1)

    def _nodes(self, children: np.ndarray) -> np.ndarray:
        return np.where(children < 0, self._splits - 1 - children, children)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the trees for each row, float64 [rows], of float32 values [rows,
        columns].
        """
        # torch.export needs plain operators, and a number of trees that is no tensor
        if torch.compiler.is_compiling():
            return self._sum_with_torch_ops(values, self._used)
        if values.is_cpu:
            return self._sum_by_kernel(values.contiguous(), self.count)
        return self._sum_with_torch_ops(values, self.count)

    def _sum_by_kernel(self, values: torch.Tensor, count: int) -> torch.Tensor:
        sums = torch.empty(len(values), dtype=torch.float64)
        tensors = (
            values,
            self.root,
            self.column,
            self.threshold,
            self.left,
            self.right,
            self.value,
        )
        # `tensors` and `sums` outlive the kernel, which reads and writes their memory
        pointers = [tensor.data_ptr() for tensor in tensors]
        sizes = (self._columns, count, self._splits)
        arguments = _CTrees(*pointers, *sizes, sums.data_ptr())
        run_kernel(library().rayrec_sum_trees, arguments, len(values), at_once=_ROWS_AT_ONCE)
        return sums

    def _sum_with_torch_ops(self, values: torch.Tensor, count: int) -> torch.Tensor:
        trees = torch.arange(count, device=values.device)
        first_split = trees * self._splits
        # Rows take shape from the values, whose number an exported program does not know
        node = self.root[:count].long() + torch.zeros_like(values[:, :1], dtype=torch.int64)
        column, threshold, left, right = (
            tensor.flatten() for tensor in (self.column, self.threshold, self.left, self.right)
        )
        # One level at a time. Rows at a leaf take part, and stay there.
        for _ in range(self._max_depth):
            is_split = node < self._splits
            split = first_split + node.clamp(max=self._splits - 1)
            compared = values.gather(1, column[split].long())
            goes_left = compared <= threshold[split]
            child = torch.where(goes_left, left[split], right[split])
            node = torch.where(is_split, child.long(), node)
        leaf = trees * (self._splits + 1) + node - self._splits
        return self.value.flatten()[leaf].sum(1)

    def check(self) -> None:
        """Check that all trees are trees. Raises InputError for damaged ones, on which the kernel
        would read other memory or never end.
        """
        count = self.count
        if not 0 <= count <= len(self.root):
            raise _damaged(f"{count} of {len(self.root)} trees")
        splits = self._splits
        last_node = 2 * splits
        root = self.root[:count].numpy()
        column = self.column[:count].numpy()
        left = self.left[:count].numpy()
        right = self.right[:count].numpy()
        value = self.value[:count].numpy()
        is_wrong = (root < 0) | (root > last_node)
        depth = np.zeros((count, last_node + 1), np.int64)
        depth[np.arange(count), root.clip(0, last_node)] = 1
        # Each split is reached before its children, whose numbers are larger.
        for split in range(splits):
            is_reached = depth[:, split] > 0
            is_column = (column[:, split] >= 0) & (column[:, split] < self._columns)
            is_wrong |= is_reached & ~is_column
            for children in (left, right):
                child = children[:, split]
                is_child = (child > split) & (child <= last_node)
                is_wrong |= is_reached & ~is_child
                rows = np.flatnonzero(is_reached & is_child)
                depth[rows, child[rows]] = depth[rows, split] + 1
        is_wrong |= (depth > self._max_depth + 1).any(1)
        is_wrong |= ~np.isfinite(value).all(1)
        if is_wrong.any():
            raise _damaged(f"nodes of tree {int(np.flatnonzero(is_wrong)[0])}")


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    """Return a weight without gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def _rounded_down(thresholds: np.ndarray) -> np.ndarray:
    nearest = thresholds.astype(np.float32)
    below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest > thresholds, below, nearest)


def _damaged(part: str) -> InputError:
    return InputError(f"the model's trees are damaged ({part}). Copy the checkpoint again.")


def _check_loaded(trees: BoostedTrees, keys: Any) -> None:
    if keys.missing_keys or trees.grown.is_meta:
        return
    trees.check()
    trees._used = trees.count


class _CTrees(ctypes.Structure):
    """Mirror of rayrec_trees in native/kernels.h."""

    _fields_ = c_fields(
        "void* values roots column threshold left right value; int64 columns count splits; "
        "void* sums"
    )
