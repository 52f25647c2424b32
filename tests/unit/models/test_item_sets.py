"""Models of item sets against loops in plain PyTorch: histories without the predicted item,
reserved items, users, losses and evaluations.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders.faults import rejects
from torch.nn import functional

from rayrec.batch import DENSE, Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.metrics import item_ranks
from rayrec.models.base import CandidateRows, ModelInputs, table_key
from rayrec.models.item_sets import ItemSetNetwork
from rayrec.models.retrieval.simplex import SimpleXConfig
from rayrec.models.retrieval.youtube_dnn import YoutubeDNNConfig

DIM = 6
ROWS = 12
USERS = 5
CANDIDATES = CandidateRows(2, 11, missing=1)
NAMES = ("item", "target", "seen", "user")
INPUTS = ModelInputs(
    0,
    NAMES,
    vocabularies=("item", "item", "item", "user"),
    lists=tuple((name, 9) for name in NAMES[:3]),
    candidates=(*((name, CANDIDATES) for name in NAMES[:3]), ("user", CandidateRows(1, USERS))),
)
WITHOUT_USERS = ModelInputs(
    0,
    ("item",),
    lists=(("item", 9),),
    candidates=(("item", CANDIDATES),),
)
GENERATOR = torch.Generator().manual_seed(2)
TABLE = torch.randn(ROWS, DIM, generator=GENERATOR)
USER_TABLE = torch.randn(USERS, DIM, generator=GENERATOR)
LISTS = [[2, 5, 3, 8], [7], [], [6, 0, 6, 1, 10], [1, 9]]
OF_USERS = [3, 1, 2, 0, 4]
"""User of each list, the fourth of which is unknown."""
TARGETS = [(0, 0), (0, 1), (0, 2), (0, 3), (3, 0), (3, 2), (3, 4)]
"""Row and place of each known item of lists with two or more."""
SAMPLE = [3, 4, 5, 5, 10, 6]
BATCH = Batch({DENSE: torch.zeros(0, 0)}, 1.0)

YOUTUBE = YoutubeDNNConfig(embedding_dim=DIM, negatives=len(SAMPLE), k=3)
SIMPLEX = SimpleXConfig(
    embedding_dim=DIM,
    negatives=len(SAMPLE),
    user_weight=0.75,
    dropout=0.0,
    k=3,
)
MODELS = {
    "youtube_dnn": YOUTUBE,
    "youtube_dnn with tower": YOUTUBE.replace(user_tower=(8, 7)),
    "simplex": SIMPLEX,
    "simplex with attention": SIMPLEX.replace(pooling="attention"),
}


def network_of(config: Any, inputs: ModelInputs = INPUTS) -> Any:
    torch.manual_seed(4)
    network: Any = config.build(inputs)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=GENERATOR) / 4)
    return network.requires_grad_(False)


def outputs_of(
    network: Any,
    lists: Sequence[Sequence[int]],
    *,
    targets: Sequence[Sequence[int]] | None = None,
    users: Sequence[int] = OF_USERS,
) -> dict[str, torch.Tensor]:
    empty: list[list[int]] = [[] for _ in lists]
    values = {"item": lists, "target": targets or empty, "seen": empty}
    of_rows = {**values, "user": [[user] for user in users]}
    ids = {
        name: torch.tensor([each for row in rows for each in row], dtype=torch.int64)
        for name, rows in of_rows.items()
    }
    jagged = {
        name: JaggedEmbeddings(
            (USER_TABLE if name == "user" else TABLE)[ids[name]],
            torch.tensor([len(row) for row in rows]),
        )
        for name, rows in of_rows.items()
    }
    ids[table_key("item")] = torch.tensor(SAMPLE)
    table = TABLE[SAMPLE] if network.training else TABLE
    rows = torch.zeros(len(lists), 0)
    embedded = KeyedEmbeddings.in_order(NAMES, DIM, rows, jagged, ids=ids, tables={"item": table})
    return network(rows, embedded)


# -- Formulas of one row in double precision
def is_known(item: int) -> bool:
    return 2 <= item < 11


def expected_user(network: Any, config: Any, items: Sequence[int], user: int) -> torch.Tensor:
    """Return the vector of a user with a history."""
    weights = {name: values.double() for name, values in network.state_dict().items()}
    history = TABLE[[item for item in items if is_known(item)]].double()
    own = USER_TABLE[user].double() * (user > 0)
    if getattr(config, "pooling", "mean") == "attention":
        keys = torch.tanh(history @ weights["key.weight"].T + weights["key.bias"])
        mean = (keys @ own).softmax(0) @ history
    else:
        mean = history.sum(0) / max(1, len(history))
    if isinstance(config, SimpleXConfig):
        projected = weights["projection.weight"] @ mean
        return config.user_weight * own + (1 - config.user_weight) * projected
    for number in range(len(config.user_tower)):
        layer = f"tower.layers.{number}"
        mean = (weights[f"{layer}.weight"] @ mean + weights[f"{layer}.bias"]).relu()
    if config.user_tower:
        mean = weights["last.weight"] @ mean + weights["last.bias"]
    return mean


def others(row: int, place: int) -> list[int]:
    """Return the items of a list without the one at a place."""
    return LISTS[row][:place] + LISTS[row][place + 1 :]


def expected_states(network: Any, config: Any) -> torch.Tensor:
    """Return the user's vector for each of TARGETS."""
    return torch.stack(
        [
            expected_user(network, config, others(row, place), OF_USERS[row])
            for row, place in TARGETS
        ]
    )


