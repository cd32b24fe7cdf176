"""One MoE layer of full-width DeepSeek-V3 over a prompt: multi-head form beside absorbed form.

    python -P bench/gpu_prefill.py [--prompts 4096 16384] [--json FILE]     (needs a Hopper GPU)

A rank of eight with `prompts` tokens of its own (one sequence, nothing cached) and an even load:
every step timed in a graph, the products by the fastest correct library or kernel. The attention
part is what the two forms do not share: up-projection, keys and attention, or the two absorbing
products and attention over latents. Tokens a second count 58 such layers and three dense ones;
with and without dispatch and combine of eight H200s as published (DeepEP, normal mode).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import bounds  # noqa: E402 - the path is set above
import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402
from figures import as_json, shown, total  # noqa: E402
from gpu_block import EPS, SCALE, Rank, State, Weights, random_weight  # noqa: E402
from gpu_choices import Step, steps  # noqa: E402
from gpu_timing import Candidate, Clocks, pick, timed  # noqa: E402
from gpu_variants import own  # noqa: E402
from torch import Tensor  # noqa: E402

from pdmesh.kernels import deep_gemm_backend, latent_rows, quantised  # noqa: E402
from pdmesh.kernels.flashinfer_backend import WORKSPACE_BYTES, Decode, Prefill  # noqa: E402
from pdmesh.kernels.quantised import BlockWeight, Rows  # noqa: E402

EP = 8
DEEP_EP_NORMAL = {4096: (494.0, 979.0), 8192: (969.0, 1835.0)}
"""Tokens, and microseconds of dispatch and combine, eight H200s (SGLang, 20 multiprocessors)."""


class Layer:
    """A layer's steps over one prompt; `times` are filled as they are first called."""

    def __init__(self, tokens: int, table: dict[str, Step]) -> None:
        self.tokens = tokens
        self.rank = Rank("prefill", EP, batch=1, query=tokens, kv=tokens)
        self.w = Weights(self.rank, 3)
        draw = torch.Generator("cuda").manual_seed(4)
        self.kv_b = random_weight(bounds.HEADS * 256, bounds.RANK, generator=draw)
        shapes = ((2 * bounds.DENSE_WIDTH, bounds.HIDDEN), (bounds.HIDDEN, bounds.DENSE_WIDTH))
        self.dense = [random_weight(n, k, generator=draw) for n, k in shapes]
        self.state = State(self.rank, 1)
        pages = self.state.pool.shape[0]
        self.state.table.copy_(torch.arange(pages, device="cuda")[None])
        self.state.slots.copy_(self.state.positions)
        self.table = table
        self.times: dict[str, float | None] = {}
        self.by: dict[str, str] = {}

    def run(self, name: str, step: Step, *call: Any) -> Any:
        """The result of the fastest correct candidate, whose time is noted."""
        best, tried = pick(
            step.candidates,
            [call],
            step.reference,
            tolerance=step.tolerance,
            look=step.look,
            fresh=step.fresh,
            rounds=2,
        )
        if best is None or best.run is None:
            raise RuntimeError(f"{name}: {'; '.join(m.why_not for m in tried)}")
        self.times[name], self.by[name] = best.microseconds, best.name
        shown = "; ".join(m.why_not or f"{m.name} {m.microseconds:.1f}" for m in tried)
        print(f"  {name:14} {best.microseconds:9.1f} us  {best.name}  [{shown}]", flush=True)
        return best.run(*step.fresh(call))

    def plain(self, name: str, function: Callable[[], Any]) -> Any:
        """The result of one way, whose time is noted."""
        took = timed([function], 2, 7)
        self.times[name], self.by[name] = took, "-"
        print(f"  {name:14} {took:9.1f} us", flush=True)
        return function()

    def shared_front(self) -> tuple[Tensor, Tensor]:
        """The query [tokens, heads, 192], and its rotated part; latents in their pages."""
        w, state, table = self.w, self.state, self.table
        rows, _ = self.run(
            "input_norm", table["input_norm"], state.x, state.residual, w.input_norm, EPS
        )
        projected = self.run("qkv_a", table["qkv_a"], rows, w.qkv_a)
        rows, _ = self.run("q_norm", table["q_norm"], projected[:, : bounds.Q_LORA], w.q_norm, EPS)
        query = self.run("q_b", table["q_b"], rows, w.q_b).view(self.tokens, bounds.HEADS, 192)
        rotated = self.run(
            "rope_append",
            table["rope_append"],
            query[..., 128:],
            projected[:, bounds.Q_LORA :],
            w.kv_norm,
            state.cos,
            state.sin,
            state.positions,
            state.slots,
            state.pool,
            0,
        )
        query[..., 128:] = rotated  # a layer has it rotated in place, and no such copy
        return query, rotated

    def multi_head(self, query: Tensor) -> Tensor:
        """Attention in multi-head form: [tokens, heads, 128]."""
        latent = self.state.pool[:, 0].flatten(0, 1)[: self.tokens]
        quantise = Step(
            quantised.quantise_rows, own("triton.quantise", "quantise_rows", "quantise"), 3e-2
        )
        rows = self.run("latent_rows", quantise, latent[:, :512].contiguous())
        up = self.run("kv_b", self.table["qkv_a"], rows, self.kv_b)
        up = up.view(self.tokens, bounds.HEADS, 256)
        shared = latent[:, 512:]
        keys = Step(
            latent_rows.join_keys,
            [Candidate("torch", latent_rows.join_keys), *own("triton.join_keys", "join_keys")],
            1e-6,
        )
        key = self.run("keys", keys, up[..., :128], shared)
        plan = Prefill(torch.empty(2 * WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
        ends = torch.tensor([0, self.tokens], dtype=torch.int32)
        plan.plan(ends, ends, bounds.HEADS, (192, 128), SCALE)
        value = up[..., 128:]
        return self.plain("attention", lambda: plan.run(query, key, value))

    def absorbed(self, query: Tensor, rotated: Tensor) -> None:
        """Attention over latents, with the products that lead to it and from it."""
        absorbed = self.run("absorb", self.table["absorb"], query[..., :128], self.w, rotated)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        plan = Decode(workspace, 1, self.state.table.shape[1], graph=True)
        plan.plan(
            self.state.table.cpu(), self.state.lengths.cpu(), self.tokens, bounds.HEADS, 64, SCALE
        )
        pages = self.state.pool[:, 0]
        seen = self.plain("mla", lambda: plan.run(absorbed, pages))
        self.run("values", self.table["values"], seen, self.w)

    def rest(self, heads: Tensor) -> None:
        """Output projection, gate, experts and a dense MLP."""
        w, table = self.w, self.table
        quantise = Step(
            quantised.quantise_rows, own("triton.quantise", "quantise_rows", "quantise"), 3e-2
        )
        rows = self.run("output_rows", quantise, heads.flatten(1))
        out = self.run("o_proj", table["qkv_a"], rows, w.o_proj)
        rows, normed = self.run(
            "post_norm", table["post_norm"], out, self.state.residual, w.post_norm, EPS
        )
        _, weights = self.run("gate", table["gate"], normed, w)
        shared = self._mlp("shared", rows, w.shared_up, w.shared_down)
        self._mlp("dense", rows, *self.dense)
        self._routed(weights, shared)

    def _mlp(self, name: str, rows: Rows, up: BlockWeight, down: BlockWeight) -> Tensor:
        middle = self.run(f"{name}_up", self.table["qkv_a"], rows, up)
        middle = self.run(f"{name}_act", self.table["shared_act"], middle)
        return self.run(f"{name}_down", self.table["qkv_a"], middle, down)

    def _routed(self, weights: Tensor, shared: Tensor) -> None:
        w, rank = self.w, self.rank
        each = rank.rows
        row_expert = torch.arange(rank.experts, device="cuda").repeat_interleave(each).int()
        flat = quantised.quantise_rows(
            torch.randn(len(row_expert), bounds.HIDDEN, device="cuda", dtype=torch.bfloat16)
        )
        product = Step(
            quantised.contiguous_grouped_gemm,
            [
                Candidate("DeepGEMM", deep_gemm_backend.contiguous_grouped_gemm),
                *own("triton.grouped_gemm", "contiguous_grouped_gemm", "grouped"),
            ],
            5e-3,
        )
        up = self.run("routed_up", product, flat, w.up, row_expert)
        middle = self.run("routed_act", self.table["shared_act"], up)
        down = self.run("routed_down", product, middle, w.down, row_expert)
        targets = torch.randint(0, len(down), (self.tokens, 8), device="cuda", dtype=torch.int32)
        self.run("combine_sum", self.table["combine_sum"], down, targets, weights, shared)


MULTI_HEAD = ("latent_rows", "kv_b", "keys", "attention", "output_rows")
ABSORBED = ("absorb", "mla", "values")
DENSE = ("dense_up", "dense_act", "dense_down")
MOE = (
    "gate",
    "shared_up",
    "shared_act",
    "shared_down",
    "routed_up",
    "routed_act",
    "routed_down",
    "combine_sum",
)


def measure(tokens: int, without: Sequence[str]) -> dict[str, Any]:
    print(f"\n{tokens} tokens, {EP} ranks")
    layer = Layer(tokens, steps(without))
    query, rotated = layer.shared_front()
    heads = layer.multi_head(query)
    try:
        layer.absorbed(query, rotated)
    except Exception as failure:  # noqa: BLE001 - a library's own errors are of any type
        print(f"  absorbed form: {failure}")
        layer.times |= dict.fromkeys(ABSORBED)
    layer.rest(heads)
    found = sums(tokens, layer.times)
    words = (f"{name} {shown(value, ',.2f')}" for name, value in found.items())
    print("  " + ", ".join(words), flush=True)
    return {"times": layer.times, "by": layer.by} | found


def sums(tokens: int, times: Mapping[str, float | None]) -> dict[str, float | None]:
    """What steps of those times come to; of the absorbed form there may be none."""
    form = total(times[name] for name in ABSORBED)
    rest = {name: took for name, took in times.items() if took is not None and name not in ABSORBED}
    multi_head, dense, moe = (
        sum(rest[name] for name in names) for names in (MULTI_HEAD, DENSE, MOE)
    )
    every = sum(rest.values())
    moe_layer, dense_layer = every - dense, every - moe
    step = 58 * moe_layer + 3 * dense_layer
    found: dict[str, float | None] = {
        "multi_head": multi_head,
        "absorbed": form,
        "dense": dense,
        "moe": moe,
        "moe_layer": moe_layer,
        "dense_layer": dense_layer,
        "tokens_a_second": tokens / step * 1e6,
    }
    if tokens in DEEP_EP_NORMAL:
        exposed = step + 58 * sum(DEEP_EP_NORMAL[tokens])
        found["tokens_a_second_exposed"] = tokens / exposed * 1e6
    found["form_ratio"] = None if form is None else form / multi_head
    return found


def compile_attention() -> None:
    """FlashInfer compiles its prefill kernels when they are first planned."""
    ends = torch.tensor([0, 128], dtype=torch.int32)
    plan = Prefill(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
    plan.plan(ends, ends, bounds.HEADS, (192, 128), SCALE)


def main() -> int:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[4096, 16384], help="tokens of a prompt"
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--without", nargs="*", default=[], help="parts of candidates' names")
    parser.add_argument("--compile", action="store_true", help="compile FlashInfer's kernels only")
    args = parser.parse_args()
    if args.compile:
        compile_attention()
        return 0
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with torch.inference_mode(), Clocks() as clocks:
        for tokens in args.prompts:
            try:
                found[str(tokens)] = measure(tokens, args.without)
            except Exception as failure:  # noqa: BLE001 - other prompts are still of interest
                traceback.print_exc()
                failed[str(tokens)] = f"{type(failure).__name__}: {str(failure)[:300]}"
                found["failed"] = failed
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(as_json(found, 1) + "\n")
    found["clocks"] = clocks.summary()
    print("clocks:", found["clocks"])
    if args.json:
        args.json.write_text(as_json(found, 1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
