"""Pull and migration as pure state machines: single rules."""

from __future__ import annotations

import pytest

from pdmesh.kvtransfer.protocol import migration_gateway as g
from pdmesh.kvtransfer.protocol import migration_source as s
from pdmesh.kvtransfer.protocol import migration_target as t
from pdmesh.kvtransfer.protocol import pull, sender
from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol.migration import MAX_ROUNDS, Answer, Capsule
from pdmesh.wire.errors import InternalError

ANSWER = Answer("q", (1, 2, 3))


def play(step, state, *events):
    effects = []
    for event in events:
        state, more = step(state, event)
        effects += more
    return state, effects


def test_a_sender_that_needs_the_places_writes_only_when_it_has_them():
    state, effects = play(sender.step, sender.SenderState(1), sender.Leased())
    assert effects == [sender.PostOpen()]
    with pytest.raises(InternalError):
        sender.step(state, sender.Pushed(0, 0))
    assert sender.step(state, sender.Reminded())[1] == (sender.PostOpen(),)
    granted, effects = play(sender.step, state, sender.Granted(), sender.Pushed(0, 0))
    assert effects == [sender.PostWrite(0, 0)]
    assert granted.phase is sender.Phase.SENDING


def test_a_sender_is_asked_again_and_says_drained_again():
    for before in ((), (sender.Granted(), sender.AbortRequested("no"))):
        state, _ = play(sender.step, sender.SenderState(1), *before)
        for _ in range(2):
            state, effects = sender.step(state, sender.ReceiverRefused("over"))
            assert effects[-1] == sender.PostDrained()
            assert state.phase is sender.Phase.DRAINED


def test_a_receiver_in_quarantine_asks_again_and_then_cuts_the_sender_off():
    state, _ = play(r.step, r.ReceiverState(1, 1, 1), r.Opened(1, True), r.Cancelled())
    assert isinstance(r.step(state, r.Reminded())[1][0], r.TellSender)
    after, effects = r.step(state, r.DrainOverdue())
    assert isinstance(effects[0], r.Fence)
    assert after.phase is r.Phase.QUARANTINED
    assert r.step(after, r.ConnectionClosed("cut"))[0].phase is r.Phase.FREE


def test_a_sender_that_gave_up_before_it_opened_frees_the_lease():
    for event in (r.SenderAborted(1, "no"), r.SenderDrained(1)):
        state, effects = r.step(r.ReceiverState(1, 1, 1), event)
        assert state.phase is r.Phase.FREE
        assert effects[-1] == r.Free()
        assert isinstance(r.step(state, r.Opened(1, True))[1][0], r.TellSender)


def test_only_leading_pages_with_every_layer_count_as_complete():
    state, _ = r.step(r.ReceiverState(1, 3, 2), r.Opened(1, False))
    for place, complete in (((0, 0), 0), ((1, 1), 0), ((0, 1), 1), ((1, 0), 2)):
        state, _ = r.step(state, r.WriteArrived(1, *place))
        assert state.complete_pages == complete


def reading():
    return play(pull.reader_step, pull.ReaderState(2), pull.Started(), pull.Granted("o", 2))[0]


def test_a_reader_commits_only_what_was_validated_by_the_process_that_granted_it():
    state, effects = play(pull.reader_step, reading(), pull.ReadDone(1), pull.ReadDone(0))
    assert effects == [pull.PostValidate("o")]
    assert pull.reader_step(state, pull.Valid("other")) == (state, ())
    done, effects = pull.reader_step(state, pull.Valid("o"))
    assert done.phase is pull.ReaderPhase.COMMITTED
    assert effects == (pull.Commit(2), pull.PostRelease())


def test_a_reader_that_fails_keeps_its_pages_until_no_read_is_under_way():
    state, effects = pull.reader_step(reading(), pull.ReadDone(0, failed=True))
    assert not any(isinstance(one, pull.FreeDestination) for one in effects)
    state, effects = pull.reader_step(state, pull.ReadDone(1))
    assert effects == (pull.PostRelease(), pull.FreeDestination())
    assert pull.reader_step(state, pull.Granted("o", 2))[1] == (pull.PostRelease(),)


def test_a_lease_that_has_lapsed_is_never_taken_up_again():
    state, effects = play(pull.owner_step, pull.OwnerState("o"), pull.LeaseAsked(2), pull.Expired())
    assert effects[-1] == pull.Unpin()
    for event in (pull.ValidateArrived("o"), pull.RenewArrived("o")):
        assert pull.owner_step(state, event) == (state, (pull.SayInvalid(),))
    assert isinstance(pull.owner_step(state, pull.LeaseAsked(2))[1][0], pull.SayRefused)


def source(full_pages: int = 2) -> s.SourceState:
    return s.SourceState(ANSWER, 1, full_pages=full_pages)


def test_full_pages_are_copied_in_rounds_until_few_are_left():
    state, effects = play(
        s.step,
        source(full_pages=5),
        s.MigrateAsked(1, "t"),
        s.TargetGranted(1, 1),
        s.Stepped((7,), 8),
        s.RoundDone(1, 0),
        s.Stepped((8,), 9),
        s.RoundDone(1, 1),
    )
    rounds = [one for one in effects if isinstance(one, s.StartRound)]
    assert rounds == [s.StartRound(1, 0, 1, 4), s.StartRound(1, 1, 5, 3)]
    assert effects[-1] == s.StopDecoding()
    assert state.phase is s.Phase.STOPPING


