"""Common part of models that predict each item of a list from all its other items, in any order."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from rayrec.models.item_lists import ItemListNetwork


class _Items(NamedTuple):
    """Items of all lists, weighted by the softmax of their logits in a list."""

    values: torch.Tensor
    """Embedding times weight, [ids, dim]."""
    weights: torch.Tensor
    """Weight: 1 for the largest of a list, 0 for reserved and left out items, [ids, 1]."""
    rows: torch.Tensor
    """Row of each item, int64 [ids]."""
    num_rows: int

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of items' values in each row, [rows, width]."""
        zeros = values.new_zeros(self.num_rows, values.shape[1])
        return zeros.index_add(0, self.rows, values)

    def means(self) -> torch.Tensor:
        """Return each row's weighted mean, 0 without items, [rows, dim]."""
        tiny = torch.finfo(self.weights.dtype).tiny
        return self.sums(self.values) / self.sums(self.weights).clamp(min=tiny)

    # The largest item may have nearly all of the weight, so that a sum minus it would be inexact.
    # Sums are computed without it, and it is added for the others.
    def other_means(self) -> torch.Tensor:
        """Return the weighted mean of the other items of each item's row, 0 without any, [ids,
        dim].
        """
        index = torch.arange(len(self.rows), device=self.rows.device)
        largest = index.new_full((self.num_rows,), len(index))
        is_largest = (self.weights == 1).squeeze(1)
        largest = largest.scatter_reduce(0, self.rows[is_largest], index[is_largest], "amin")
        first = largest[self.rows].clamp(max=len(index) - 1)
        is_other = (index != first).unsqueeze(1)
        values, weights = (
            self.sums(part * is_other)[self.rows] + (part[first] - part) * is_other
            for part in (self.values, self.weights)
        )
        return values / weights.clamp(min=torch.finfo(weights.dtype).tiny)


# Histories of a row with the items a, b and c, whose weights are w:
#
#   training      target a has the history (w_b b + w_c c) / (w_b + w_c), b and c have likewise
#   evaluation    the row has the history of all its items, and `target` has the targets
class ItemSetNetwork(ItemListNetwork):
    """Network of users' vectors, which follow from the weighted mean of their history."""

    @abstractmethod
    def users(
        self,
        histories: torch.Tensor,
        rows: torch.Tensor,
        outputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return users' vectors from their histories, float32 [histories, dim] both, and rows,
        int64 [histories].
        """

    def item_logits(self, rows: torch.Tensor, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each item's weight in its history, [ids, 1], given its row, int64
        [ids]. Default: equal ones.
        """
        return outputs["values"].new_zeros(rows.shape[0], 1)

    def states(
        self,
        outputs: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the user's vector without each known item, of lists with two or more."""
        items, is_read = self._items(outputs, left_out=0)
        counts = items.sums(is_read.long())
        is_target = is_read & (counts[items.rows] > 1)
        positions = is_target.squeeze(1).nonzero().squeeze(1)
        rows = items.rows[positions]
        histories = items.other_means()[positions].float()
        return self.users(histories, rows, outputs), positions, rows

    def last_states(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        left_out: torch.Tensor | int,
    ) -> torch.Tensor:
        """Return the user's vector of each row. A row without known items has a history of
        zeros.
        """
        items, _ = self._items(outputs, left_out=left_out)
        rows = torch.arange(items.num_rows, device=items.rows.device)
        return self.users(items.means().float(), rows, outputs)

    def _items(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        left_out: torch.Tensor | int,
    ) -> tuple[_Items, torch.Tensor]:
        """Return the items of all lists, and whether each is read, bool [ids, 1]. Reserved items
        are not, nor are the last `left_out` of each list, int64 [rows].
        """
        ids = outputs[f"ids_{self._feature}"]
        lengths = outputs[f"lengths_{self._feature}"]
        num_rows = lengths.shape[0]
        numbers = torch.arange(num_rows, device=ids.device)
        rows = torch.repeat_interleave(numbers, lengths, output_size=ids.shape[0])
        index = torch.arange(ids.shape[0], device=ids.device)
        is_inside = index < (lengths.cumsum(0) - left_out)[rows]
        is_read = (self._candidates.contains(ids) & is_inside).unsqueeze(1)
        logits = self.item_logits(rows, outputs).masked_fill(~is_read, -torch.inf)
        lowest = torch.finfo(logits.dtype).min
        largest = logits.new_full((num_rows,), lowest)
        largest = largest.scatter_reduce(0, rows, logits.detach().squeeze(1), "amax")
        weights = (logits - largest[rows].unsqueeze(1)).exp()
        return _Items(weights * outputs["values"], weights, rows, num_rows), is_read
