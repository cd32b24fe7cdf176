"""The memory-bound kernels on a device, at DeepSeek-V3's shapes, beside their definitions."""

import pytest
import torch
from quantised_cases import assert_rows_close, padded_rows_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from pdmesh.kernels import cuda_gate, latent_rows, quantised, routing  # noqa: E402
from pdmesh.kernels import rope_append as rope_definition  # noqa: E402
from pdmesh.kernels import sampling as sampling_definition  # noqa: E402
from pdmesh.kernels.gate import GateRule, choose_experts  # noqa: E402
from pdmesh.kernels.quantised import Rows  # noqa: E402
from pdmesh.kernels.rope import RopeTable, inverse_frequencies  # noqa: E402
from pdmesh.kernels.triton import (  # noqa: E402
    gate,
    join_keys,
    norm,
    permute,
    place,
    quantise,
    rope_append,
    sampling,
)

HIDDEN, EPS = 7168, 1e-6
ROWS = [0, 1, 127, 129, 256]
V3 = GateRule("noaux_tc", 256, 8, 8, 4, True, 2.5)
V2 = GateRule("group_limited_greedy", 160, 6, 8, 3, False, 16.0)


def normal(seed, *shape):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def poisoned(*shape):
    rows = quantise.new_rows(*shape, device="cuda")
    rows.values.view(torch.uint8).fill_(0x7F)
    rows.scales.fill_(torch.nan)
    return rows


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("k", [HIDDEN, 1536, 2048, 16384, 300])
def test_rows_are_quantised(m, k):
    x = normal(m, m, k)
    if m > 1:
        x[m // 2, :128] = 0
        x[1] = torch.nan
    got, want = quantise.quantise_rows(x, out=poisoned(m, k)), quantised.quantise_rows(x)
    if m > 1:
        assert bool(got.values[1].float().isnan().all())
    keep = torch.arange(m, device="cuda") != 1
    assert padded_rows_of(got)
    got, want = (select(rows, keep) for rows in (got, want))
    assert_rows_close(got, want, 2e-2)


def select(rows, keep):
    values = rows.values.view(torch.uint8)[keep].view(torch.float8_e4m3fn)
    return Rows(values, rows.scales[keep])


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("add", [False, True])
def test_rows_are_normalised_and_quantised(m, add):
    x, residual, weight = normal(1, m, HIDDEN), normal(2, m, HIDDEN), normal(3, HIDDEN)
    out, normed_out = poisoned(m, HIDDEN), torch.full_like(x, torch.nan)
    if add:
        mine = residual.clone()
        got, normed = norm.add_rms_norm_quantise(
            x, mine, weight, EPS, out=out, normed_out=normed_out
        )
        want, want_normed = quantised.add_rms_norm_quantise(x, residual, weight, EPS)
        assert torch.equal(mine, residual)
    else:
        got, normed = norm.rms_norm_quantise(x, weight, EPS, out=out, normed_out=normed_out)
        want, want_normed = quantised.rms_norm_quantise(x, weight, EPS)
    torch.testing.assert_close(normed, want_normed, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(got.scales, want.scales, rtol=2**-7, atol=0)
    wide, same = quantised.dequantise_rows(got), quantised.dequantise_rows(want)
    assert float((wide - same).norm()) <= 5e-3 * float(same.norm())


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("k", [2048, 18432])
def test_swiglu_is_quantised(m, k):
    gate_up = normal(m, m, 2 * k)
    got = quantise.silu_mul_quantise(gate_up, out=poisoned(m, k))
    assert_rows_close(got, quantised.silu_mul_quantise(gate_up), 2e-2)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (129, 0, 1, 77), (256, 256, 256, 256)])
def test_swiglu_of_the_masked_layout_leaves_other_rows_alone(counts):
    gate_up = normal(5, 4, 256, 4096)
    given = torch.tensor(counts, dtype=torch.int32, device="cuda")
    used = torch.arange(256, device="cuda") < given[:, None]
    gate_up[~used] = torch.nan
    got = quantise.masked_silu_mul_quantise(gate_up, given, out=poisoned(4, 256, 2048))
    assert bool(got.scales[~used].isnan().all())
    assert bool((got.values.view(torch.uint8)[~used] == 0x7F).all())
    want = quantised.silu_mul_quantise(gate_up)
    assert_rows_close(select(got, used), select(want, used), 2e-2)


