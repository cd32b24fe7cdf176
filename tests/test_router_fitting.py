"""Costs that are fitted to what a router measures: to made-up workers whose costs are known."""

import random
from dataclasses import replace

import msgspec
import pytest
import router_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_policies import choose, names, prefill

from pdmesh.launch.explain import as_text
from pdmesh.router.chooser import Chooser
from pdmesh.router.policies import POLICY_NAMES, Costs
from pdmesh.router.policies.costs import Link
from pdmesh.router.policies.fitting import GAP_S, LEAST, WINDOW, Fit
from pdmesh.router.policies.measured import MOST_OFF, FittedCosts
from pdmesh.router.policies.priced import Priced
from pdmesh.wire.messages import PoolStatus, WorkerStatus

TRUE = [(0.3, 2e-5, 5.0), (5.0, 0.0, 0.0), (0.02, 1e-6, 30.0), (1.0, 0.0, 0.0)]
PRIOR = (1.0, 0.0, 0.0)


def features(rng):
    """Tokens, pairs of tokens and a constant, of a prompt of which some is cached."""
    tokens = rng.randint(64, 8000)
    cached = rng.choice([0, 0, rng.randint(0, tokens - 1)])
    return tokens - cached, float(tokens * tokens - cached * cached), 1.0


def time_of(coefficients, row):
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def taught(true, rng, count=100, noise=0.0, wrong=0.0, fit=None, start=0.0):
    """A fit that has seen so many prompts; a share of the times is far too long."""
    fit = fit or Fit(PRIOR)
    for i in range(count):
        row = features(rng)
        ms = time_of(true, row) * rng.lognormvariate(0.0, noise)
        if rng.random() < wrong:
            ms *= rng.choice([10, 1000])
        assert fit.note(row, ms, start + i)
    assert fit.refit()
    return fit


def off(fit, true):
    """The largest relative error for prompts of all kinds."""
    rng = random.Random(99)
    rows = [features(rng) for _ in range(200)]
    return max(abs(time_of(fit.coefficients, r) / time_of(true, r) - 1) for r in rows)


# ---- one fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("true", TRUE)
def test_times_without_noise_are_learnt(true):
    assert off(taught(true, random.Random(1)), true) < 0.02


@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("seed", range(3))
def test_one_time_in_five_that_is_far_too_long_changes_little(true, seed):
    """A process that stood still, or a machine that did."""
    assert off(taught(true, random.Random(seed), wrong=0.2), true) < 0.05


@pytest.mark.parametrize("true", TRUE)
def test_noise_of_a_tenth_is_averaged_out(true):
    """Every kind of prompt within the noise; the usual one much closer."""
    fit = taught(true, random.Random(5), noise=0.1, wrong=0.1)
    assert off(fit, true) < 0.3
    usual = (2000, 4e6, 1.0)
    assert time_of(fit.coefficients, usual) == pytest.approx(time_of(true, usual), rel=0.08)


def test_the_prior_stands_until_there_are_enough_samples():
    fit, rng = Fit((2.0, 1e-4, 3.0)), random.Random(0)
    for i in range(LEAST - 1):
        assert fit.note(features(rng), 1.0, float(i))
        assert not fit.refit()
        assert fit.coefficients == (2.0, 1e-4, 3.0)
    assert fit.note(features(rng), 1.0, 99.0)
    assert fit.refit()
    assert fit.coefficients != (2.0, 1e-4, 3.0)
    assert not fit.refit(), "nothing new"


def test_samples_that_are_all_alike_leave_the_proportions_of_the_prior():
    fit = Fit((1.0, 1e-4, 10.0))
    row = (1000, 1e6, 1.0)
    for i in range(20):
        fit.note(row, 3 * time_of(fit.prior, row), float(i))
    fit.refit()
    assert fit.coefficients == pytest.approx((3.0, 3e-4, 30.0), rel=1e-6)
    assert fit.scale == pytest.approx(3.0)


def test_workers_that_have_changed_are_followed_within_a_window():
    rng = random.Random(2)
    fit = taught(TRUE[0], rng, noise=0.05)
    for start, true in ((1000.0, TRUE[1]), (2000.0, TRUE[2])):
        taught(true, rng, count=WINDOW, fit=fit, start=start)
        assert off(fit, true) < 0.02


def test_a_burst_is_one_sample_and_times_that_are_none_are_refused():
    fit = Fit(PRIOR)
    assert fit.note((1, 1.0, 1.0), 5.0, 0.0)
    assert not fit.note((1, 1.0, 1.0), 5.0, GAP_S / 2)
    for ms in (0.0, -1.0, float("nan"), float("inf"), 1e300):
        assert not fit.note((1, 1.0, 1.0), ms, 10.0)
    assert not fit.note((0, 0.0, 0.0), 5.0, 10.0)
    assert fit.seen == 1


