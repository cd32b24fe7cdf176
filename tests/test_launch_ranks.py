"""Pools whose workers share the routed experts, as they are asked for on a command line."""

import pytest

from pdmesh.launch.checks import check_together
from pdmesh.launch.processes import worker_spec
from pdmesh.launch.ranks import (
    check_hosts,
    check_rank,
    group_sizes,
    more_places,
    parse_addresses,
    rank_places,
    whole_groups,
)
from pdmesh.launch.topology import Topology
from pdmesh.wire.errors import ConfigError


def asked(**decode):
    return Topology().changed("decode", "--decode-ep", **decode)


def test_a_group_is_as_many_workers_as_it_has_ranks_unless_more_are_asked_for():
    assert whole_groups(asked(ep=8)).decode.workers == 8
    assert whole_groups(asked(ep=2, workers=6)).decode.workers == 6
    assert whole_groups(Topology()) == Topology()
    with pytest.raises(ConfigError, match=r"5 decode workers make no groups of 2 .* multiple of 2"):
        whole_groups(asked(ep=2, workers=5))


def test_ranks_of_one_group_know_each_other_and_no_one_else():
    with rank_places(whole_groups(asked(ep=2, workers=4))) as places:
        pass
    assert sorted(places) == ["decode-0", "decode-1", "decode-2", "decode-3"]
    assert [places[f"decode-{n}"].rank for n in range(4)] == [0, 1, 0, 1]
    assert places["decode-0"].addresses == places["decode-1"].addresses
    assert not set(places["decode-1"].addresses) & set(places["decode-2"].addresses)
    with rank_places(Topology()) as none:
        assert none == {}


def test_a_worker_is_started_with_its_place(tmp_path):
    topology = whole_groups(asked(ep=2))
    with rank_places(topology) as places:
        place = places["decode-1"]
    spec = worker_spec(topology, "decode", "decode-1", tmp_path, 0, place)
    at = spec.arguments.index("--ep-rank")
    assert spec.arguments[at : at + 4] == place.arguments
    assert "--ep-rank" not in worker_spec(topology, "prefill", "p", tmp_path, 0).arguments
    topology = topology.changed("decode", "a file", microbatch_rows=7)
    arguments = worker_spec(topology, "decode", "decode-1", tmp_path, 0, place).arguments
    assert arguments[arguments.index("--microbatch-rows") + 1] == "7"


@pytest.mark.parametrize("ep", [3, 64])
def test_experts_that_cannot_be_shared_evenly_are_refused_with_what_can(ep):
    with pytest.raises(
        ConfigError, match=r"--decode-ep: .* 32 experts evenly; ask for one of 1, 2"
    ):
        check_together(asked(ep=ep))
    check_together(asked(ep=32))


def test_copies_of_experts_count_and_need_a_group():
    check_together(asked(ep=4, redundant_experts=4))
    with pytest.raises(ConfigError, match="32 experts and 2 copies evenly; ask for one of 1"):
        check_together(asked(ep=4, redundant_experts=2))
    with pytest.raises(ConfigError, match="copies of experts only where workers share them"):
        check_together(asked(redundant_experts=2))


