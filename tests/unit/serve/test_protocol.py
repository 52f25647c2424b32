"""Every order of events in a small server: requests, loads, messages, failures of replicas and restarts of the coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rayrec.config import InputError
from rayrec.schema import Schema
from rayrec.serve.protocol import Change, Configured, Decisions, ReplicaState, Source, Status, Wanted

COLUMNS = Schema(dense=("age",))
FAILS = {"other columns": (0, 1, 2), "damaged on 1": (1,)}
"""Replicas that cannot load a model, by path."""


@dataclass(frozen=True)
class Replica:
    name: str
    state: ReplicaState = field(default_factory=ReplicaState)
    sent: tuple[Wanted | None, Status] | None = None
    """Report on its way to the coordinator."""
    stalled: bool = False


@dataclass(frozen=True)
class Budget:
    """Number of events of each kind to come."""

    swaps: tuple[str, ...] = ()
    rollbacks: int = 0
    kills: int = 0
    restarts: int = 0
    lost_answers: int = 0
    stalls: int = 0
    """Replicas that are not heard of for long, and come back."""
    faults: int = 0
    """Loads that fail once."""


Ends = frozenset[tuple[int, int | None]]
"""Serials of the model and the previous one at the end, if no other request follows."""


@dataclass(frozen=True)
class Request:
    number: int
    done: Ends
    failed: Ends


@dataclass(frozen=True)
class World:
    decisions: Decisions
    replicas: tuple[Replica | None, ...]
    budget: Budget
    requests: tuple[Request, ...] = ()
    """Those that no restart lost."""
    heard: int = 0
    """Newest change that the coordinator heard of after a restart."""
    lost: tuple[int, ...] = ()
    """Requests that the last restart lost."""
    numbers: tuple[int, ...] = ()
    accepted: tuple[int, ...] = (0,)
    """Serials of models that were accepted at some time."""


def make_world(num_replicas: int, *models: str, **budget: Any) -> World:
    """A server after swaps to the models, the first of which it was started for. Without: before its start."""
    world = World(Decisions(Wanted(0, Source(0, "a"))), (None,) * num_replicas, Budget())
    for path in models:
        world = swap(world, path) if path != "a" else world
        while (later := calm(world)) is not None:
            world = accept(world, later)
    return replace(world, budget=Budget(**budget))


def key(value: Any) -> Any:
    """Hashable, and equal for equal worlds; also of fields that do not count for equality."""
    if value is None or isinstance(value, int | str | frozenset):
        return value
    if isinstance(value, tuple):
        return tuple([key(entry) for entry in value])
    if isinstance(value, Mapping):
        return tuple(sorted([(name, key(entry)) for name, entry in value.items()]))
    return value is COLUMNS or tuple([key(entry) for entry in vars(value).values()])


def put(world: World, slot: int, replica: Replica | None, **changes: Any) -> World:
    replicas = (*world.replicas[:slot], replica, *world.replicas[slot + 1 :])
    return replace(world, replicas=replicas, **changes)


def spend(world: World, **budget: Any) -> World:
    return replace(world, budget=replace(world.budget, **budget))


def start(world: World, slot: int) -> World:
    names = (f"{slot}{letter}" for letter in "abc")
    return put(world, slot, Replica(next(name for name in names if name not in world.decisions.replicas)))


def send(world: World, slot: int) -> World:
    replica = world.replicas[slot]
    assert replica is not None
    state = replica.state
    status = Status(
        model=state.model,
        version=state.model.path if state.model else "",
        schema=COLUMNS if state.model else None,
        standby=state.standby,
        failures=state.failures,
    )
    return put(world, slot, replace(replica, sent=(state.wanted, status)))


def deliver(world: World, slot: int, *, answered: bool = True) -> World:
    replica = world.replicas[slot]
    assert replica is not None
    assert replica.sent is not None
    decisions = world.decisions.hear(replica.name, *replica.sent)
    state = replica.state
    if answered and decisions.answer is not None:
        state = state.hear(decisions.answer)
    known = replica.sent[0].generation if replica.sent[0] else 0
    heard = world.heard if world.decisions.complete else max(world.heard, known)
    replica = replace(replica, sent=None, state=state, stalled=False)
    return put(world, slot, replica, decisions=decisions, heard=heard)


def begin(world: World, slot: int, *, retry: bool) -> World:
    replica = world.replicas[slot]
    assert replica is not None
    return put(world, slot, replace(replica, state=replica.state.begin(retry=retry)))


def finish(world: World, slot: int, *, fault: bool = False) -> World:
    replica = world.replicas[slot]
    assert replica is not None
    state = replica.state
    assert state.loading is not None
    fails = fault or slot in FAILS.get(state.loading.path, ())
    return put(world, slot, replace(replica, state=state.finish("it cannot be loaded" if fails else None)))


def restart(world: World) -> World:
    number = 1000 * (len(world.numbers) + world.decisions.first)
    decisions = Decisions(Wanted(0, Source(0, "a")), first=number, complete=False)
    replicas = tuple(replica and replace(replica, sent=None) for replica in world.replicas)
    return replace(world, decisions=decisions, replicas=replicas, heard=0)


def all_heard(world: World) -> bool:
    knowing = {replica.name for replica in world.replicas if replica and replica.state.wanted}
    return knowing <= world.decisions.replicas.keys()


def complete(world: World) -> World:
    decisions = world.decisions.complete_restart()
    heard, first = world.heard, decisions.first
    requests = tuple(request for request in world.requests if not heard < request.number < first)
    lost = tuple(number for number in world.numbers if heard < number < first)
    return replace(world, decisions=decisions, requests=requests, lost=lost)


def swap(world: World, path: str) -> World:
    wanted = world.decisions.wanted
    before = (wanted.model.serial, wanted.previous.serial if wanted.previous else None)
    decisions, number = world.decisions.swap(path)
    if wanted.next is not None and wanted.next.path == path:
        assert number == wanted.next.request
        return replace(world, decisions=decisions)
    return requested(world, decisions, number, before=before, after=(number, wanted.model.serial), path=path)


def roll_back(world: World) -> World:
    wanted = world.decisions.wanted
    before = (wanted.model.serial, wanted.previous.serial if wanted.previous else None)
    decisions, number = world.decisions.roll_back()
    if wanted.next is not None:  # only cancelled
        request = Request(decisions.wanted.generation, frozenset({before}), frozenset())
        return replace(world, decisions=decisions, requests=(*world.requests, request))
    assert wanted.previous is not None
    after = (wanted.previous.serial, wanted.model.serial)
    return requested(world, decisions, number, before=before, after=after, path=wanted.previous.path)


def requested(
    world: World,
    decisions: Decisions,
    number: int,
    *,
    before: tuple[int, int | None],
    after: tuple[int, int],
    path: str,
) -> World:
    assert number not in world.numbers
    can_be_done = len(FAILS.get(path, ())) < 3
    can_fail = path in FAILS or world.budget.faults
    request = Request(number, frozenset({after} if can_be_done else ()), frozenset({before} if can_fail else ()))
    numbers = (*world.numbers, number)
    return replace(world, decisions=decisions, requests=(*world.requests, request), numbers=numbers)


def events(world: World) -> Iterator[World]:
    """Worlds after each event that may come next."""
    for slot, replica in enumerate(world.replicas):
        if replica is None:
            yield start(world, slot)
        else:
            yield from replica_events(world, slot, replica)
    budget, decisions = world.budget, world.decisions
    for name in forgotten(world):
        yield replace(world, decisions=decisions.forget(name))
    if budget.restarts:
        yield spend(restart(world), restarts=budget.restarts - 1)
    if not decisions.complete and all_heard(world):
        yield complete(world)
    if decisions.complete and decisions.wanted.schema:
        for number, path in enumerate(budget.swaps):
            yield spend(swap(world, path), swaps=budget.swaps[:number] + budget.swaps[number + 1 :])
        if budget.rollbacks and (decisions.wanted.next or decisions.wanted.previous):
            yield spend(roll_back(world), rollbacks=budget.rollbacks - 1)


def replica_events(world: World, slot: int, replica: Replica) -> Iterator[World]:
    budget, decisions = world.budget, world.decisions
    if replica.sent is None:
        yield send(world, slot)
    else:
        yield deliver(world, slot)
        if budget.lost_answers:
            yield spend(deliver(world, slot, answered=False), lost_answers=budget.lost_answers - 1)
    if replica.state.loading:
        yield finish(world, slot)
        if budget.faults:
            yield spend(finish(world, slot, fault=True), faults=budget.faults - 1)
    elif replica.state.begin(retry=True).loading:
        yield begin(world, slot, retry=True)
    if budget.stalls and replica.name in decisions.replicas:
        stalled = replace(world, decisions=decisions.forget(replica.name))
        yield spend(put(stalled, slot, replace(replica, stalled=True)), stalls=budget.stalls - 1)
    if budget.kills:
        yield spend(put(world, slot, None), kills=budget.kills - 1)


def forgotten(world: World) -> list[str]:
    alive = {replica.name for replica in world.replicas if replica}
    return sorted(world.decisions.replicas.keys() - alive)


def calm(world: World) -> World | None:
    """The next event if nothing is requested and nothing fails any more; None at the end."""
    for slot, replica in enumerate(world.replicas):
        if replica is None:
            return start(world, slot)
        if replica.sent is not None:
            return deliver(world, slot)
        if replica.state.loading:
            return finish(world, slot)
        loading = replica.state.begin(retry=True).loading
        if loading and (loading == replica.state.begin().loading or slot not in FAILS.get(loading.path, ())):
            return begin(world, slot, retry=True)
    for name in forgotten(world):
        return replace(world, decisions=world.decisions.forget(name))
    if not world.decisions.complete and all_heard(world):
        return complete(world)
    before = key(world)
    for slot in range(len(world.replicas)):
        after = deliver(send(world, slot), slot)
        if key(after) != before:
            return after
    return None


def accept(before: World, after: World) -> World:
    """Note the accepted model, which all replicas have in memory, but for stalled ones and those that have just started."""
    old, new = before.decisions, after.decisions
    if old.wanted.model != new.wanted.model and old.adopted == new.adopted and old.first == new.first:
        for replica in after.replicas:
            if replica and (replica.name in new.replicas or (replica.state.wanted and not replica.stalled)):
                assert new.wanted.model in (replica.state.model, replica.state.standby)
    serial = new.wanted.model.serial
    return after if serial in after.accepted else replace(after, accepted=(*after.accepted, serial))


def check(world: World) -> None:
    """What holds at any time."""
    decisions = world.decisions
    wanted, failures = decisions.wanted, decisions.failures
    for slot, replica in enumerate(world.replicas):
        state = replica.state if replica else ReplicaState()
        if state.model is not None:
            assert state.model.serial in world.accepted
            assert slot not in FAILS.get(state.model.path, ())
        if state.standby is not None:
            assert state.wanted is not None
            assert state.standby in (state.wanted.next, state.wanted.previous)
    for source in (wanted.model, wanted.previous):
        assert source is None or source.path != "other columns"
    for number in world.numbers:
        state_of = decisions.change(number).state
        assert state_of != "failed" or number not in failures or number not in world.accepted
        if decisions.complete:
            assert (state_of == "lost") == (number in world.lost)


def check_end(world: World) -> None:
    """What holds once nothing is requested and nothing fails any more."""
    wanted = world.decisions.wanted
    assert world.decisions.complete
    assert wanted.next is None
    everywhere = True
    for slot, replica in enumerate(world.replicas):
        assert replica is not None
        everywhere &= replica.state.model == wanted.model
        assert replica.state.model == wanted.model or slot in FAILS.get(wanted.model.path, ())
    if world.requests:
        last = world.requests[-1]
        end = (wanted.model.serial, wanted.previous.serial if wanted.previous else None)
        assert end in last.done | last.failed
        if last.number in world.numbers:
            state = world.decisions.change(last.number).state
            assert state == ("failed" if end in last.failed else "done" if everywhere else "pending")


def walk(world: World) -> int:
    """Check all worlds that any order of events leads to, and where each of them ends. Returns their number."""
    seen, good = {key(world)}, set[Any]()
    frontier = [world]
    while frontier:
        reached = []
        for before in frontier:
            check(before)
            ends_well(before, good)
            for event in events(before):
                after = accept(before, event)
                if (known := key(after)) not in seen:
                    seen.add(known)
                    reached.append(after)
        frontier = reached
    return len(seen)


def ends_well(world: World, good: set[Any]) -> None:
    """`good`: worlds that were checked before."""
    path = set()
    later: World | None = world
    while later is not None:
        known = key(later)
        if known in good:
            break
        assert known not in path, "it goes round for ever"
        path.add(known)
        check(later)
        world = later
        later = calm(world)
        later = later and accept(world, later)
    else:
        check_end(world)
    good |= path


LARGE = [pytest.mark.slow, pytest.mark.extended]


@pytest.mark.parametrize(
    ("num_replicas", "models", "budget"),
    [
        (2, "", {"swaps": ("b",)}),
        (2, "a", {"swaps": ("b",), "stalls": 1, "faults": 1}),
        (2, "a", {"swaps": ("damaged on 1",), "restarts": 1}),
        (2, "ab", {"swaps": ("other columns",), "rollbacks": 1}),
        (2, "ab", {"rollbacks": 1, "kills": 1}),
        (2, "ab", {"rollbacks": 2, "restarts": 1}),
        (1, "ab", {"swaps": ("c",), "rollbacks": 1, "restarts": 1}),
        pytest.param(2, "ab", {"swaps": ("other columns",), "rollbacks": 1, "lost_answers": 1}, marks=LARGE),
        pytest.param(2, "a", {"swaps": ("other columns",), "kills": 1, "lost_answers": 1}, marks=LARGE),
        pytest.param(2, "a", {"swaps": ("b", "other columns")}, marks=LARGE),
        pytest.param(3, "a", {"swaps": ("other columns",), "faults": 1}, marks=LARGE),
        pytest.param(2, "a", {"swaps": ("b",), "kills": 1, "restarts": 1}, marks=[*LARGE, pytest.mark.exhaustive]),
        pytest.param(2, "a", {"swaps": ("b", "c"), "restarts": 1}, marks=[*LARGE, pytest.mark.exhaustive]),
        pytest.param(3, "ab", {"rollbacks": 1, "kills": 1}, marks=[*LARGE, pytest.mark.exhaustive]),
    ],
)
def test_any_order_of_events_ends_on_the_wanted_model(num_replicas: int, models: str, budget: dict[str, Any]) -> None:
    assert walk(make_world(num_replicas, *models, **budget)) > 200


def serve(*paths: str) -> Decisions:
    """A server of one replica, after swaps to the models."""
    return make_world(1, *paths).decisions


def test_swaps_at_once_of_one_path_are_one_request() -> None:
    decisions, number = serve("a").swap("b")
    assert decisions.swap("b") == (decisions, number)
    later, other = decisions.swap("c")
    assert later.change(number) == Change("failed", cause="a later request replaced this one")
    assert later.change(other).state == "pending"


def test_rejected_swaps_keep_model_and_previous() -> None:
    decisions = serve("a", "b")
    for path in ("x", "y", "x"):
        decisions, number = decisions.swap(path)
    rejected = decisions.hear("0a", decisions.wanted, Status(decisions.wanted.model, failures={number: "damaged"}))
    assert rejected.change(number) == Change("failed", cause="damaged")
    assert (rejected.wanted.model, rejected.wanted.previous) == (decisions.wanted.model, decisions.wanted.previous)
    assert rejected.wanted.next is None


def test_rollback_cancels_a_pending_swap() -> None:
    decisions = serve("a", "b")
    cancelled, number = decisions.swap("c")[0].roll_back()
    assert cancelled.wanted == replace(decisions.wanted, generation=decisions.wanted.generation + 2)
    assert cancelled.change(number).state == "done"


def test_rollback_without_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="no other model"):
        serve("a").roll_back()


def test_rollback_that_failed_can_be_repeated() -> None:
    decisions = serve("a", "b")
    model, previous = decisions.wanted.model, decisions.wanted.previous
    decisions = decisions.hear("0a", decisions.wanted, Status(model))  # it has freed the previous one
    for _ in range(2):
        decisions, number = decisions.roll_back()
        assert decisions.change(number).state == "pending"
        decisions = decisions.hear("0a", decisions.wanted, Status(model, failures={number: "removed"}))
        assert decisions.change(number) == Change("failed", cause="removed")
    decisions, number = decisions.roll_back()
    decisions = decisions.hear("0a", decisions.wanted, Status(model, standby=previous))
    assert (decisions.wanted.model, decisions.wanted.previous) == (previous, model)


def test_accepted_model_is_kept_if_a_later_replica_fails() -> None:
    decisions = serve("a", "b")
    model = decisions.wanted.model
    later = decisions.hear("1a", None, Status(failures={model.request: "the store was out"}))
    assert later.wanted == decisions.wanted
    assert later.change(model.request).state == "pending"
    assert later.describe()["failures"] == {str(model.request): "the store was out"}
    assert later.forget("1a").hear("0a", decisions.wanted, Status(model)).describe()["failures"] == {}


def test_model_to_replace_one_that_nobody_can_load() -> None:
    """All replicas failed, and their model is gone: a new one is accepted if those that start can load it."""
    decisions = serve("a").forget("0a").swap("b")[0]
    source = decisions.wanted.next
    state = ReplicaState().hear(decisions.wanted).begin().finish("removed").begin().finish(None)
    assert (state.model, state.standby, state.failed) == (None, source, False)
    decisions = decisions.hear("0b", decisions.wanted, Status(standby=source, failures=state.failures))
    assert state.hear(decisions.wanted).model == source


def test_rejected_shadow_is_dropped() -> None:
    decisions, number = serve("a").set_shadow("x")
    decisions = decisions.hear("0a", decisions.wanted, Status(decisions.wanted.model, failures={number: "damaged"}))
    assert decisions.wanted.shadow is None
    assert decisions.change(number) == Change("failed", cause="damaged")


def test_configuration_counts_once() -> None:
    """A replica that starts later names what was configured before, and changes nothing."""
    decisions = serve("a").configure(Configured("run"), model="a", shadow=None)
    assert decisions.wanted.next is None
    decisions, number = decisions.swap("b")
    decisions = decisions.configure(Configured("run"), model="a2", shadow=None)
    assert decisions.wanted.next == Source(number, "b")
    decisions = decisions.configure(Configured("c", "d"), model="c", shadow="d")
    assert decisions.wanted.next is not None
    assert decisions.wanted.shadow is not None
    assert (decisions.wanted.next.path, decisions.wanted.shadow.path) == ("c", "d")
    assert decisions.wanted.next.serial != decisions.wanted.shadow.serial
    decisions = decisions.configure(Configured("c"), model="c", shadow=None)
    assert (decisions.wanted.next.path, decisions.wanted.shadow) == ("c", None)
    again = Decisions(Wanted(0, Source(0, "a")), first=1000, complete=False)
    again = again.hear("0a", decisions.wanted, Status(decisions.wanted.model)).complete_restart()
    assert again.configure(Configured("c"), model="c", shadow=None).wanted == decisions.wanted


def test_configuration_replaces_a_model_before_any_is_served() -> None:
    decisions = Decisions(Wanted(0, Source(0, "gone"))).configure(Configured("a"), model="a", shadow=None)
    assert (decisions.wanted.model.path, decisions.wanted.next) == ("a", None)