def rope_case(m, packed, interleave=True, heads=128):
    table = RopeTable.build(inverse_frequencies(64, 10000.0, None), 4096, 1.0, interleave)
    table = table.to(torch.device("cuda"))
    shape = (8, 3, 64, 656 if packed else 576)
    pool = torch.randint(0, 100, shape, device="cuda")
    pool = pool.to(torch.uint8 if packed else torch.bfloat16)
    order = torch.randperm(8 * 64, generator=torch.Generator().manual_seed(m))[:m].cuda()
    slots = order // 64 * (3 * 64) + order % 64
    positions = torch.randint(0, 4096, (m,), device="cuda")
    query, latent = normal(1, m, heads, 192)[..., 128:], normal(2, m, 2112)[:, 1536:]
    return [query, latent, normal(3, 512), table.cos, table.sin, positions, slots], pool


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "halves"])
def test_latents_go_to_their_pages(m, packed, interleave):
    arguments, pool = rope_case(m, packed, interleave)
    arguments[6][::3] = -1
    arguments[1][::3] = torch.nan
    mine = pool.clone()
    got = rope_append.rope_append(*arguments, mine, 2, interleave=interleave)
    want = rope_definition.rope_append(*arguments, pool, 2, interleave=interleave)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    if packed:
        scales = [
            p.view(-1, 656)[:, 512:528].contiguous().view(torch.float32) for p in (mine, pool)
        ]
        different = (mine != pool).flatten(0, 2)
        assert float(different.float().mean()) < 1e-3
        touched = (arguments[6][arguments[6] >= 0] + 2 * 64).tolist()
        for some in scales:
            assert torch.equal(some[touched], some[touched, :1].expand(-1, 4))
        assert set(different.any(dim=1).nonzero().flatten().tolist()) <= set(touched)
        ours, theirs = (quantised.unpack_latents(p.view(-1, 656)[touched]) for p in (mine, pool))
        assert float((ours - theirs).norm()) <= 1e-2 * float(theirs.norm())
    else:
        torch.testing.assert_close(mine, pool, rtol=2**-7, atol=1e-6)


def test_queries_are_rotated_in_place():
    arguments, pool = rope_case(129, False)
    want = rope_definition.rope_append(*arguments, pool.clone(), 0)
    before = arguments[0]._base.clone()
    rope_append.rope_append(*arguments, pool, 0, out=arguments[0])
    torch.testing.assert_close(arguments[0], want, rtol=2**-7, atol=1e-6)
    assert torch.equal(arguments[0]._base[..., :128], before[..., :128])


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("heads", [128, 16])
def test_keys_are_those_of_every_head(m, heads):
    up, latents = normal(m, m, heads, 256), normal(m + 1, m, 576)
    if m > 1:
        up[1] = torch.nan
    keys = join_keys.join_keys(up[..., :128], latents[:, 512:])
    want = latent_rows.join_keys(up[..., :128], latents[:, 512:])
    assert torch.equal(keys.view(torch.int16), want.view(torch.int16))


def test_a_captured_step_of_another_size_touches_nobodys_page():
    """vllm-project/vllm#43810: padding rows of a captured step wrote through slot -1."""
    for packed in (False, True):
        for captured, used in ((8, 5), (8, 7), (4, 3), (2, 1), (8, 8)):
            arguments, pool = rope_case(captured, packed, heads=16)
            arguments[6][0] = 0
            static = [a.clone() if a.dim() < 4 and i != 0 else a for i, a in enumerate(arguments)]
            out = torch.empty(captured, 16, 64, dtype=torch.bfloat16, device="cuda")
            warm = pool.clone()
            rope_append.rope_append(*static, warm, 1, out=out)
            before = pool.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rope_append.rope_append(*static, pool, 1, out=out)
            assert torch.equal(pool, before)
            static[6][used:] = -1
            static[1][used:] = torch.nan
            graph.replay()
            plain = before.clone()
            short = [a[:used] if i in (0, 1, 5, 6) else a for i, a in enumerate(static)]
            alone = rope_append.rope_append(*short, plain, 1)
            torch.cuda.synchronize()
            assert torch.equal(pool, plain)
            assert torch.equal(out[:used], alone)