def test_a_constant_of_which_nothing_is_known_takes_what_the_others_leave():
    fit = Fit((0.0, 0.5, 0.0), free=0)
    for i in range(20):
        fit.note((1.0, 1, 640), 20.0, float(i))  # one sequence, always
    fit.refit()
    assert time_of(fit.coefficients, (1.0, 1, 640)) == pytest.approx(20.0, rel=0.01)
    assert fit.coefficients[1] == pytest.approx(0.5, rel=0.2)


ROWS = st.tuples(st.integers(0, 9000), st.floats(0, 1e9), st.sampled_from([0.0, 1.0]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(ROWS, st.floats(1e-9, 1e9)), min_size=LEAST, max_size=40))
def test_whatever_is_measured_no_coefficient_is_negative_or_no_number(samples):
    one, two = Fit(PRIOR), Fit(PRIOR)
    for fit in (one, two):
        for i, (row, ms) in enumerate(samples):
            fit.note(row, ms, float(i))
        fit.refit()
    assert all(0 <= c < 1e12 for c in one.coefficients)
    assert one.coefficients == two.coefficients, "the same samples give the same"


# ---- all costs ----------------------------------------------------------------------------


def learnt(fitted, rng, true=TRUE[0], **rest):
    for i in range(60):
        row = features(rng)
        tokens, cached = _tokens(row)
        fitted.note_prefill(tokens, cached, time_of(true, row), float(i), **rest)
    return fitted.refit()


def _tokens(row):
    """(L, c) of L - c and L^2 - c^2."""
    total = row[1] / row[0]
    return round((total + row[0]) / 2), round((total - row[0]) / 2)


def test_fitted_costs_keep_the_proportions_of_what_is_not_measured():
    fitted = FittedCosts(Costs())
    assert fitted.costs == Costs()
    assert learnt(fitted, random.Random(1))
    costs, scale = fitted.costs, fitted.prefill.scale
    assert costs.token_ms == pytest.approx(0.3, rel=0.02)
    assert costs.pair_ms == pytest.approx(2e-5, rel=0.05)
    assert costs.elsewhere.token_ms == pytest.approx(0.1 * scale)
    assert costs.push == (costs.same_host, costs.same_rack, costs.elsewhere)
    assert costs.sequence_ms == pytest.approx(64 * scale)
    assert (costs.beta, costs.kappa, costs.routers) == (0.8, 0.3, 1)
    assert not fitted.refit()


def test_workers_that_are_only_faster_than_assumed_change_no_choice():
    rng, fitted = random.Random(4), FittedCosts(Costs())
    learnt(fitted, rng, (0.1, 0.0, 0.0))
    for seed in range(60):
        workers = [
            prefill(f"p{i}", owned_pages=rng.randint(0, 9), own_tokens=rng.randint(0, 2000))
            for i in range(4)
        ]
        one = choose(Priced(Costs(beta=0.0)), workers, seed=seed)
        two = choose(Priced(replace(fitted.costs, beta=0.0)), workers, seed=seed)
        assert names(one) == names(two)


def test_times_that_were_shared_count_only_while_there_are_no_others():
    shared, rng = FittedCosts(Costs()), random.Random(1)
    learnt(shared, rng, (3.0, 0.0, 0.0), alone=False)
    assert shared.costs.token_ms == pytest.approx(3.0, rel=0.01)
    both = FittedCosts(Costs())
    learnt(both, rng)
    seen = both.samples["prefill"]
    both.note_prefill(1000, 0, 1e5, 1e6, alone=False)
    assert both.samples["prefill"] == seen


def status(instance="d", *, tokens=0, step_ms=0.0, running=1, used=10, role="decode"):
    pool = PoolStatus(total=99, free=99 - used, reserved=0, used=used, cached=0, quarantined=0)
    return WorkerStatus(
        worker_id=instance,
        instance=instance,
        role=role,
        state="ready",
        page_format=fakes.FORMAT,
        pool=pool,
        queued=0,
        running=running,
        tokens_generated=tokens,
        step_ms=step_ms,
    )


def stepping(fitted, rng, true=(12.0, 1.5, 0.002), count=200):
    """Polls of two workers whose batches change now and then."""
    tokens = {"a": 0, "b": 0}
    batches = dict.fromkeys(tokens, (1, 10))
    for i in range(count):
        said = []
        for name in tokens:
            if rng.random() < 0.3:
                batches[name] = rng.randint(0, 16), rng.randint(1, 90)
            running, used = batches[name]
            tokens[name] += 20 * running
            step = time_of(true, (1.0, running, used * 64))
            said.append(status(name, tokens=tokens[name], step_ms=step, running=running, used=used))
        fitted.note_statuses(said, float(i))
    return fitted.refit()


def test_the_time_of_a_step_is_learnt_from_what_workers_say():
    fitted = FittedCosts(Costs())
    for _ in range(300):
        fitted.note_answer(50)
    assert stepping(fitted, random.Random(3))
    costs = fitted.costs
    assert costs.itl_base_ms == pytest.approx(12.0, rel=0.05)
    assert costs.itl_sequence_ms == pytest.approx(1.5, rel=0.05)
    assert costs.itl_context_ms == pytest.approx(0.002, rel=0.05)
    assert costs.sequence_ms == pytest.approx(50 * 1.5, rel=0.06)
    assert costs.context_ms == pytest.approx(50 * 0.002, rel=0.06)


