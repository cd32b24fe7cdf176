"""The protocols with one mistake each: the checker has to find every one of them."""

from __future__ import annotations

from dataclasses import replace

from model_checking import migrate, pulls, push, reserve
from model_checking.explorer import Model
from pdmesh.kvtransfer.protocol import migration_gateway, migration_source, migration_target, pull
from pdmesh.kvtransfer.protocol import receiver as r
from pdmesh.kvtransfer.protocol import sender as s


def receiver_with_a_timer(state: r.ReceiverState, event: r.Event) -> r.Step:
    """A reminder is taken for the end of the quarantine."""
    if isinstance(event, r.Reminded) and state.phase is r.Phase.QUARANTINED:
        return replace(state, phase=r.Phase.FREE), (r.Free(),)
    return r.step(state, event)


def receiver_without_quarantine(state: r.ReceiverState, event: r.Event) -> r.Step:
    """A deadline gives the pages back although writes may be on their way."""
    after, effects = r.step(state, event)
    if isinstance(event, r.Cancelled) and after.phase is r.Phase.QUARANTINED:
        return replace(after, phase=r.Phase.FREE), (*effects, r.Free())
    return after, effects


def sender_that_drains_too_early(state: s.SenderState, event: s.Event) -> s.Step:
    """DRAINED is said as soon as the abort is, with writes under way."""
    after, effects = s.step(state, event)
    if after.phase is s.Phase.DRAINING and state.phase is not after.phase:
        return replace(after, phase=s.Phase.DRAINED), (*effects, s.PostDrained())
    return after, effects


def sender_without_tombstone(state: s.SenderState, event: s.Event) -> s.Step:
    """A grant that comes after the abort is used."""
    if isinstance(event, s.Granted) and state.phase is s.Phase.DRAINED:
        return replace(state, phase=s.Phase.GRANTED), ()
    return s.step(state, event)


def sender_that_skips_an_empty_fin(state: s.SenderState, event: s.Event) -> s.Step:
    """No page was sent, so nothing is said."""
    after, effects = s.step(state, event)
    if state.num_writes == 0:
        effects = tuple(one for one in effects if not isinstance(one, s.PostFin))
    return after, effects


def reader_that_does_not_validate(
    state: pull.ReaderState, event: pull.ReaderEvent
) -> pull.ReaderStep:
    """What was read is taken over at once."""
    after, effects = pull.reader_step(state, event)
    if after.phase is pull.ReaderPhase.VALIDATING and state.phase is not after.phase:
        return pull.reader_step(after, pull.Valid(after.instance))
    return after, effects


def reader_that_frees_too_early(
    state: pull.ReaderState, event: pull.ReaderEvent
) -> pull.ReaderStep:
    """A failed reader gives its pages back with reads under way."""
    after, effects = pull.reader_step(state, event)
    if after.phase is pull.ReaderPhase.DRAINING and state.phase is not after.phase:
        done = replace(after, phase=pull.ReaderPhase.FAILED)
        return done, (*effects, pull.PostRelease(), pull.FreeDestination())
    return after, effects


def owner_that_knows_no_process(state: pull.OwnerState, event: pull.OwnerEvent) -> pull.OwnerStep:
    """VALIDATE of a lease of an earlier process is answered like one of this process."""
    if isinstance(event, pull.ValidateArrived):
        after, effects = pull.owner_step(state, pull.ValidateArrived(state.instance))
        said = tuple(
            pull.SayValid(event.instance) if isinstance(one, pull.SayValid) else one
            for one in effects
        )
        return after, said
    return pull.owner_step(state, event)


def source_without_tail(
    state: migration_source.SourceState, event: migration_source.Event
) -> migration_source.Step:
    """COMMIT carries no tokens: those on their way are fenced, and lost."""
    after, effects = migration_source.step(state, event)
    return after, tuple(
        replace(one, tail=()) if isinstance(one, migration_source.PostCommit) else one
        for one in effects
    )


def target_that_does_not_compare(
    state: migration_target.TargetState, event: migration_target.Event
) -> migration_target.Step:
    """It starts at its own position, wherever the gateway is."""
    if isinstance(event, migration_target.ActivateArrived) and state.capsule is not None:
        event = replace(event, position=len(state.capsule.output))
    return migration_target.step(state, event)


def gateway_that_takes_any_attempt(
    state: migration_gateway.GatewayState, event: migration_gateway.Event
) -> migration_gateway.Step:
    """A commit is not compared with the decision that stands."""
    if isinstance(event, migration_gateway.CommitAsked) and not state.ended:
        reopened = replace(state, decision=migration_gateway.Decision.OPEN, attempt=event.attempt)
        return migration_gateway.step(reopened, event)
    return migration_gateway.step(state, event)


_PUSH = push.Bounds(symmetry=False)
_CRASH = push.Bounds(attempts=1, crashes=1, symmetry=False)

MISTAKES: dict[str, Model] = {
    "release on a timer": push.PushModel(_PUSH, push.Rules(receiver=receiver_with_a_timer)),
    "release at a deadline": push.PushModel(
        _PUSH, push.Rules(receiver=receiver_without_quarantine)
    ),
    "acknowledgement before drain": push.PushModel(
        _PUSH, push.Rules(sender=sender_that_drains_too_early)
    ),
    "no tombstone for a late grant": push.PushModel(
        _PUSH, push.Rules(sender=sender_without_tombstone)
    ),
    "one counter for two attempts": push.PushModel(
        push.Bounds(pool=4, symmetry=False), push.Rules(shared_counter=True)
    ),
    "no FIN for no pages": push.PushModel(
        push.Bounds(pages=0, attempts=1, symmetry=False),
        push.Rules(sender=sender_that_skips_an_empty_fin),
    ),
    "pull without validation": pulls.PullModel(
        pulls.Bounds(attempts=1), pulls.Rules(reader=reader_that_does_not_validate)
    ),
    "a reader's pages free under a read": pulls.PullModel(
        pulls.Bounds(), pulls.Rules(reader=reader_that_frees_too_early)
    ),
    "validation by another process": pulls.PullModel(
        pulls.Bounds(attempts=1, duplicates=1, crashes=1),
        pulls.Rules(owner=owner_that_knows_no_process),
    ),
    "prefill pages before decode pages": reserve.ReserveModel(
        rules=reserve.Rules(decode_first=False)
    ),
    "reservation page by page": reserve.ReserveModel(decode=2, rules=reserve.Rules(at_once=False)),
    "commit by timeout": migrate.MigrateModel(
        migrate.Bounds(tokens=2), migrate.Rules(timeout=True)
    ),
    "no tokens in COMMIT": migrate.MigrateModel(
        migrate.Bounds(),
        migrate.Rules(source=source_without_tail, target=target_that_does_not_compare),
    ),
    "no comparison at commit": migrate.MigrateModel(
        migrate.Bounds(tokens=2), migrate.Rules(gateway=gateway_that_takes_any_attempt)
    ),
}