def gate_inputs(rule, m, wide, seed=0):
    weight = normal(seed + 1, rule.num_experts, HIDDEN).float() / HIDDEN**0.5
    weight += 1e-4 * normal(seed + 2, rule.num_experts, HIDDEN).float()
    bias = normal(seed + 3, rule.num_experts).float() / 10
    bias = bias if rule.method == "noaux_tc" else None
    return normal(seed, m, HIDDEN), weight if wide else weight.to(torch.bfloat16), bias


def summed(work):
    total = torch.zeros_like(work[0])
    for part in work:
        total += part
    return total


@pytest.mark.parametrize("m", [0, 1, 15, 33, 129, 256, 1100])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
@pytest.mark.parametrize("rule", [V3, V2], ids=["v3", "v2"])
def test_the_gate_chooses_and_counts(m, wide, rule):
    x, weight, bias = gate_inputs(rule, m, wide)
    work = gate.workspace(m, rule.num_experts, "cuda")
    work.fill_(torch.nan)
    got = gate.gate_topk(x, weight, bias, rule, work=work)
    logits = summed(work)
    exact = x.double() @ weight.double().t()
    assert float((logits - exact).norm()) <= 1e-5 * float(exact.norm())
    ids, weights = choose_experts(logits, bias, rule)
    # A sum of two scores may be rounded another way and swap two that are all but equal.
    same = (ids == got.ids).all(dim=1)
    assert int((~same).sum()) <= m // 100
    torch.testing.assert_close(got.weights[same], weights[same], rtol=1e-4, atol=1e-6)
    places = routing.place_choices(got.ids, rule.num_experts)
    for mine, theirs in zip(got[2:], places, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", cuda_gate.FORMS, ids=str)
@pytest.mark.parametrize("m", [0, 1, 15, 33, 64, 129, 256, 512])
def test_the_gate_in_clusters_chooses_and_counts_and_does_so_again(m, form):
    if reason := cuda_gate.unavailable() or cuda_gate.unsupported(V3, m, form):
        pytest.skip(reason)
    x, weight, bias = gate_inputs(V3, m, False)
    used = torch.tensor(m // 2, dtype=torch.int32, device="cuda")
    for num_rows, count in ((None, m), (used, m // 2)):
        work = cuda_gate.workspace(m, "cuda").fill_(torch.nan)
        got = cuda_gate.gate_topk(x, weight, bias, V3, num_rows, work=work, form=form)
        exact = x.double() @ weight.double().t()
        assert float((work - exact).norm()) <= 1e-5 * float(exact.norm())
        ids, weights = choose_experts(work, bias, V3)
        ids[count:], weights[count:] = -1, 0
        same = (ids == got.ids).all(dim=1)
        assert int((~same).sum()) <= m // 100
        torch.testing.assert_close(got.weights[same], weights[same], rtol=1e-4, atol=1e-6)
        for mine, theirs in zip(got[2:], routing.place_choices(got.ids, 256), strict=True):
            assert torch.equal(mine, theirs)
        for _ in range(20):
            more = {"form": form, "dependent": True}
            again = cuda_gate.gate_topk(x, weight, bias, V3, num_rows, **more)
            assert all(map(torch.equal, again, got))


@pytest.mark.parametrize("form", cuda_gate.FORMS[:2], ids=str)
def test_a_rows_logits_in_clusters_do_not_depend_on_the_number_of_rows(form):
    if reason := cuda_gate.unavailable():
        pytest.skip(reason)
    x, weight, bias = gate_inputs(V3, 512, False)
    logits = {}
    for m in (1, 8, 9, 16, 17, 40, 64, 65, 256, 512):
        logits[m] = cuda_gate.workspace(m, "cuda")
        cuda_gate.gate_topk(x[:m], weight, bias, V3, work=logits[m], form=form)
    for m, some in logits.items():
        assert torch.equal(some, logits[512][:m]), m


def test_the_gate_in_clusters_takes_nan_and_infinite_rows_and_equal_experts():
    if reason := cuda_gate.unavailable():
        pytest.skip(reason)
    x, weight, bias = gate_inputs(V3, 64, False)
    weight[40:60], bias[40:60] = weight[40].clone(), bias[40].clone()
    want = cuda_gate.gate_topk(x, weight, bias, V3)
    x[::4], x[1::4] = torch.nan, torch.inf
    got = cuda_gate.gate_topk(x, weight, bias, V3)
    assert bool(((got.ids >= 0) & (got.ids < 256)).all())
    assert torch.equal(got.ids[::4], torch.arange(8, device="cuda").int().expand(16, 8))
    assert torch.equal(got.ids[2::4], want.ids[2::4])
    assert torch.equal(got.weights[3::4], want.weights[3::4])
    equal = (want.ids >= 40) & (want.ids < 60)
    inside = torch.where(equal, want.ids, 10**6).sort(dim=1).values
    first = torch.where(equal, want.ids, -1).cummax(dim=1).values
    assert bool((first[equal] == want.ids[equal]).all())  # of equals the lower ids, in order
    assert bool((inside.amin(dim=1)[equal.any(dim=1)] == 40).all())


def test_gates_in_clusters_follow_each_other_in_a_graph():
    """As dependents, each with rows and a weight of its own, by way of the same memory."""
    if reason := cuda_gate.unavailable():
        pytest.skip(reason)
    cases = [gate_inputs(V3, 256, False, seed=10 * i) for i in range(8)]
    rows, work = torch.empty_like(cases[0][0]), cuda_gate.workspace(256, "cuda")
    want = [cuda_gate.gate_topk(*case, V3) for case in cases]
    outs = [gate.new_routing(256, V3, "cuda") for _ in range(16)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, (x, weight, bias) in enumerate(cases):
            torch.add(x, 0, out=rows)
            for out in outs[2 * i : 2 * i + 2]:
                more = {"out": out, "work": work, "dependent": True}
                cuda_gate.gate_topk(rows, weight, bias, V3, **more)
    for _ in range(20):
        graph.replay()
        for i, out in enumerate(outs):
            assert all(map(torch.equal, out, want[i // 2])), i


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
def test_a_rows_logits_do_not_depend_on_the_number_of_rows(wide):
    x, weight, bias = gate_inputs(V3, 2048, wide)
    logits = {}
    for m in (1, 16, 17, 40, 256, 512, 1023, 1024, 2048):
        work = gate.workspace(m, 256, "cuda")
        gate.gate_topk(x[:m], weight, bias, V3, work=work)
        logits[m] = summed(work)
    for m, some in logits.items():
        assert torch.equal(some, logits[2048][:m]), m


def test_nan_and_infinite_rows_end_in_experts_that_exist():
    x, weight, bias = gate_inputs(V3, 64, False)
    want = gate.gate_topk(x, weight, bias, V3)
    x[::4], x[1::4] = torch.nan, torch.inf
    got = gate.gate_topk(x, weight, bias, V3)
    assert bool(((got.ids >= 0) & (got.ids < 256)).all())
    assert torch.equal(got.ids[::4], torch.arange(8, device="cuda").int().expand(16, 8))
    assert torch.equal(got.ids[2::4], want.ids[2::4])
    assert torch.equal(got.weights[3::4], want.weights[3::4])


@pytest.mark.parametrize("chained", [False, True])
def test_a_captured_gate_counts_only_the_rows_that_it_is_told_of(chained):
    x, weight, bias = gate_inputs(V3, 64, False)
    rows = torch.tensor([64], dtype=torch.int32, device="cuda")
    out, work = gate.new_routing(64, V3, "cuda"), gate.workspace(64, 256, "cuda")
    more = {"out": out, "work": work, "chained": chained}
    gate.gate_topk(x, weight, bias, V3, rows, **more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            gate.gate_topk(x, weight, bias, V3, rows, **more)
    for used in (64, 1, 37):
        rows.fill_(used)
        x.copy_(normal(used, 64, HIDDEN))
        x[used:] = torch.nan
        graph.replay()
        want = gate.gate_topk(x[:used].clone(), weight, bias, V3)
        assert torch.equal(out.ids[:used], want.ids)
        assert torch.equal(out.counts, want.counts)
        assert torch.equal(out.offsets, want.offsets)
        assert bool((out.ids[used:] == -1).all())


def choices(m, experts=256, k=8, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.rand((m, experts), generator=generator, device="cuda").argsort(dim=1)
    ids = order[:, :k].int().contiguous()
    ids[torch.rand((m, k), generator=generator, device="cuda") < 0.1] = -1
    return ids, place.place_choices(ids, experts)


@pytest.mark.parametrize("m", [0, 1, 129, 700])
def test_choices_are_counted_and_numbered(m):
    ids, got = choices(m)
    for mine, theirs in zip(got, routing.place_choices(ids, 256), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("m", [0, 1, 129])
@pytest.mark.parametrize("contiguous", [False, True], ids=["masked", "contiguous"])
def test_rows_go_to_their_experts_and_their_sum_comes_back(m, contiguous):
    ids, where = choices(m)
    x = quantise.quantise_rows(normal(4, m, HIDDEN))
    if contiguous:
        room = routing.contiguous_capacity(m, 8, 256)
        both = [
            module.permute_contiguous(x, ids, where.places, where.counts, room)
            for module in (permute, routing)
        ]
        assert torch.equal(both[0].row_expert, both[1].row_expert)
    else:
        room = max(1, m)
        both = [
            module.permute_masked(x, ids, where.places, 256, room) for module in (permute, routing)
        ]
    got, want = both
    assert torch.equal(got.targets, want.targets)
    used = got.targets[got.targets >= 0].long()
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        mine, theirs = (t.flatten(0, -2).contiguous().view(torch.uint8) for t in (mine, theirs))
        assert torch.equal(mine[used], theirs[used])
    parts = torch.full((*got.rows.values.shape[:-1], HIDDEN), torch.nan, device="cuda")
    parts = parts.to(torch.bfloat16)
    parts.view(-1, HIDDEN)[used] = normal(6, len(used), HIDDEN)
    weights = torch.rand(m, 8, device="cuda")
    back = permute.unpermute(parts, got.targets, weights)
    assert torch.equal(back, routing.unpermute(parts, got.targets, weights))


@pytest.mark.parametrize("m", [0, 1, 129])
def test_tokens_are_those_of_the_definition(m):
    generator = torch.Generator("cuda").manual_seed(m)
    logits = 3 * torch.randn((m, 129280), generator=generator, device="cuda")
    kinds = torch.arange(m, device="cuda")
    heat = torch.tensor([0.0, 1.0, 0.6, 5.0], device="cuda").double()[kinds % 4]
    min_p = torch.tensor([0.0, 0.05], device="cuda").double()[kinds // 4 % 2]
    numbers = torch.rand((m,), generator=generator, device="cuda", dtype=torch.float64)
    if m > 8:
        logits[8, 777], logits[9, 5], logits[10] = torch.nan, torch.inf, -torch.inf
        logits[11, 1:] = -torch.inf
    got = sampling.sample(logits, heat, min_p, numbers)
    assert torch.equal(got, sampling_definition.sample(logits, heat, min_p, numbers))
    if m > 8:
        assert got[8:12].tolist() == [-1, -1, -1, 0]


def test_cut_rows_are_drawn_as_by_the_definition():
    m = 64
    generator = torch.Generator("cuda").manual_seed(m)
    logits = 3 * torch.randn((m, 129280), generator=generator, device="cuda")
    kinds = torch.arange(m, device="cuda")
    heat = torch.tensor([0.0, 1.0, 0.6, 0.3], device="cuda").double()[kinds % 4]
    top_k = torch.tensor([0, 1, 50, 1000, 5000], device="cuda")[kinds % 5]
    top_p = torch.tensor([1.0, 0.5, 0.95], device="cuda").double()[kinds % 3]
    numbers = torch.rand((m,), generator=generator, device="cuda", dtype=torch.float64)
    logits[7, 5], logits[11, 1:] = torch.nan, -torch.inf
    arguments = (logits, heat, 0 * heat, numbers, top_k, top_p)
    got = sampling.sample(*arguments)
    assert torch.equal(got, sampling_definition.sample(*arguments))
    assert got[7] == sampling_definition.NO_TOKEN
    assert bool((got == sampling_definition.UNDECIDED).any())