def test_a_step_time_counts_only_where_the_batch_has_stood_for_a_while():
    fitted = FittedCosts(Costs())
    fitted.note_statuses([status(step_ms=50.0, running=0)], 0.0)
    fitted.note_statuses([status(tokens=100, step_ms=50.0, running=4)], 1.0)
    fitted.note_statuses([status(tokens=120, step_ms=50.0, running=4)], 2.0)
    fitted.note_statuses([status(tokens=130, step_ms=50.0, running=3)], 3.0)
    fitted.note_statuses([status("p", tokens=1000, step_ms=1.0, role="prefill")] * 2, 4.0)
    assert fitted.samples["step"] == 0
    fitted.note_statuses([status(tokens=150, step_ms=50.0, running=4)], 5.0)
    fitted.note_statuses([status(tokens=170, step_ms=50.0, running=4)], 6.0)
    fitted.note_statuses([status(tokens=190, step_ms=50.0, running=4)], 7.0)
    assert fitted.samples["step"] == 1


def test_a_batch_that_never_changes_takes_no_sequence_its_price():
    """Nothing was seen of what one more would cost."""
    fitted = FittedCosts(Costs())
    for i in range(60):
        fitted.note_statuses([status(tokens=100 * i, step_ms=20.0)], float(i))
    assert fitted.refit()
    assert Costs().sequence_ms / MOST_OFF <= fitted.costs.sequence_ms
    assert fitted.costs.sequence_ms <= Costs().sequence_ms * MOST_OFF


def test_a_hand_over_is_learnt_for_each_distance_and_never_cheaper_from_farther():
    rng = random.Random(1)
    racks = {"a": "r", "b": "r"}
    fitted = FittedCosts(Costs(racks=racks))

    def at(host, role):
        return msgspec.structs.replace(prefill("x", host).record, role=role)

    for i in range(30):
        tokens = 64 * rng.randint(0, 60)
        for other, link in (("a", Link(2.0, 0.02)), ("b", Link(1.0, 0.05))):
            ms = link.hop_ms + link.token_ms * tokens
            fitted.note_push(at("a", "prefill"), at(other, "decode"), tokens, ms, float(i))
    assert fitted.refit()
    host, rack, far = fitted.costs.push
    assert (host.hop_ms, host.token_ms) == pytest.approx((2.0, 0.02), rel=0.05)
    assert (rack.hop_ms, rack.token_ms) == pytest.approx((2.0, 0.05), rel=0.05)
    assert (far.hop_ms, far.token_ms) == pytest.approx((2.0, 0.1), rel=0.05)
    assert fitted.samples == {
        "prefill": 0,
        "step": 0,
        "push_host": 30,
        "push_rack": 30,
        "push_elsewhere": 0,
    }


def test_a_hand_over_that_takes_no_time_still_favours_who_has_the_pages():
    fitted = FittedCosts(Costs())
    record = prefill("x").record
    for i in range(30):
        fitted.note_push(record, record, 64 * (i % 9), 1.0, float(i))
    assert fitted.refit()
    assert fitted.costs.push[0].token_ms == pytest.approx(0.1 / MOST_OFF)


# ---- in a router --------------------------------------------------------------------------


async def test_a_router_learns_from_its_answers_and_says_what_it_weighs(tmp_path):
    async with fakes.mesh(tmp_path, prefill=1, decode=1) as mesh:
        router = mesh.router
        value = router.metrics.value
        assert value("pdmesh_cost_seconds", cost="prefill_token") == 0.001
        mesh.prefill[0].compute_ms = 100.0
        for number in range(LEAST + 4):
            router.chooser.fitted.prefill._last = None  # however fast these come
            await mesh.chat(fakes.ask("word " * 300, max_tokens=3, request_id=f"r{number}"))
        router._refit()
        token_s = value("pdmesh_cost_seconds", cost="prefill_token")
        assert 0 < token_s < 0.0005
        assert value("pdmesh_cost_samples", fit="prefill") >= LEAST
        last = fakes.ask("word " * 300, max_tokens=3, request_id="last")
        last.tenant = "another"
        await mesh.chat(last)
        (choice,) = router.chooser.explain("last").choices
        assert choice.costs["prefill_token"] == pytest.approx(1e3 * token_s)
        compute = next(c for c in choice.candidates if c.role == "prefill").terms["compute"]
        assert compute == pytest.approx(100.0, rel=0.05)
        text = as_text(router.chooser.explain("last"))
        assert f"prefill_token {1e3 * token_s:.3g}" in text
        await mesh.at_rest()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_weighs_what_has_been_fitted(policy):
    chooser = Chooser(random.Random(0), lambda: 0.0, policy)
    learnt(chooser.fitted, random.Random(1))
    assert chooser.fitted.costs.token_ms != Costs().token_ms
    chooser._policy.costs = chooser.fitted.costs
    assert choose(chooser._policy, [prefill("p")]).prefill.worker_id == "p"
