"""Messages between the driver and a worker of one process."""

from __future__ import annotations

from rayrec.training.stop_monitor import LocalMailbox, Mailbox, Wish


def test_the_first_cause_stays() -> None:
    mailbox = LocalMailbox()
    assert mailbox.read() is None
    mailbox.send("SIGTERM")
    mailbox.send("SIGINT")
    assert [mailbox.read(), mailbox.read()] == ["SIGTERM"] * 2


def test_bytes_are_summed_over_workers() -> None:
    mailbox = LocalMailbox()
    assert mailbox.written_bytes() == 0
    for rank, written in ((0, 10), (1, 5), (0, 30)):
        mailbox.wrote(rank, written)
    assert mailbox.written_bytes() == 35


def test_a_wish_reaches_everybody_who_watches_from_then_on() -> None:
    mailbox: Mailbox = LocalMailbox()
    wishes: tuple[list[Wish], list[Wish]] = ([], [])
    mailbox.ask({"name": "too early"})
    mailbox.watch(wishes[0].append)
    mailbox.ask({"name": "a"})
    mailbox.watch(wishes[1].append)
    mailbox.ask({"name": "b"})
    assert wishes == ([{"name": "a"}, {"name": "b"}], [{"name": "b"}])
