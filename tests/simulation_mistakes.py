"""Mistakes planted into the mesh, each of which simulated runs have to find.

Some are not here, because nothing in a run can show them: a gateway that takes a repeated position
(a gRPC stream repeats nothing, and each stream starts where the gateway stands), a worker that does
not compare the first token (router and prefill worker cannot disagree without another mistake).
The explicit-state checker has those (``tests/model_checking``).
"""

from pdmesh.decode.leases import Leases
from pdmesh.decode.stepping import Stepping
from pdmesh.decode.worker import DecodeWorker
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.protocol.pull import Valid
from pdmesh.kvtransfer.pull_attempt import PullAttempt
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.sender import Transfer
from pdmesh.router.clients import DecodeClient
from pdmesh.router.run import Run
from pdmesh.router.view import Booking
from pdmesh.simulation import model


def prefill_frees_pages_that_are_still_being_sent(monkeypatch):
    async def finished(self, fin, timeout=60.0):
        self.start_finish(fin)

    monkeypatch.setattr(Transfer, "finished", finished)


def decode_frees_pages_that_a_write_may_still_reach(monkeypatch):
    cancel = TransferReceiver.cancel

    def careless(self, lease_id):
        cancel(self, lease_id)
        return True

    monkeypatch.setattr(TransferReceiver, "cancel", careless)


def checksums_are_not_compared(monkeypatch):
    monkeypatch.setattr(TransferReceiver, "_first_wrong", lambda self, link, write: None)


def leases_are_not_released(monkeypatch):
    async def release(self, lease_id, reason, request_id):
        return None

    monkeypatch.setattr(DecodeClient, "_release", release)


def deadlines_and_idle_leases_end_nothing(monkeypatch):
    monkeypatch.setattr(Leases, "_expire", lambda self, entry, reason: None)


def a_retry_begins_at_its_first_position(monkeypatch):
    monkeypatch.setattr(Run, "offset", property(lambda self: 0))


def a_booking_is_kept_after_a_failure(monkeypatch):
    monkeypatch.setattr(Booking, "give_back", lambda self: None)


def drafts_are_taken_unverified(monkeypatch):
    accept = model.accept

    def trusting(tree, chosen, room, stop_tokens):
        return accept(tree, (*tree.tokens[1:], chosen[-1]), room, stop_tokens)

    monkeypatch.setattr(model, "accept", trusting)


def pulled_pages_are_used_without_asking(monkeypatch):
    async def validate(self):
        self._feed(Valid(self._loan.instance))

    async def renew(self):
        return None

    monkeypatch.setattr(PullAttempt, "_validate", validate)
    monkeypatch.setattr(PullAttempt, "_renew", renew)


def a_pull_that_failed_keeps_its_pages(monkeypatch):
    monkeypatch.setattr(PullAttempt, "_free", lambda self: self.ended.set())


def a_cancelled_sequence_is_freed_under_its_step(monkeypatch):
    let_go = DecodeWorker._let_go

    def hasty(self, entry, why, name="ended_early"):
        let_go(self, entry, why, name)
        if entry.sequence is not None and entry.ended is why and entry.sequence.generated:
            entry.reservation.release()

    monkeypatch.setattr(DecodeWorker, "_let_go", hasty)


def pages_are_shared_before_they_are_full(monkeypatch):
    publish = Stepping._publish
    monkeypatch.setattr(
        Stepping, "_publish", lambda self, sequence, complete: publish(self, sequence, complete + 1)
    )


def answers_do_not_get_a_copy_of_the_last_page(monkeypatch):
    monkeypatch.setattr(LatentStore, "copy_page", lambda self, source, target: None)


FOUND_BY = {
    prefill_frees_pages_that_are_still_being_sent: (0, 23, 35),
    decode_frees_pages_that_a_write_may_still_reach: (1,),
    checksums_are_not_compared: (25, 45),
    leases_are_not_released: (1, 15),
    deadlines_and_idle_leases_end_nothing: (2, 12),
    a_retry_begins_at_its_first_position: (4, 5),
    a_booking_is_kept_after_a_failure: (1, 6, 7),
    drafts_are_taken_unverified: (1,),
    pulled_pages_are_used_without_asking: (19, 79),
    a_pull_that_failed_keeps_its_pages: (4,),
    a_cancelled_sequence_is_freed_under_its_step: (8, 15),
    pages_are_shared_before_they_are_full: (0, 26),
    answers_do_not_get_a_copy_of_the_last_page: (0, 1),
}
"""Each mistake, and seeds that showed it; a change of the mesh may move them."""
