"""Ranks that send each other messages, with known answers. Seconds are whole for legibility."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.contention import Slowdown
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COLLECTIVE, RECORD, WAIT, Collective, Insertion, Instruction, Message, Program
from perfmodel.simulate.engine import simulate_together
from perfmodel.simulate.timed_step import launched_positions, timed_step
from perfmodel.simulate.timeline import Timeline
from tests.builders import ops, program_of

from .streams import FAST_HOST, INF, WIRE, near

HOST_S = 1e-6


def post(number: int, mark: int, stream: int = WIRE) -> tuple[Instruction, ...]:
    """What c10d does for messages that are exchanged together, all posted after what the compute stream was given; their
    end is mark ``mark + 1``.
    """
    return (
        Instruction(RECORD, mark),
        Instruction(WAIT, mark, stream=stream),
        Instruction(COLLECTIVE, number, number + 1, stream=stream),
        Instruction(RECORD, mark + 1, stream=stream),
    )


def rank(kernels: int, *rows: tuple[int, tuple[Instruction, ...]], exchanges: list[tuple[Message, ...]]) -> Program:
    """Kernels in order, and before kernel ``at`` these rows."""
    program = program_of(("forward", 0, ops(*range(kernels))))
    made = tuple(Collective("send_recv", "float32", 4 * (index + 1), 2, "pp") for index in range(len(exchanges)))
    insertions = tuple(Insertion(0, at, inserted) for at, inserted in rows)
    return replace(program, insertions=insertions, collectives=made, exchanges=tuple(exchanges))


def run(
    *ranks: tuple[Program, list[float], list[float]],
    slowed: float | None = None,
    launch: Launch = FAST_HOST,
    share: float = INF,
) -> list[Timeline]:
    """Each: a program, seconds of its kernels, and of its exchanges. slowed: factor of kernels beside any message. share:
    what each message takes of the room for those whose receiver has not come.
    """
    works = []
    for program, device_s, message_s in ranks:
        launched = np.ones(len(device_s), dtype=int)
        operation = program.instructions.a[launched_positions(program, launched)]
        count = len(operation)
        beside = (
            ()
            if slowed is None
            else tuple(Slowdown(np.full(count, slowed), np.ones(count), np.full(count, INF)) for _ in message_s)
        )
        host_s = np.full(len(program.instructions.kind), HOST_S)
        seconds, ahead = np.array(message_s), np.full(len(message_s), share)
        works.append(
            timed_step(program, np.array(device_s)[operation], launched, host_s, seconds, beside, eager_share=ahead)
        )
    return simulate_together([program for program, *_ in ranks], works, launch)


def send(name: str, to: int = 1) -> tuple[Message, ...]:
    return (Message(name, True, to),)


def receive(name: str, source: int = 0) -> tuple[Message, ...]:
    return (Message(name, False, source),)


def synced(*ranks: tuple[Program, list[float], list[float]], **options: float | None) -> float:
    return run(*ranks, **options)[0].synced_step_time_s  # type: ignore[arg-type]


def test_a_receiver_waits_for_what_it_is_sent() -> None:
    first = rank(1, (1, post(0, 0)), exchanges=[send("a")])
    second = rank(1, (0, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[receive("a")])
    assert synced((first, [10.0], [3.0]), (second, [20.0], [3.0])) == near(10 + 3 + 20)


def test_a_message_moves_once_both_are_there() -> None:
    first = rank(2, (1, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[send("a")])
    second = rank(2, (1, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[receive("a")])
    times = run((first, [10.0, 5.0], [3.0]), (second, [25.0, 5.0], [3.0]))
    assert times[0].synced_step_time_s == near(33.0)


def test_computing_goes_on_beside_a_receive_that_waits() -> None:
    # The first kernel and the receive begin together; its message comes at 12, after the sender's kernel.
    second = rank(3, (0, post(0, 0)), (2, (Instruction(WAIT, 1),)), exchanges=[receive("a")])
    first = rank(1, (1, post(0, 0)), exchanges=[send("a")])
    _, receiver = run((first, [12.0], [3.0]), (second, [5.0, 4.0, 1.0], [3.0]))
    assert receiver.synced_step_time_s == near(12 + 3 + 1)
    slow = synced((first, [12.0], [3.0]), (second, [5.0, 4.0, 1.0], [3.0]), slowed=2.0)
    assert slow == near(15 + 1.5 + 1)  # beside the receive, until 15, 7.5 of the first 9 are done


def test_the_end_of_a_message_is_found_within_a_kernel() -> None:
    # A kernel of 20 s at half speed beside the receive until 15: 7.5 done, and the other 12.5 at full speed.
    second = rank(2, (0, post(0, 0)), (1, (Instruction(WAIT, 1),)), exchanges=[receive("a")])
    first = rank(1, (1, post(0, 0)), exchanges=[send("a")])
    assert synced((first, [12.0], [3.0]), (second, [20.0, 1.0], [3.0]), slowed=2.0) == near(15 + 12.5 + 1)


def test_messages_both_ways_end_together() -> None:
    first = rank(
        2, (1, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[(Message("a", True, 1), Message("b", False, 1))]
    )
    second = rank(
        2, (1, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[(Message("b", True, 0), Message("a", False, 0))]
    )
    ours, theirs = run((first, [10.0, 5.0], [3.0]), (second, [14.0, 2.0], [4.0]))
    assert ours.synced_step_time_s == near(14 + 4 + 5)  # as long as the side says that takes longer
    assert (ours.step_time_s, theirs.step_time_s) == (near(20.0), near(20.0))  # the second is never idle
    assert theirs.start_s[1] - theirs.end_s[0] == near(4.0)


def test_ranks_say_when_they_began_and_what_they_exchanged() -> None:
    # The fourth of 5 steps begins when the launch queue has room, as the second one starts: after 25 s, and after 27 s,
    # where messages are over at 22.
    posts = (*post(0, 0), *post(1, 2))
    slow = rank(2, (1, posts), exchanges=[send("a"), send("b")])
    fast = rank(2, (1, (*posts, Instruction(WAIT, 3))), exchanges=[receive("a"), receive("b")])
    times = run((slow, [20.0, 5.0], [1.0, 1.0]), (fast, [10.0, 5.0], [1.0, 1.0]), launch=Launch(queue_depth=4))
    assert [each.began_s for each in times] == [0.0, near(2.0)]
    assert [each.step_time_s for each in times] == [near(25.0), near(25.0)]
    assert [[message.exchange for message in each.communications] for each in times] == [[0, 1], [0, 1]]
    later = times[0].shifted(100.0)
    assert (later.start_s - times[0].start_s).tolist() == [100.0, 100.0]
    assert later.communications[1].start_s == times[0].communications[1].start_s + 100.0
    assert (later.communications[1].exchange, later.step_time_s) == (1, times[0].step_time_s)


def test_ranks_run_until_their_steps_are_alike() -> None:
    """The first rank is ahead by as many messages as are kept, 8, and only then waits for the second, at its pace."""
    first = rank(2, (1, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[send("a")])
    second = rank(2, (0, (*post(0, 0), Instruction(WAIT, 1))), exchanges=[receive("a")])
    ranks = (first, [4.0, 1.0], [1.0]), (second, [10.0, 9.0], [1.0])
    times = run(*ranks, share=0.125, launch=Launch(queue_depth=1))
    assert [each.step_time_s for each in times] == [near(20.0), near(20.0)]


def test_a_chain_of_ranks() -> None:
    # Two micro-batches through three stages of 10 s, a message takes 1: (2 + 3 - 1) x 10, messages of the first through
    # two borders, and 2 more at the second rank, where messages to and from it share a stream.
    def stage(first: bool, last: bool, number: int) -> Program:
        rows, exchanges = [], []
        for batch in range(2):
            before: tuple[Instruction, ...] = ()
            if batch > 0 and not last:
                before = post(len(exchanges), 2 * len(exchanges))
                exchanges.append(send(f"{number}-{batch - 1}", number + 1))
            if not first:
                before += (*post(len(exchanges), 2 * len(exchanges)), Instruction(WAIT, 2 * len(exchanges) + 1))
                exchanges.append(receive(f"{number - 1}-{batch}", number - 1))
            rows.append((batch, before))
        if not last:
            rows.append((2, post(len(exchanges), 2 * len(exchanges))))
            exchanges.append(send(f"{number}-1", number + 1))
        return rank(2, *rows, exchanges=exchanges)

    stages = [stage(number == 0, number == 2, number) for number in range(3)]
    found = run(*((each, [10.0, 10.0], [1.0] * len(each.exchanges)) for each in stages))
    assert found[0].synced_step_time_s == near(44.0)


def test_ranks_that_wait_for_each_other_for_ever_are_named() -> None:
    first = rank(1, (0, (*post(0, 0), Instruction(WAIT, 1))), (1, post(1, 2)), exchanges=[receive("b", 1), send("a")])
    second = rank(1, (0, (*post(0, 0), Instruction(WAIT, 1))), (1, post(1, 2)), exchanges=[receive("a"), send("b", 0)])
    with pytest.raises(PerfModelError, match=r"ranks 0, 1 wait for each other"):
        run((first, [1.0], [1.0, 1.0]), (second, [1.0], [1.0, 1.0]))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=6),
)
def test_a_pair_in_lockstep_is_a_recurrence(rounds: list[tuple[int, int, int]]) -> None:
    """Each round both compute, then the first sends and the second awaits it before its next kernel."""
    count = len(rounds)
    sends = [(at + 1, post(at, 2 * at)) for at in range(count)]
    receives = [(at + 1, (*post(at, 2 * at), Instruction(WAIT, 2 * at + 1))) for at in range(count)]
    first = rank(count, *sends, exchanges=[send(str(at)) for at in range(count)])
    second = rank(count, *receives, exchanges=[receive(str(at)) for at in range(count)])
    message_s = [float(each) for *_, each in rounds]
    found = synced(
        (first, [float(each) for each, *_ in rounds], message_s),
        (second, [float(each) for _, each, _ in rounds], message_s),
    )
    ours = theirs = wire = 0.0
    for first_s, second_s, moving_s in rounds:
        ours, theirs = ours + first_s, theirs + second_s
        sent = max(ours, wire)
        theirs = max(sent, theirs) + moving_s
        wire = theirs
    assert found == pytest.approx(max(ours, theirs, wire), abs=1e-3)


def test_kernels_beside_a_message_that_waits_are_as_slow_as_that_makes_them() -> None:
    # A kernel of 20 s beside a receive: four times as long while it waits until 12, twice while it moves until 16.
    second = rank(2, (0, post(0, 0)), (1, (Instruction(WAIT, 1),)), exchanges=[receive("a")])
    first = rank(1, (1, post(0, 0)), exchanges=[send("a")])
    works = []
    for program, device_s in ((first, [12.0]), (second, [20.0, 1.0])):
        count = len(device_s)
        moving, waiting = (Slowdown(np.full(count, each), np.ones(count), np.full(count, INF)) for each in (2.0, 4.0))
        host_s = np.full(len(program.instructions.kind), HOST_S)
        kernels = np.ones(count, dtype=int)
        works.append(
            timed_step(program, np.array(device_s), kernels, host_s, np.array([4.0]), (moving,), None, (waiting,))
        )
    found = simulate_together([first, second], works, FAST_HOST)
    assert found[1].synced_step_time_s == near(16 + (20 - 12 / 4 - 4 / 2) + 1)


def a_row(count: int) -> tuple[Program, Program]:
    """The first rank sends so many after one kernel and waits for all; the second takes each after a kernel of its
    own.
    """
    posts = [post(at, 2 * at) for at in range(count)]
    waits = [Instruction(WAIT, 2 * at + 1) for at in range(count)]
    sends = (1, (*(row for rows in posts for row in rows), *waits))
    takes = [(at + 1, (*posts[at], waits[at])) for at in range(count)]
    return (
        rank(2, sends, exchanges=[send(str(at)) for at in range(count)]),
        rank(count + 1, *takes, exchanges=[receive(str(at)) for at in range(count)]),
    )


@pytest.mark.parametrize(
    ("share", "sent_s"),
    [
        # The receiver takes them at 100, 203 and 306.
        (INF, 306 + 3.0),
        (0.25, 1 + 3 * 3.0),  # all are kept
        (0.5, 100 + 3.0),  # the third has room once the first is taken
        (1.0, 203 + 3.0),  # and once the second is
        (1.5, 306 + 3.0),
    ],
)
def test_a_sender_goes_ahead_while_there_is_room(share: float, sent_s: float) -> None:
    sender, receiver = a_row(3)
    ranks = (sender, [1.0, 1000.0], [3.0] * 3), (receiver, [100.0, 100.0, 100.0, 1.0], [3.0] * 3)
    assert synced(*ranks, share=share) == near(sent_s + 1000)


@given(st.integers(1, 8), st.floats(0.1, 1.5), st.integers(1, 30))
@settings(max_examples=40)
def test_more_room_is_never_slower(count: int, share: float, kernel_s: int) -> None:
    sender, receiver = a_row(count)
    ranks = (sender, [1.0, 50.0], [3.0] * count), (receiver, [float(kernel_s)] * (count + 1), [3.0] * count)
    times = [synced(*ranks, share=each) for each in (INF, share, share / 2)]
    assert times[2] <= times[1] + 1e-3 <= times[0] + 2e-3


def test_the_room_is_of_a_pair_and_a_direction() -> None:
    """Both send two at once to each other before either takes any: each has its own room for both."""
    names = [["a", "b"], ["c", "d"]]
    programs = []
    for number, own in enumerate(names):
        exchanges = [send(name, 1 - number) for name in own] + [receive(name, 1 - number) for name in names[1 - number]]
        posts = [post(at, 2 * at) for at in range(4)]
        waits = [Instruction(WAIT, 2 * at + 1) for at in range(4)]
        rows = (1, (*posts[0], *posts[1], *waits[:2], *posts[2], *posts[3], *waits[2:]))
        programs.append(rank(2, rows, exchanges=exchanges))
    works = [(each, [10.0, 5.0], [3.0] * 4) for each in programs]
    assert synced(*works, share=0.5) == near(10 + 4 * 3 + 5)
    with pytest.raises(PerfModelError, match="wait for each other"):
        synced(*works)
