"""Mistakes planted into the mesh, each of which simulated runs have to find."""

from pdmesh.decode.leases import Leases
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


MISTAKES = [
    prefill_frees_pages_that_are_still_being_sent,
    decode_frees_pages_that_a_write_may_still_reach,
    checksums_are_not_compared,
    leases_are_not_released,
    deadlines_and_idle_leases_end_nothing,
    a_retry_begins_at_its_first_position,
    a_booking_is_kept_after_a_failure,
    drafts_are_taken_unverified,
]
