"""What ``pdmesh status`` says of routers, of workers that are not ready, and of shared experts."""

import json
from pathlib import Path

import pytest

from pdmesh.launch.processes import Child, Spec
from pdmesh.launch.restart import Death
from pdmesh.launch.runtime import HolderInfo
from pdmesh.launch.status import Besides, WorkerLine, as_json, as_table, with_not_ready
from pdmesh.launch.supervisor import holders_info, not_ready
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PoolStatus, RankStatus, WorkerStatus

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)
POOL = PoolStatus(total=8, free=5, reserved=0, used=1, cached=2, quarantined=0)


def rank(number, size, members, heads=()):
    counts = {"steps": 9, "repeated": 1, "sent_bytes": 70}
    return RankStatus(rank=number, size=size, members=members, heads=heads, **counts)


def worker(name, ranks=None, problems=(), answers=True, transports=(), step_limit=0):
    role = name.partition("-")[0]
    status = WorkerStatus(
        worker_id=name,
        instance="i",
        role=role,
        state="ready",
        page_format=FORMAT,
        pool=POOL,
        queued=0,
        running=1,
        transports=transports,
        step_limit=step_limit,
        ranks=ranks,
        problems=problems,
    )
    return WorkerLine(name, role, "ready", "a:1", "i", 1, "tiny", "", status if answers else None)


def shown(*lines):
    """The column of ranks, row by row, and what is written below the table."""
    told = as_table("default", Besides(), list(lines)).splitlines()
    table, below = told[1 : len(lines) + 2], told[len(lines) + 2 :]
    start, end = table[0].index("rank"), table[0].index("address")
    return [row[start:end].strip() for row in table[1:]], below


def test_the_most_that_a_step_computes_is_shown_in_what_it_is_counted_by():
    lines = [
        worker("prefill-0", step_limit=4096),
        worker("decode-0", step_limit=64),
        worker("decode-1"),
        worker("decode-2", answers=False),
    ]
    table = as_table("default", Besides(), lines).splitlines()[1:]
    start, end = table[0].index("step, at most"), table[0].index("queued")
    assert [row[start:end].strip() for row in table[1:]] == ["4096 tokens", "64 seqs", "-", ""]
    assert (
        json.loads(as_json("default", Besides(), lines))["workers"][0]["status"]["step_limit"]
        == 4096
    )


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (rank(1, 2, (0, 1)), "1 of 2, with 0"),
        (rank(0, 4, (0, 1, 2, 3)), "0 of 4, with 1, 2, 3"),
        (rank(2, 4, (0, 1, 2, 3), (2, 3)), "2 of 4, with 0, 1, 3; heads with 3"),
    ],
)
def test_a_worker_shows_its_rank_and_whom_it_computes_with(ranks, said):
    assert shown(worker("decode-0", ranks)) == ([said], [])


@pytest.mark.parametrize(
    ("ranks", "said", "sentence"),
    [
        (rank(1, 2, (1,)), "1 of 2, alone", "computes without rank 0 of its group of 2"),
        (rank(2, 4, (0, 2)), "2 of 4, with 0", "computes without ranks 1, 3 of its group of 4"),
        (rank(0, 2, ()), "0 of 2, alone", "computes without rank 1 of its group of 2"),
    ],
)
def test_ranks_that_a_worker_computes_without_are_named_below_the_table(ranks, said, sentence):
    lines = worker("decode-0", rank(0, 1, (0,))), worker("decode-1", ranks, ("a page is lost",))
    assert shown(*lines) == (
        ["0 of 1, alone", said],
        [f"decode-1: {sentence}", "decode-1: a page is lost"],
    )


def test_workers_without_ranks_or_an_answer_have_none_beside_those_that_do():
    lines = worker("prefill-0"), worker("decode-0", rank(0, 2, (0, 1))), worker("decode-1")
    assert shown(*lines) == (["-", "0 of 2, with 1", "-"], [])
    silent = worker("decode-1", answers=False)
    assert shown(worker("decode-0", rank(0, 2, (0, 1))), silent)[0] == ["0 of 2, with 1", "-"]


