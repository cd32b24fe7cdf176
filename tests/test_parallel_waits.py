"""Waits of the exchange over symmetric memory once a rank is lost: they end, and harm nobody."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these kernels run in Triton's interpreter here", allow_module_level=True)

import put_in_process  # noqa: E402
import triton.language as tl  # noqa: E402
from symmetric_rig import Group, channel, inputs, layout_differs  # noqa: E402

from pdmesh.kernels.expert_exchange import ExchangeSize  # noqa: E402
from pdmesh.kernels.triton import ep_wait  # noqa: E402
from pdmesh.model.parallel.exchange import RankLost  # noqa: E402
from pdmesh.model.parallel.placement import Placement  # noqa: E402

EXPERTS, TOP, RANKS = 6, 3, 3
LOOK, LONG = 4, 20
"""Polls from look to look, and those that a wait may take: then it names whoever has not sent."""
ENDED = ["look", "look"]
"""Of a wait that ended at its first look: that one, and the one before it names anybody."""


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    """Looks at who is lost; what is called at each."""
    seen, named = Looks(), ep_wait._named

    def look(*given):
        seen.append("look")
        seen.then()
        return named(*given)

    monkeypatch.setattr(ep_wait, "_named", look)
    monkeypatch.setattr(ep_wait, "LOOK", tl.constexpr(LOOK))
    return seen


class Looks(list):
    def then(self):
        """Nothing happens meanwhile."""


@pytest.fixture
def data():
    return inputs(sized(), (5,) * RANKS, "balanced", EXPERTS, 1)


def sized():
    return ExchangeSize(RANKS, EXPERTS, 5, 128, TOP, 24)


def a_group(**more):
    return Group(Placement.even(1, EXPERTS, RANKS), sized(), timeout_s=LONG, **more)


def named(end):
    return [rank for rank, flag in enumerate(end._lost[:-1].tolist()) if flag]


def sent(group, data, ranks):
    rows, ids, _ = data
    return {r: group.ends[r].dispatch_send(channel(1), 0, rows[r], ids[r]) for r in ranks}


def again(group, data, rank):
    """What follows in a step that is under way, where the host looks at nothing."""
    rows, ids, _ = data
    end = group.ends[rank]
    end.lanes[0].send_rows(rows[rank], ids[rank], end._tables[0])


def tag(group, at, of):
    """The number of the last exchange that `at` has been told of."""
    lane = group.ends[at].lanes[0]
    tags = lane._view(lane._tags)[: 2 * RANKS * 8].view(torch.int64).view(2, RANKS)
    return int((tags[:, of] >> 32).max())


def test_a_wait_for_rows_ends_at_once_when_the_host_knows_of_a_loss_and_names_nobody_else(
    data, looks
):
    group = a_group()
    handle = sent(group, data, [0])[0]
    group.ends[0].lose(1)
    group.ends[0].dispatch_recv(handle)
    assert looks == ENDED
    assert named(group.ends[0]) == [1]
    with pytest.raises(RankLost, match="rank 1 is lost"):
        group.ends[0].check()


def test_a_wait_under_way_ends_when_the_host_learns_of_a_loss(data, looks):
    group = a_group()
    handle = sent(group, data, [0])[0]
    looks.then = lambda: group.ends[0].lose(1) if len(looks) == 2 else None
    group.ends[0].dispatch_recv(handle)
    assert looks == ["look", *ENDED]
    assert named(group.ends[0]) == [1]


def test_a_wait_for_outputs_ends_at_once_too(data, looks):
    group = a_group()
    handle = sent(group, data, range(RANKS))[0]
    received = group.ends[0].dispatch_recv(handle)
    back = group.ends[0].combine_send(handle, received, received.made.zero_())
    group.ends[0].lose(2)
    group.ends[0].combine_recv(back, data[2][0])
    assert looks == ENDED
    assert named(group.ends[0]) == [2]


def test_all_waits_that_follow_the_one_that_ran_out_end_at_once_and_name_nobody_else(data, looks):
    group = a_group()
    handles = sent(group, data, [0, 2])
    group.ends[0].dispatch_recv(handles[0])
    assert named(group.ends[0]) == [1]
    assert len(looks) == LONG // LOOK + 1
    lane = group.ends[0].lanes[0]
    for _ in range(2):
        again(group, data, 0)
        for wait in (lane.receive_rows, lane.wait_outputs):
            looks.clear()
            wait()
            assert looks == ENDED
    assert named(group.ends[0]) == [1]


def test_a_wait_that_finds_everything_there_is_as_ever_whoever_is_lost(data, looks):
    group = a_group()
    handles = sent(group, data, range(RANKS))
    group.ends[0].lose(1)
    received = {rank: end.dispatch_recv(handles[rank]) for rank, end in enumerate(group.ends)}
    for rank in range(RANKS):
        want, _ = group.expected(*data, rank)
        assert layout_differs(received[rank].arrived, want) is None
    assert not looks
    again(group, data, 0)
    assert tag(group, 2, 0) == 2
    with pytest.raises(RankLost, match="rank 1 is lost"):
        group.ends[0].check()


def test_a_rank_that_has_given_a_wait_up_tells_nobody_anything_until_it_is_reset(data):
    group = a_group()
    handles = sent(group, data, [0, 2])
    group.ends[0].lose(1)
    group.ends[0].dispatch_recv(handles[0])
    for _ in range(3):
        again(group, data, 0)
    assert tag(group, 2, 0) == 1
    for end in group.ends:
        end.reset(range(RANKS))
    group.check(*data)


def test_nor_does_it_put_anything(data, monkeypatch):
    group = a_group(mapped=lambda rank: (rank,))
    puts = put_in_process.install(monkeypatch, group.heaps)
    handles = sent(group, data, [0, 2])
    group.ends[0].lose(1)
    group.ends[0].dispatch_recv(handles[0])
    calls = puts.calls
    again(group, data, 0)
    assert (puts.calls, tag(group, 2, 0)) == (calls, 1)
    again(group, data, 2)
    assert puts.calls > calls