def test_a_model_without_experts_shares_none(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    topology = asked(ep=2).changed("model", "--model", path=tmp_path)
    with pytest.raises(ConfigError, match="no routed experts to share; ask for ep = 1"):
        check_together(topology)


def test_ranks_in_one_process_are_asked_for_by_role_and_need_experts_that_divide(tmp_path):
    topology = Topology().changed("decode", "--decode-virtual-ranks", virtual_ranks=16)
    check_together(topology)
    arguments = worker_spec(topology, "decode", "d", tmp_path, 0).arguments
    at = arguments.index("--virtual-ranks")
    assert arguments[at + 1] == "16"
    assert "--virtual-ranks" not in worker_spec(topology, "prefill", "p", tmp_path, 0).arguments
    with pytest.raises(
        ConfigError, match=r"--decode-virtual-ranks: 12 ranks cannot share 32 experts evenly"
    ):
        check_together(topology.changed("decode", "--decode-virtual-ranks", virtual_ranks=12))
    with pytest.raises(ConfigError, match="a group of 2 processes; ask for one of the two"):
        check_together(topology.changed("decode", "--decode-ep", ep=2))


def test_addresses_and_ranks_of_a_worker_that_is_started_by_hand_go_together():
    ranks = parse_addresses("a:1, b:2,")
    assert ranks == ("a:1", "b:2")
    assert check_rank(1, ranks) == 1
    assert check_rank(None, ()) == 0
    for text in ("a", "a:", ":1", "a:x", "a:0", "a:70000"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_addresses(text)
    with pytest.raises(ConfigError, match="say which this is with --ep-rank 0 to 1"):
        check_rank(None, ranks)
    with pytest.raises(ConfigError, match="--ep-rank 0 to 1"):
        check_rank(2, ranks)
    with pytest.raises(ConfigError, match="--ep-rank needs --ep-ranks"):
        check_rank(0, ())


def test_another_group_gets_places_of_its_own():
    topology = whole_groups(asked(ep=2))
    with rank_places(topology) as places:
        taken = {address for place in places.values() for address in place.addresses}
        with more_places(topology, "decode", 5, taken) as more:
            assert {name: place.rank for name, place in more.items()} == {
                "decode-4": 0,
                "decode-5": 1,
            }
            assert not taken & set(more["decode-4"].addresses)
            assert more["decode-4"].addresses == more["decode-5"].addresses
    assert group_sizes(topology) == {"decode": 2}


def test_two_meshes_of_one_machine_have_ranks_at_different_ports():
    topology = whole_groups(asked(ep=8).changed("prefill", "--prefill-ep", ep=2))
    with rank_places(topology) as one, rank_places(topology) as other:
        ports = [{a for place in found.values() for a in place.addresses} for found in (one, other)]
        assert [len(found) for found in ports] == [10, 10]
        assert not ports[0] & ports[1]


def test_a_host_that_is_not_this_one_has_no_port_for_ranks():
    topology = whole_groups(asked(ep=2)).changed("mesh", "--host", host="203.0.113.1")
    with pytest.raises(ConfigError, match=r"free on 203\.0\.113\.1, 2 are needed"):
        rank_places(topology).__enter__()


def test_the_first_of_the_ranks_that_share_heads_leads_and_the_others_follow(tmp_path):
    topology = whole_groups(asked(ep=4, tp=2))
    check_together(topology)
    with rank_places(topology) as places:
        specs = [
            worker_spec(topology, "decode", name, tmp_path, 0, places[name])
            for name in sorted(places)
        ]
    assert [spec.follows for spec in specs] == [False, True, False, True]
    at = specs[1].arguments.index("--tp")
    assert specs[1].arguments[at + 1] == "2"
    assert not worker_spec(topology, "prefill", "p", tmp_path, 0).follows


@pytest.mark.parametrize(
    ("ep", "tp", "sentence"),
    [
        (4, 3, "4 workers that share experts make no groups of 3 .* EP = DP x TP; .* tp = 1, 2, 4"),
        (1, 2, "1 workers that share experts make no groups of 2"),
        (32, 16, "16 workers cannot share 8 attention heads evenly"),
    ],
)
def test_groups_of_heads_that_cannot_be_are_refused_with_what_can(ep, tp, sentence):
    with pytest.raises(ConfigError, match=f"--decode-ep: {sentence}"):
        check_together(asked(ep=ep, tp=tp))


def test_ranks_that_share_heads_are_on_one_host():
    check_hosts(("a:1", "a:2", "b:1", "b:2"), 2)
    check_hosts(("a:1", "b:1"), 1)
    with pytest.raises(ConfigError, match=r"ranks 2 to 3 .* several hosts: b, c; .* on one host"):
        check_hosts(("a:1", "a:2", "b:1", "c:2"), 2)