def test_a_mesh_in_which_nobody_shares_experts_has_no_column_for_it():
    table = as_table("default", Besides(), [worker("prefill-0"), worker("decode-0")])
    assert table.splitlines()[1].split()[:3] == ["worker", "state", "address"]


def test_the_ways_that_pages_go_are_shown():
    lines = worker("prefill-0"), worker("decode-0", transports=("cuda_ipc", "tcp"))
    table = as_table("default", Besides(), list(lines)).splitlines()
    start = table[1].index("pages over")
    assert [row[start:].split()[0] for row in table[2:]] == ["-", "cuda_ipc,tcp"]


def test_json_has_the_place_of_each_worker_that_has_one():
    lines = [worker("prefill-0"), worker("decode-0", rank(1, 2, (0, 1)))]
    alone, member = json.loads(as_json("default", Besides(), lines))["workers"]
    assert "ranks" not in alone["status"]
    assert member["status"]["ranks"] == {
        "rank": 1,
        "size": 2,
        "members": [0, 1],
        "steps": 9,
        "repeated": 1,
        "sent_bytes": 70,
        "plan": 0,
        "virtual": False,
        "heads": [],
    }


def test_a_worker_that_starts_again_has_a_line_though_it_has_no_lease():
    lines = with_not_ready([worker("decode-0")], {"decode-1": "restarting"})
    assert [(line.worker, line.role, line.state) for line in lines] == [
        ("decode-0", "decode", "ready"),
        ("decode-1", "decode", "restarting"),
    ]
    row = as_table("default", Besides(), lines).splitlines()[-1]
    assert row.split() == ["decode-1", "restarting", "-", "no", "answer", "-"]
    assert json.loads(as_json("default", Besides(), lines))["workers"][1]["status"] is None


def test_a_lease_that_has_outlived_its_process_is_not_called_ready():
    silent, talks = worker("decode-0", answers=False), worker("decode-1")
    told = dict.fromkeys(("decode-0", "decode-1"), "restarting")
    states = [line.state for line in with_not_ready([silent, talks], told)]
    assert states == ["restarting", "ready"]


def test_a_supervisor_says_which_workers_are_not_ready_and_why():
    def child(name, **fields):
        return Child(Spec(name, "decode", (), 1), Path("log"), **fields)

    workers = [
        child("decode-0"),
        child("decode-1", deaths=[Death(1.0, True)]),
        child("decode-2", deaths=[Death(1.0, True)], given_up=True),
    ]
    assert not_ready({worker.spec.name: worker for worker in workers}) == {
        "decode-0": "starting",
        "decode-1": "restarting",
        "decode-2": "given up",
    }


def test_routers_are_named_with_their_metrics():
    besides = Besides(("a:1", "a:2"), ("a:9100", "a:9101"))
    title = as_table("default", besides, []).splitlines()[0]
    assert title == "mesh default at a:1, a:2 (metrics at a:9100, a:9101): 0 workers"
    assert json.loads(as_json("default", besides, []))["router_metrics"] == ["a:9100", "a:9101"]


def test_the_processes_that_hold_weights_are_named_below_the_workers():
    def holder(index, state):
        name, device = f"weights-{index}", f"cuda:{index}"
        return HolderInfo(
            name=name, device=device, precision="auto", socket=f"/run/{name}.sock", state=state
        )

    besides = Besides(holders=[holder(0, "ready"), holder(1, "restarting")])
    assert as_table("default", besides, [worker("decode-0")]).splitlines()[-2:] == [
        "  weights-0: ready, one copy for the workers on cuda:0",
        "  weights-1: restarting, one copy for the workers on cuda:1",
    ]
    first, _ = json.loads(as_json("default", besides, []))["weights"]
    assert (first["device"], first["socket"]) == ("cuda:0", "/run/weights-0.sock")


def test_a_supervisor_says_where_weights_are_offered():
    spec = Spec("weights", "weights", (), 1, socket=Path("/run/weights.sock"))
    (told,) = holders_info({"cpu": Child(spec, Path("log"))}, "auto")
    assert (told.name, told.device, told.socket) == ("weights", "cpu", "/run/weights.sock")
    assert (told.state, told.precision) == ("starting", "auto")
