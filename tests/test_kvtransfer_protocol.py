"""The transfer protocol as pure state machines: single rules, then every interleaving."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s
from pdmesh.wire.errors import InternalError
from pdmesh.wire.messages import Fin


def fin(num_writes: int, generation: int = 1) -> Fin:
    return Fin(
        lease_id="a",
        generation=generation,
        request_id="q",
        num_writes=num_writes,
        first_tokens=(5,),
    )


def receive(state: r.ReceiverState, *events: r.Event) -> tuple[r.ReceiverState, list[r.Effect]]:
    effects: list[r.Effect] = []
    for event in events:
        state, more = r.step(state, event)
        effects += more
    return state, effects


def filling(pages: int = 1, layers: int = 2, one_sided: bool = False) -> r.ReceiverState:
    return receive(r.ReceiverState(1, pages, layers), r.Opened(1, one_sided))[0]


BOTH_WRITES = (r.WriteArrived(1, 0, 0), r.WriteArrived(1, 0, 1))


def test_a_lease_is_complete_when_all_writes_and_fin_are_there_in_any_order():
    for order in ((*BOTH_WRITES, r.FinArrived(fin(2))), (r.FinArrived(fin(2)), *BOTH_WRITES)):
        state, effects = receive(filling(), *order)
        assert state.phase is r.Phase.COMPLETE
        assert effects[-2:] == [r.Deliver(fin(2)), r.Acknowledge()]


def test_fin_before_all_writes_waits():
    state, effects = receive(filling(), BOTH_WRITES[0], r.FinArrived(fin(2)))
    assert state.phase is r.Phase.FILLING
    assert effects == [r.Store(0, 0)]


def test_a_transfer_of_no_pages_completes_at_fin():
    state, effects = receive(filling(pages=0), r.FinArrived(fin(0)))
    assert state.phase is r.Phase.COMPLETE
    assert r.Deliver(fin(0)) in effects


def test_a_repeated_write_is_stored_once_and_counted_once():
    state, effects = receive(filling(), BOTH_WRITES[0], BOTH_WRITES[0], r.FinArrived(fin(2)))
    assert state.phase is r.Phase.FILLING
    assert effects.count(r.Store(0, 0)) == 1


def test_a_fin_that_counts_other_writes_than_the_lease_needs_fails_at_once():
    state, effects = receive(filling(), r.FinArrived(fin(1)))
    assert state.phase is r.Phase.FREE
    assert effects[0] == r.Fail("the sender made 1 writes, the lease needs 2")


def test_a_repeated_fin_is_acknowledged_again():
    state, _ = receive(filling(), *BOTH_WRITES, r.FinArrived(fin(2)))
    assert receive(state, r.FinArrived(fin(2)))[1] == [r.Acknowledge()]
    installed, _ = receive(state, r.Installed())
    assert receive(installed, r.FinArrived(fin(2)))[1] == [r.Acknowledge()]


@pytest.mark.parametrize("generation", [0, 2])
def test_messages_of_another_generation_change_nothing(generation):
    state = filling()
    events = (
        r.WriteArrived(generation, 0, 0),
        r.WriteCorrupt(generation, 0, 0),
        r.FinArrived(fin(2, generation)),
        r.SenderAborted(generation, "late"),
        r.SenderDrained(generation),
        r.Opened(generation, False),
    )
    for event in events:
        after, effects = receive(state, event)
        assert after == state
        assert all(isinstance(effect, r.Drop | r.TellSender) for effect in effects)


def test_a_lease_has_one_writer():
    state, effects = receive(filling(), r.Opened(1, False))
    assert state == filling()
    assert isinstance(effects[0], r.TellSender)


@pytest.mark.parametrize("place", [(1, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_write_outside_of_the_lease_fails_it(place):
    state, effects = receive(filling(), r.WriteArrived(1, *place))
    assert state.phase is r.Phase.FREE
    assert not any(isinstance(effect, r.Store) for effect in effects)


ENDINGS = [
    r.WriteCorrupt(1, 0, 0),
    r.SenderAborted(1, "prefill failed"),
    r.Cancelled(),
    r.FinArrived(fin(9)),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda event: type(event).__name__)
def test_checked_writes_need_no_quarantine(ending):
    state, effects = receive(filling(), ending)
    assert state.phase is r.Phase.FREE
    assert r.Free() in effects


@pytest.mark.parametrize("fence", [r.SenderDrained(1), r.ConnectionClosed("gone")])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda event: type(event).__name__)
def test_one_sided_pages_stay_in_quarantine_until_drained_or_closed(ending, fence):
    state, effects = receive(filling(one_sided=True), ending)
    assert state.phase is r.Phase.QUARANTINED
    assert r.Free() not in effects
    state, _ = receive(state, *BOTH_WRITES, r.FinArrived(fin(2)), r.Cancelled())
    assert state.phase is r.Phase.QUARANTINED, "only a fence ends a quarantine"
    state, effects = receive(state, fence)
    assert state.phase is r.Phase.FREE
    assert effects == [r.Free()]


def test_a_connection_lost_in_the_middle_fails_the_lease_at_once():
    state, effects = receive(filling(), BOTH_WRITES[0], r.ConnectionClosed("reset"))
    assert state.phase is r.Phase.FREE
    assert r.Fail("the connection was lost after 1 of 2 writes: reset") in effects


def test_a_connection_lost_after_the_last_write_harms_nothing():
    state, _ = receive(filling(), *BOTH_WRITES, r.FinArrived(fin(2)))
    assert receive(state, r.ConnectionClosed("reset")) == (state, [])


def send(state: s.SenderState, *events: s.Event) -> tuple[s.SenderState, list[s.Effect]]:
    effects: list[s.Effect] = []
    for event in events:
        state, more = s.step(state, event)
        effects += more
    return state, effects


def test_a_transfer_goes_from_grant_to_acknowledgement():
    state, effects = send(
        s.SenderState(2),
        s.Granted(),
        s.Pushed(0, 0),
        s.Pushed(0, 1),
        s.WritesDone(2),
        s.Finished(fin(2)),
        s.Acknowledged(),
    )
    assert state.settled
    assert effects == [
        s.PostOpen(),
        s.PostWrite(0, 0),
        s.PostWrite(0, 1),
        s.PostFin(fin(2)),
        s.Succeed(),
    ]


def test_an_acknowledged_transfer_settles_only_when_no_write_is_under_way():
    state, _ = send(
        s.SenderState(1), s.Granted(), s.Pushed(0, 0), s.Finished(fin(1)), s.Acknowledged()
    )
    assert not state.settled
    assert send(state, s.WritesDone(1))[0].settled


def test_drained_is_said_only_after_the_last_write_under_way():
    state, effects = send(
        s.SenderState(1), s.Granted(), s.Pushed(0, 0), s.Pushed(1, 0), s.AbortRequested("no")
    )
    assert state.phase is s.Phase.DRAINING
    assert s.PostDrained() not in effects
    state, effects = send(state, s.WritesDone(1))
    assert effects == []
    state, effects = send(state, s.WritesDone(1))
    assert (state.phase, effects) == (s.Phase.DRAINED, [s.PostDrained()])


def test_a_grant_that_comes_after_the_abort_finds_a_tombstone():
    state, effects = send(s.SenderState(1), s.AbortRequested("cancelled"), s.Granted())
    assert state.phase is s.Phase.DRAINED
    assert effects == [s.Fail("cancelled")]
    assert send(state, s.Pushed(0, 0), s.Finished(fin(0))) == (state, [])


def test_a_fin_that_counts_other_writes_than_were_made_aborts():
    state, effects = send(s.SenderState(1), s.Granted(), s.Pushed(0, 0), s.Finished(fin(2)))
    assert state.phase is s.Phase.DRAINING
    assert effects[-3] == s.Fail("FIN counts 2 writes, 1 were made")


@pytest.mark.parametrize(
    "events",
    [
        (s.Granted(), s.Pushed(0, 0), s.Pushed(0, 0)),
        (s.Pushed(0, 0),),
        (s.Granted(), s.Finished(fin(0)), s.Finished(fin(0))),
        (s.Granted(), s.Finished(fin(0)), s.Pushed(0, 0)),
        (s.Granted(), s.WritesDone(1)),
    ],
)
def test_misuse_by_the_caller_is_an_error(events):
    with pytest.raises(InternalError):
        send(s.SenderState(1), *events)


@dataclass(frozen=True)
class World:
    """A sender, a receiver, and what is between them; the network keeps no order."""

    sender: s.SenderState
    receiver: r.ReceiverState
    to_receiver: frozenset[object]
    to_sender: frozenset[object]
    landing: frozenset[tuple[int, int]]
    """One-sided writes posted and not landed."""
    closed: bool = False
    owner_gone: bool = False
    delivered: bool = False
    freed: bool = False
    stray: bool = False
    """A write landed after the pages were given back."""


PLACES = ((0, 0), (0, 1))


def start(one_sided: bool) -> World:
    sender, _ = s.step(s.SenderState(2), s.Granted())
    receiver, _ = r.step(r.ReceiverState(1, 1, 2), r.Opened(1, one_sided))
    nothing: frozenset[object] = frozenset()
    return World(sender, receiver, nothing, nothing, frozenset())


def sender_step(world: World, event: s.Event) -> World:
    sender, effects = s.step(world.sender, event)
    world = replace(world, sender=sender)
    for effect in effects:
        match effect:
            case s.PostWrite(page, layer) if world.receiver.one_sided:
                world = replace(world, landing=world.landing | {(page, layer)})
            case s.PostWrite() | s.PostFin() | s.PostAbort() | s.PostDrained() if not world.closed:
                world = replace(world, to_receiver=world.to_receiver | {effect})
            case s.CancelQueued() if not world.receiver.one_sided:
                queued = {m for m in world.to_receiver if isinstance(m, s.PostWrite)}
                world = replace(world, to_receiver=world.to_receiver - queued)
                world = sender_step(world, s.WritesDone(len(queued)))
            case _:
                pass
    return world


def receiver_step(world: World, event: r.Event) -> World:
    receiver, effects = r.step(world.receiver, event)
    world = replace(world, receiver=receiver)
    for effect in effects:
        match effect:
            case r.Acknowledge() | r.TellSender() if not world.closed:
                world = replace(world, to_sender=world.to_sender | {effect})
            case r.Deliver():
                world = replace(world, delivered=True)
            case r.Free():
                world = replace(world, freed=True)
            case r.Store() if world.freed:
                world = replace(world, stray=True)
            case _:
                pass
    return world


def deliver(world: World, message: object) -> World:
    match message:
        case s.PostWrite(page, layer):
            world = receiver_step(world, r.WriteArrived(1, page, layer))
            return sender_step(world, s.WritesDone(1))
        case s.PostFin(it):
            return receiver_step(world, r.FinArrived(it))
        case s.PostAbort(reason):
            return receiver_step(world, r.SenderAborted(1, reason))
        case s.PostDrained():
            return receiver_step(world, r.SenderDrained(1))
        case r.Acknowledge():
            return sender_step(world, s.Acknowledged())
        case r.TellSender(reason):
            return sender_step(world, s.ReceiverRefused(reason))
    raise AssertionError(message)


def successors(world: World, faults: bool = True) -> list[World]:
    """Every state that one step leads to; ``faults`` off leaves what happens by itself."""
    after: list[World] = []
    for message in world.to_receiver:
        after.append(deliver(replace(world, to_receiver=world.to_receiver - {message}), message))
    for message in world.to_sender:
        after.append(deliver(replace(world, to_sender=world.to_sender - {message}), message))
    for place in world.landing:
        landed = replace(
            world,
            landing=world.landing - {place},
            stray=world.stray or world.freed,
        )
        landed = receiver_step(landed, r.WriteArrived(1, *place))
        after.append(sender_step(landed, s.WritesDone(1)))
    if world.sender.phase in (s.Phase.GRANTED, s.Phase.SENDING):
        left = [p for p in PLACES if not world.sender.pushed >> p[1] & 1]
        after += [sender_step(world, s.Pushed(*place)) for place in left[:1]]
        if not left:
            after.append(sender_step(world, s.Finished(fin(2))))
    if not world.owner_gone and (faults or world.delivered or world.freed):
        after.append(receiver_step(replace(world, owner_gone=True), r.Cancelled()))
    if faults and not world.closed:
        after.append(sender_step(world, s.AbortRequested("cancelled")))
        nothing: frozenset[object] = frozenset()
        cut = replace(
            world, closed=True, to_receiver=nothing, to_sender=nothing, landing=frozenset()
        )
        cut = receiver_step(cut, r.ConnectionClosed("cut"))
        after.append(sender_step(cut, s.ConnectionClosed("cut")))
    return [one for one in after if one != world]


def reachable(one_sided: bool) -> list[World]:
    seen = {start(one_sided)}
    todo = list(seen)
    while todo:
        for world in successors(todo.pop()):
            if world not in seen:
                seen.add(world)
                todo.append(world)
    return list(seen)


@pytest.mark.parametrize("one_sided", [False, True])
def test_in_every_interleaving_no_write_lands_in_pages_that_were_given_back(one_sided):
    worlds = reachable(one_sided)
    assert len(worlds) > 50
    assert not any(world.stray for world in worlds)
    assert not any(world.freed and world.landing for world in worlds)


@pytest.mark.parametrize("one_sided", [False, True])
def test_in_every_interleaving_what_is_delivered_is_whole(one_sided):
    for world in reachable(one_sided):
        if world.delivered:
            assert world.receiver.num_arrived == 2
        if world.sender.phase is s.Phase.DONE:
            assert world.delivered


@pytest.mark.parametrize("one_sided", [False, True])
def test_from_every_state_the_transfer_comes_to_an_end_once_the_owner_lets_go(one_sided):
    for world in reachable(one_sided):
        if not world.owner_gone:
            world = receiver_step(replace(world, owner_gone=True), r.Cancelled())
        seen: set[World] = set()
        while nexts := [one for one in successors(world, faults=False) if one not in seen]:
            world = nexts[0]
            seen.add(world)
        assert world.receiver.phase is r.Phase.FREE, world
        assert world.sender.settled, world


def test_the_search_finds_a_stray_write_when_the_quarantine_is_left_too_early():
    """The same search with the fence taken out: the checks above can fail."""
    world = start(one_sided=True)
    world = sender_step(world, s.Pushed(0, 0))
    world = receiver_step(world, r.Cancelled())
    early = replace(world, freed=True)
    assert any(after.stray for after in successors(early))