def test_rounds_end_even_if_pages_fill_faster_than_they_are_copied():
    events = [s.MigrateAsked(1, "t"), s.TargetGranted(1, 0)]
    for index in range(MAX_ROUNDS):
        events += [s.Stepped((1,), 10 * (index + 2)), s.RoundDone(1, index)]
    assert play(s.step, source(10), *events)[0].phase is s.Phase.STOPPING


def test_the_capsule_and_the_commit_hold_every_token():
    state, effects = play(
        s.step,
        source(),
        s.Stepped((5,), 2),
        s.ChunkAcknowledged(1),
        s.MigrateAsked(1, "t"),
        s.TargetGranted(1, 2),
        s.Stepped((6, 7), 2),
        s.Stopped(computed=5, num_pages=3, pending_hidden=b"h"),
        s.TargetReady(1, 3),
    )
    capsule = Capsule(ANSWER, (5, 6, 7), 5, 3, 1, b"h")
    assert s.PostCapsule(1, capsule) in effects
    assert capsule.sampling_position == 3
    assert effects[-1] == s.PostCommit(1, 1, "t", 1, (6, 7))
    assert s.step(state, s.Reminded())[1] == (effects[-1],)


def frozen() -> s.SourceState:
    return play(
        s.step,
        source(),
        s.MigrateAsked(1, "t"),
        s.TargetGranted(1, 2),
        s.Stopped(3, 3),
        s.TargetReady(1, 0),
    )[0]


def test_a_frozen_source_goes_on_only_when_the_gateway_has_aborted():
    state, effects = s.step(frozen(), s.TargetFailed(1, "lost"))
    assert state.phase is s.Phase.ABORTING
    assert s.Resume() not in effects
    assert s.step(state, s.Reminded())[1] == (s.PostAbort(1),)
    assert s.Resume() in s.step(state, s.Aborted(1))[1]
    assert s.step(state, s.Committed(1))[1] == (s.Free(),)
    with pytest.raises(InternalError):
        s.step(state, s.Stepped((1,), 2))


@pytest.mark.parametrize("event", [s.GatewayLost(), s.Fenced(2)])
def test_a_source_that_nobody_listens_to_drops_the_answer(event):
    state, effects = s.step(frozen(), event)
    assert state.phase is s.Phase.DISCARDED
    assert effects[-1] == s.Free()


def test_the_first_of_commit_and_abort_wins_for_ever():
    offered, _ = g.step(g.GatewayState("s"), g.MigrationWanted("t"))
    commit = g.CommitAsked(1, 1, "t", 0, (9,))
    committed, effects = g.step(offered, commit)
    assert effects == (g.Deliver(0, (9,)), g.PostCommitted(1), g.PostActivate("t", 1, 2, 1))
    assert g.step(committed, g.AbortAsked(1)) == (committed, (g.PostCommitted(1),))
    assert g.step(committed, commit) == (committed, (g.PostCommitted(1),))
    aborted, _ = g.step(offered, g.AbortAsked(1))
    assert g.step(aborted, commit) == (aborted, (g.PostAborted(1),))


def test_the_gateway_takes_the_next_positions_of_the_current_attempt_only():
    state, effects = g.step(g.GatewayState("s"), g.ChunkArrived(1, 0, (4, 5)))
    assert effects == (g.Deliver(0, (4, 5)), g.Acknowledge(1, 2))
    state, effects = g.step(state, g.ChunkArrived(1, 1, (5, 6)))
    assert effects[0] == g.Deliver(2, (6,))
    assert g.step(state, g.ChunkArrived(1, 5, (9,))) == (state, (g.Acknowledge(1, 3),))
    assert g.step(state, g.ChunkArrived(2, 3, (9,))) == (state, (g.PostFenced(1),))


def test_the_loss_of_the_source_aborts_the_handoff_and_fails_over():
    offered, _ = g.step(g.GatewayState("s"), g.MigrationWanted("t"))
    state, effects = g.step(offered, g.WorkerLost("s"))
    assert effects == (g.AbortTarget("t", 1), g.Failover(2))
    assert g.step(state, g.CommitAsked(1, 1, "t", 0, ()))[1] == (g.PostAborted(1),)


CAPSULE = Capsule(ANSWER, (5,), 3, 2, 2)


def ready() -> t.TargetState:
    return play(
        t.step,
        t.TargetState(),
        t.ReserveArrived(True, 0),
        t.RoundArrived(1),
        t.CapsuleArrived(CAPSULE),
        t.RoundArrived(0),
    )[0]


def test_a_target_starts_only_with_everything_and_at_the_gateways_position():
    assert ready().phase is t.Phase.READY
    state, effects = t.step(ready(), t.ActivateArrived(2, 1))
    assert effects == (t.PostActive(2), t.StartDecoding(2, CAPSULE))
    assert t.step(state, t.ActivateArrived(2, 1)) == (state, (t.PostActive(2),))
    assert t.step(state, t.AbortArrived()) == (state, ())
    assert t.step(ready(), t.ActivateArrived(2, 0))[1] == (t.RefuseActivate(2), t.Release())


@pytest.mark.parametrize("event", [t.AbortArrived(), t.DeadlinePassed(), t.RoundFailed("crc")])
def test_a_target_that_left_says_so_to_whoever_asks(event):
    state, effects = t.step(ready(), event)
    assert effects[-1] == t.Release()
    assert t.step(state, t.ActivateArrived(2, 1))[1] == (t.RefuseActivate(2),)
    assert isinstance(t.step(state, t.CapsuleArrived(CAPSULE))[1][0], t.PostFailed)
    assert isinstance(t.step(state, t.ReserveArrived(True, 0))[1][0], t.PostFailed)
