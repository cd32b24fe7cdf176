"""Ranks that hold their own experts only, read from the checkpoint when they are needed."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
import torch
from model_cases import tiny_model
from parallel_rig import a_step, redundant, skewed_model
from safetensors.torch import load_file, save_file
from test_parallel_member import a_member, free_addresses, together
from test_parallel_member import check as check_members

from pdmesh.model.checkpoint import save_checkpoint
from pdmesh.model.expert_source import ModelExperts, StoredExperts
from pdmesh.model.parallel.balancer import BalanceRule
from pdmesh.model.parallel.plans import Plan
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import ConfigError


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint in several files, and the model in memory."""
    folder = tmp_path_factory.mktemp("wide")
    model = skewed_model()
    save_checkpoint(model, folder, max_shard_bytes=200_000)
    return folder, model


def weights(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_read_from_files_as_the_whole_model_has_them(fp8, dtype, tmp_path):
    save_checkpoint(tiny_model(), tmp_path, fp8=fp8, max_shard_bytes=60_000)
    whole = load_model(tmp_path, dtype)
    part = load_model(tmp_path, dtype, experts=False)
    source, memory = StoredExperts(tmp_path, part), ModelExperts(whole)
    for layer in range(3):  # the last is the MTP layer's
        for experts in ((0,), (7, 2, 2, 5), tuple(range(8)), ()):
            for found, wanted in zip(
                source.read(layer, experts), memory.read(layer, experts), strict=True
            ):
                assert found.dtype == dtype
                assert torch.equal(found, wanted)
    source.close()


def test_a_model_without_experts_has_all_other_weights(stored):
    folder, whole = stored
    part = load_model(folder, experts=False)
    assert weights(part) < weights(whole) / 4
    left = part.state_dict()
    for name, tensor in whole.state_dict().items():
        if left[name].shape != tensor.shape:
            assert left[name].shape[0] == 0
            assert name.rpartition(".")[2] in ("gate_up_proj", "down_proj")
        else:
            assert torch.equal(left[name], tensor)


def test_a_checkpoint_that_lacks_an_expert_is_refused_though_experts_are_not_read(tmp_path):
    save_checkpoint(tiny_model(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.experts.7.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"missing model\.layers\.2\.mlp\.experts\.7\.down_proj"):
        load_model(tmp_path, experts=False)


def test_a_checkpoint_that_takes_the_place_of_the_one_that_is_served_changes_nothing(tmp_path):
    save_checkpoint(tiny_model(0), tmp_path)
    part = load_model(tmp_path, experts=False)
    source, memory = StoredExperts(tmp_path, part), ModelExperts(tiny_model(0))
    save_checkpoint(tiny_model(1), tmp_path)
    assert all(
        torch.equal(found, wanted)
        for found, wanted in zip(source.read(1, (3, 1)), memory.read(1, (3, 1)), strict=True)
    )
    (tmp_path / "model.safetensors").unlink()
    source.read(0, (5,))
    source.close()


def test_a_file_that_was_written_over_is_named_and_not_read(tmp_path):
    save_checkpoint(tiny_model(0), tmp_path)
    source = StoredExperts(tmp_path, load_model(tmp_path, experts=False))
    file = tmp_path / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed since it was read"):
        source.read(0, (0,))
    source.close()


class Ranks:
    """Members that read a checkpoint, and what each of them read."""

    def __init__(self, folder, size, **options):
        self.folder, self.addresses, self.options = folder, free_addresses(size), options
        self.read = {rank: [] for rank in range(size)}
        self.members = [self.member(rank) for rank in range(size)]

    def member(self, rank):
        part = load_model(self.folder, experts=False)
        source, told = StoredExperts(self.folder, part), self.read[rank]
        plain = source.read
        source.read = lambda n, experts: (told.append((n, *experts)), plain(n, experts))[1]
        return a_member(part, rank, self.addresses, source=source, **self.options)

    def __enter__(self):
        together([member.start for member in self.members])
        return self

    def __exit__(self, *_):
        for member in self.members:
            member.close()

    def taken(self, rank):
        """(layer, expert) that a rank read since this was asked last."""
        found = [(n, e) for n, *experts in self.read[rank] for e in experts]
        self.read[rank].clear()
        return found


def test_ranks_that_hold_their_experts_only_give_what_one_process_gives_whoever_is_lost(stored):
    folder, model = stored
    with Ranks(folder, 4) as ranks:
        members = ranks.members
        for rank in range(4):
            own = range(64 * rank, 64 * rank + 64)
            assert sorted(ranks.taken(rank)) == [(n, e) for n in range(2) for e in own]
        check_members(members, a_step(model, 4, 1, (5, 0, 1, 9)))
        assert not any(ranks.taken(rank) for rank in range(4))
        members[1].close()
        left = [members[0], *members[2:]]
        check_members(left, a_step(model, 3, 1, (4, 3)))
        lost = [(n, e) for n in range(2) for e in range(64, 128)]
        assert sorted(one for rank in (0, 2, 3) for one in ranks.taken(rank)) == lost
        members[1] = ranks.member(1)
        members[1].start()
        step = a_step(model, 4, 1, (4, 3, 2))
        for _ in range(200):
            check_members(members, step, mtp=False)
            if members[1].members == (0, 1, 2, 3):
                break
        check_members(members, step)
        held = members[1]._holding._built[3].experts
        assert [gate_up.shape[0] for gate_up, _ in held] == [64, 64]
        assert all(moe.gate_up_proj.shape[0] == 0 for moe in moes(members[1]))


def moes(member):
    return [b.mlp for b in member._model.blocks() if hasattr(b.mlp, "gate")]


def test_a_new_plan_is_used_once_all_have_read_it_and_steps_go_on_meanwhile(stored):
    folder, model = stored
    with Ranks(folder, 2, placement=redundant(288, 2), rule=BalanceRule(288)) as ranks:
        first, second = ranks.members
        for rank in range(2):
            ranks.taken(rank)
        step = a_step(model, 2, 1, (5, 9))
        check_members(ranks.members, step)
        wait, slow = threading.Event(), second._holding._builder._source
        plain = slow.read
        slow.read = lambda n, experts: (wait.wait(60), plain(n, experts))[1]
        placement = redundant(288, 2, seed=5)
        plan = Plan(7, 256, placement.layers)
        for member in ranks.members:
            member._meeting._learn(1 - member.place.rank, packed(plan))
        for _ in range(5):
            check_members(ranks.members, step)
        assert (first.plan, second.plan) == (0, 0)
        wait.set()
        for _ in range(200):
            check_members(ranks.members, step)
            if first.plan == second.plan == 7:
                break
        assert (first.plan, second.plan) == (7, 7)
        moves = placement.moves_from(redundant(288, 2))
        for rank in range(2):
            wanted = {(move.layer, move.expert) for move in moves if move.rank == rank}
            assert set(ranks.taken(rank)) == wanted


def packed(plan):
    return msgspec.msgpack.encode(plan)


def test_experts_of_a_plan_that_cannot_be_read_leave_the_old_one_in_use(stored):
    folder, model = stored
    with Ranks(folder, 2, placement=redundant(288, 2)) as ranks:

        def broken(layer, experts):
            raise ConfigError("the file is gone")

        step = a_step(model, 2, 1, (5, 9))
        ranks.members[1]._holding._builder._source.read = broken
        plan = Plan(7, 256, redundant(288, 2, seed=5).layers)
        for member in ranks.members:
            member._meeting._learn(1 - member.place.rank, packed(plan))
        for _ in range(3):
            check_members(ranks.members, step)
        assert [member.plan for member in ranks.members] == [0, 0]
