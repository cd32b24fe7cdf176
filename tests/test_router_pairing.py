"""Workers that fit no worker of the other role."""

import logging

import msgspec
import router_fakes as fakes

from pdmesh.router.pairing import Pairing, unpaired
from pdmesh.wire.messages import WorkerRecord

OTHER = msgspec.structs.replace(fakes.FORMAT, page_size=16)


def worker(name, role, page_format=fakes.FORMAT):
    return WorkerRecord(
        worker_id=name,
        instance=f"{name}#1",
        role=role,
        address="",
        page_format=page_format,
        model="m",
        vocab_size=1,
        max_context=1,
        capacity_pages=1,
    )


P, D, STRANGER = worker("p", "prefill"), worker("d", "decode"), worker("x", "decode", OTHER)


def test_only_who_fits_nobody_of_the_other_role_is_named_with_one_of_them():
    assert unpaired([P, D]) == []
    assert unpaired([P, D, STRANGER]) == [(STRANGER, P)]
    assert unpaired([P, STRANGER]) == [(P, STRANGER), (STRANGER, P)]


def test_nobody_is_to_blame_while_a_role_is_missing():
    assert unpaired([STRANGER, D]) == []


def test_it_is_said_once_of_each_instance_and_again_of_the_next(caplog):
    caplog.set_level(logging.WARNING)
    pairing = Pairing()
    for records in ([P, D, STRANGER], [P, D, STRANGER], [P, D], [P, D, STRANGER]):
        pairing.look(records)
    assert [record.getMessage() for record in caplog.records] == ["worker_unpaired"] * 2
    for record in caplog.records:
        assert record.fields["worker"] == "x"
        assert record.fields["reason"].startswith("page_size is 16 here and")