@pytest.mark.parametrize("name", MODELS)
def test_states_have_histories_without_target(name: str) -> None:
    config = MODELS[name]
    network = network_of(config).train()
    states, positions, rows = network.states(outputs_of(network, LISTS))
    starts = [0, 4, 5, 5, 10]
    assert positions.tolist() == [starts[row] + place for row, place in TARGETS]
    assert rows.tolist() == [row for row, _ in TARGETS]
    expected = expected_states(network, config).float()
    torch.testing.assert_close(states, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_queries_match_formula(name: str) -> None:
    config = MODELS[name]
    network = network_of(config).eval()
    queries = network.queries(outputs_of(network, LISTS))
    for row, items in enumerate(LISTS):
        if not any(map(is_known, items)) and config.user_weight if "simplex" in name else not items:
            continue
        expected = expected_user(network, config, items, OF_USERS[row])
        if "simplex" in name:
            expected = functional.normalize(expected, dim=0)
        torch.testing.assert_close(queries[row], expected.float(), rtol=1e-6, atol=1e-6)


def test_losses_match_plain_formulas() -> None:
    ids = [LISTS[row][place] for row, place in TARGETS]
    for name in ("youtube_dnn", "simplex"):
        config = MODELS[name]
        network = network_of(config).train()
        states = expected_states(network, config)
        table = TABLE.double()
        if name == "simplex":
            states = functional.normalize(states, dim=1)
            table = functional.normalize(table, dim=1)
        losses = []
        for state, item in zip(states, ids, strict=True):
            is_other = torch.tensor([each != item for each in SAMPLE])
            negatives = table[SAMPLE] @ state
            positive = table[item] @ state
            if name == "simplex":
                above = (negatives - 0.4).relu() * is_other
                losses.append(1 - positive + 150 * above.mean())
            else:
                scores = torch.cat([positive.reshape(1), negatives[is_other]])
                losses.append(-scores.log_softmax(0)[0])
        found = network.loss(outputs_of(network, LISTS), BATCH)
        assert found[[1, 2, 4]].tolist() == [0, 0, 0]
        # The mean over rows is the mean over targets
        mean = torch.stack(losses).mean().item()
        assert found.mean().item() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_differences(name: str) -> None:
    """Rows without a target, and reserved items, have a gradient of 0."""
    network = network_of(MODELS[name]).train()
    outputs = outputs_of(network, LISTS)
    values = outputs["values"].requires_grad_()
    loss = network.loss(outputs, BATCH).mean()
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient[[4, 6, 8, 10, 11]].eq(0).all()
    step = 1e-3 * torch.randn(gradient.shape, generator=GENERATOR)
    with torch.no_grad():
        above, below = (
            network.loss({**outputs, "values": values + sign * step}, BATCH).double().mean()
            for sign in (1, -1)
        )
    expected = 2 * (gradient * step).sum().item()
    assert (above - below).item() == pytest.approx(expected, rel=0.02)


def test_last_item_without_targets_is_left_out_of_history() -> None:
    network = network_of(YOUTUBE).eval()
    outputs = outputs_of(network, LISTS, targets=[[], [], [], [9], []])
    queries, evaluated = network._evaluated(outputs)
    for row, items in ((0, [2, 5, 3]), (3, [6, 6, 10])):
        expected = TABLE[items].mean(0)
        torch.testing.assert_close(queries[row], expected, rtol=1e-6, atol=1e-6)
    assert evaluated.targets.rows.tolist() == [3, 0, 4]
    assert evaluated.targets.numbers.tolist() == [7, 6, 7]
    assert queries[[1, 2, 4]].eq(0).all()


@pytest.mark.parametrize("numbers", [1, 20, 1 << 23])
def test_measures_match_after_loss(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_ranks, "_TILE_NUMBERS", numbers)
    network = network_of(SIMPLEX).eval()
    targets = [[4, 9], [], [2], [9, 0], []]
    expected = network.measures(outputs_of(network, LISTS, targets=targets), BATCH)
    outputs = outputs_of(network, LISTS, targets=targets)
    losses = network.loss(outputs, BATCH)
    queries = outputs["evaluated"].double()
    log_odds = (queries @ network.item_vectors(outputs).double().T).log_softmax(1)
    known = [[2, 7], [], [0], [7], [7]]
    for row, numbers_of_row in enumerate(known):
        loss = -log_odds[row, numbers_of_row].mean() if numbers_of_row else losses.new_zeros(())
        torch.testing.assert_close(losses[row].double(), loss.double(), rtol=1e-6, atol=1e-6)
    measures = network.measures(outputs, BATCH)
    assert measures.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(measures[name], values, rtol=0, atol=0, equal_nan=True)
    assert "scores" not in outputs


def test_unknown_user_has_vector_of_history() -> None:
    network = network_of(SIMPLEX).eval()
    items = [[4, 9], [4, 9], [2, 3], []]
    queries = network.queries(outputs_of(network, items, users=[0, 2, 0, 2]))
    own = functional.normalize(USER_TABLE[2], dim=0)
    history = functional.normalize(network.projection(TABLE[[4, 9]].mean(0)), dim=0)
    torch.testing.assert_close(queries[0], history, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(queries[3], own, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(queries[1], history, atol=1e-2)


def test_model_without_user_weight_needs_no_users() -> None:
    config = SIMPLEX.replace(user_weight=0.0)
    assert config.sequences(WITHOUT_USERS) == ("item",)
    assert SIMPLEX.sequences(INPUTS) == NAMES
    network = network_of(config, WITHOUT_USERS)
    assert isinstance(network, ItemSetNetwork)
    rejects(
        r"must have a column of users, got item\. Set user_input: true of its sequence",
        SIMPLEX.build,
        WITHOUT_USERS,
    )
    rejects(
        "user_weight: must be above 0 for pooling attention", config.replace, pooling="attention"
    )


def test_attention_is_exact_with_one_dominating_item() -> None:
    config = MODELS["simplex with attention"]
    network = network_of(config).train()
    outputs = outputs_of(network, LISTS)
    outputs["users"][0] = 20 * TABLE[8]
    network.key.weight.copy_(torch.eye(DIM))
    network.key.bias.zero_()
    states = network.states(outputs)[0]
    own = outputs["users"][0].double()
    history = TABLE[[2, 5, 3]].double()
    mean = (history.tanh() @ own).softmax(0) @ history
    expected = 0.75 * own + 0.25 * network.projection.weight.double() @ mean
    torch.testing.assert_close(states[3], expected.float(), rtol=1e-5, atol=1e-5)
