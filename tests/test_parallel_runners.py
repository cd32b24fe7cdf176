"""The prefill and decode runners on every DP group of an expert-parallel group, in lock-step."""

from functools import partial
from types import SimpleNamespace

import pytest
from model_cases import tokens_of
from parallel_rig import redundant, skewed_model

from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.model.parallel.balancer import Balancer, BalanceRule
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.lockstep import Lockstep
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.model.reference import generate_reference
from pdmesh.model.sampler import SamplingState
from pdmesh.prefill.runner import PrefillRunner, PromptRows
from pdmesh.wire.messages import StreamRequest
from pdmesh.wire.sampling import SamplingParams

PAGE = 16
TOKENS = 12
PARAMS = SamplingParams(max_tokens=TOKENS)
PROMPTS = [[5, 33], [], [17, 2, 40], [1]]
"""Prompt lengths of each DP group; the second has none."""
DRAFTS = (1, 1, 2, 0)


class Group:
    """What a worker of one DP group does with its prompts."""

    def __init__(self, model, prompts, drafts):
        self.prompts = prompts
        pages = -(-(60 + TOKENS) // PAGE)
        store = SimpleNamespace(tensor=model.new_latents(pages * len(prompts), PAGE))
        self.tables = [tuple(range(pages * i, pages * i + pages)) for i in range(len(prompts))]
        self.prefill = PrefillRunner(model, store, PAGE, True, "exact")
        self.decode = DecodeRunner(model, store, PAGE, drafts)
        self.errors = []

    def serve(self):
        """All answers, token by token; a step that broke off is done again."""
        states = [SamplingState(PARAMS, prompt) for prompt in self.prompts]
        chunks = [
            self._chunk(*each) for each in zip(self.prompts, self.tables, states, strict=True)
        ]
        firsts = self._until_it_works(partial(self.prefill.step, chunks))
        each = zip(self.prompts, self.tables, states, firsts, strict=True)
        sequences = [self._sequence(*one) for one in each]
        while running := [s for s in sequences if not s.done]:
            rows = [s.rows() for s in running]
            for s, step in zip(
                running, self._until_it_works(partial(self.decode.step, rows)), strict=True
            ):
                s.apply(step, 0.0)
        return [s.tokens[-TOKENS:] for s in sequences]

    def _until_it_works(self, step):
        while True:
            try:
                return step()
            except RankLost as lost:
                self.errors.append(str(lost))

    def _chunk(self, prompt, table, state):
        length = len(prompt)
        choices = lambda: [state.choice()]  # noqa: E731
        args = (prompt, table, 0, length, 0, 0, True, choices, lambda _: None)
        return PromptRows(*args)

    def _sequence(self, prompt, table, state, result):
        first = result.token_ids[0]
        state.advance((first,))
        request = StreamRequest(
            lease_id="l",
            generation=1,
            request_id="r",
            attempt=1,
            token_ids=tuple(prompt),
            first_token=first,
            sampling=PARAMS,
        )
        return DecodeSequence(
            entry=SimpleNamespace(reservation=SimpleNamespace(page_table=table), ended=None),
            request=request,
            tokens=[*prompt, first],
            computed=len(prompt),
            pending=result.carry.unsqueeze(0),
            sampling=state,
            hashes=[],
        )


def prompts_of(dp):
    return [tokens_of(n, 10 * dp + i) for i, n in enumerate(PROMPTS[dp])]


def alone(prompt):
    return generate_reference(skewed_model(), prompt, TOKENS, arithmetic="exact")


def groups_over(lockstep):
    return [
        Group(lockstep.model(dp), prompts_of(dp), DRAFTS[dp]) if PROMPTS[dp] else None
        for dp in range(4)
    ]


def answers(lockstep, groups):
    return lockstep.run([None if group is None else group.serve for group in groups])


def right(found, but=()):
    for dp, answer in enumerate(found):
        if PROMPTS[dp] and dp not in but:
            assert answer == [alone(prompt) for prompt in prompts_of(dp)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["no_overlap", "microbatch"])
def test_answers_of_all_groups_are_those_of_one_process(tp, mode):
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(4 * tp, tp), redundant(288, 4 * tp), Settings(mode=mode))
    lockstep = Lockstep(ranks, model)
    right(answers(lockstep, groups_over(lockstep)))


def test_experts_move_between_the_steps_of_running_answers():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(4))
    balancer = Balancer(ranks.placement, BalanceRule(288, window=2, min_rows=32, tolerance=1.0))
    moved = []

    def between():
        balancer.observe(ranks.take_load().numpy())
        plan = balancer.proposal()
        if plan is not None:
            moved.append(len(ranks.rebalance(plan)))
            balancer.use(plan)

    lockstep = Lockstep(ranks, model, between)
    right(answers(lockstep, groups_over(lockstep)))
    assert len(moved) >= 5


def test_answers_go_on_when_a_rank_is_lost_whose_group_has_none():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(4), redundant(288, 4), Settings(mode="microbatch"))
    steps = iter(range(1000))

    def between():
        for rank in ranks.lost:
            ranks.exclude(rank, ranks.placement.without({rank}))
        if next(steps) == 6:
            ranks.fail(1, 4)

    lockstep = Lockstep(ranks, model, between)
    groups = groups_over(lockstep)
    right(answers(lockstep, groups))
    assert ranks.members == (0, 2, 3)
    errors = [error for group in groups if group is not None for error in group.errors]
    assert errors
    assert all(error.startswith("rank 1 is lost") for error in errors)


def test_prompts_of_a_lost_group_are_computed_again_by_another():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(4))
    ranks.exclude(2, ranks.placement.without({2}))
    lockstep = Lockstep(ranks, model)
    group = Group(lockstep.model(1), prompts_of(2), 1)
    (found,) = [a for a in lockstep.run([None, group.serve, None, None]) if a is not None]
    assert found == [alone(prompt) for prompt in prompts_of(2)]


def test_an_error_of_one_group_comes_out_and_the_others_are_served_to_the_end():
    model = skewed_model()
    lockstep = Lockstep(VirtualRanks(model, Groups(4)), model)
    groups = groups_over(lockstep)
    served = []

    def fails():
        raise KeyError("the code of a group")

    work = [lambda: served.append(groups[0].serve()), fails, None, None]
    with pytest.raises(KeyError, match="the code of a group"):
        lockstep.run(work)
    assert served == [[alone(prompt) for prompt in prompts_of(0)]]
