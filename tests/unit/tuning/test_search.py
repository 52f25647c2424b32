"""The order of trials."""

from __future__ import annotations

import itertools

from rayrec.tuning.search import order_of_trials


def test_the_recipe_is_first_and_the_others_come_in_a_random_order_of_the_seed() -> None:
    order = order_of_trials(50, seed=0)
    assert order[0] == 0
    assert sorted(order) == list(range(50))
    assert order == order_of_trials(50, seed=0) != order_of_trials(50, seed=1)
    assert sum(later > earlier for earlier, later in itertools.pairwise(order)) < 40  # 49 if they were in order
