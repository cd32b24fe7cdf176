"""Lower bounds of a layer of DeepSeek-V3: operations over a unit's rate, bytes over the memory's.

Each input is read once and each output written once. Routed experts, projections and the head count
FP8 inputs with bfloat16 outputs unless said otherwise; attention over bfloat16 latents, gate and
head run on the bfloat16 units. Nothing here is measured: the datasheet's dense rates, and formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HIDDEN, HEADS, Q_LORA, RANK, ROPE, NOPE, VALUE = 7168, 128, 1536, 512, 64, 128, 128
LATENT = RANK + ROPE
PACKED_BYTES = RANK + RANK // 128 * 4 + 2 * ROPE
"""Of a latent in FP8: values, scales, rotated values in bfloat16."""
EXPERTS, TOP_K, WIDTH, DENSE_WIDTH, VOCABULARY = 256, 8, 2048, 18432, 129280
MOE_LAYERS, DENSE_LAYERS, MTP_LAYERS = 58, 3, 1
TOKENS_A_STEP = 1.6
"""Of one draft that is right six times in ten."""
DISPATCH_BYTES, COMBINE_BYTES = HIDDEN + HIDDEN // 128 * 4, HIDDEN * 2
"""Of a row to an expert: FP8 with a float32 scale for 128 values; and back in bfloat16."""


@dataclass(frozen=True)
class Device:
    """Rates in operations a second, bytes a second."""

    name: str
    fp8: float
    bf16: float
    memory: float


H100 = Device("H100", 1979e12, 989.5e12, 3.35e12)
H200 = Device("H200", 1979e12, 989.5e12, 4.8e12)
INFINIBAND, NVLINK = 50e9, 450e9
"""Bytes a second of a GPU's share, one way."""


class Work(NamedTuple):
    """Operations, bytes, and which unit does the operations: "fp8" or "bf16"."""

    operations: float
    bytes: float
    unit: str = "fp8"

    def microseconds(self, device: Device) -> float:
        """The larger of the two times."""
        return 1e6 * max(self.operations / self.rate(device), self.bytes / device.memory)

    def rate(self, device: Device) -> float:
        return device.fp8 if self.unit == "fp8" else device.bf16

    def limit(self, device: Device) -> str:
        """ "compute" or "memory"."""
        compute = self.operations / self.rate(device) >= self.bytes / device.memory
        return "compute" if compute else "memory"


def gemm(
    m: int, k: int, n: int, groups: int = 1, *, input_bytes: int = 1, unit: str = "fp8"
) -> Work:
    """[m, k] times [k, n] for each group; weights of `input_bytes` for bf16, one byte for FP8."""
    weight_bytes = 1 if unit == "fp8" else 2
    size = input_bytes * m * k + weight_bytes * k * n + 2 * m * n
    return Work(2.0 * groups * m * k * n, float(groups * size), unit)


def attention(batch: int, query: int, kv: int, heads: int = HEADS, *, packed: bool = False) -> Work:
    """Absorbed decode attention: every sequence's latents are read once for all of its queries.

    `packed` latents are read in FP8; their rotated part counts as if it were in FP8 too.
    """
    rows = batch * query
    latents = batch * kv * (PACKED_BYTES if packed else LATENT * 2)
    moved = latents + rows * heads * (LATENT + RANK) * 2
    unit = "fp8" if packed else "bf16"
    return Work(2.0 * rows * heads * kv * (LATENT + RANK), float(moved), unit)


def routed(experts: int, rows: int) -> tuple[Work, Work]:
    """Gate-up and down projection of `experts` experts with `rows` rows each."""
    return gemm(rows, HIDDEN, 2 * WIDTH, experts), gemm(rows, WIDTH, HIDDEN, experts)


def moe_layer(
    batch: int,
    query: int,
    kv: int,
    ranks: int,
    heads: int = HEADS,
    *,
    senders: int = 1,
    packed: bool = False,
) -> dict[str, Work]:
    """The products of one MoE decode layer of a rank, in order; latents perhaps packed.

    Norms, quantisation, rope and the activations are left out: what they move could be fused away.
    The load is even, and `senders` ranks share one batch (tensor parallelism); an expert without a
    row is not read.
    """
    tokens = batch * query
    pairs = max(1, tokens * TOP_K // senders)
    active = min(EXPERTS // ranks, pairs)
    up, down = routed(active, -(-pairs // active))
    return attention_half(batch, query, kv, heads, packed=packed) | {
        "gate": _gate(tokens),
        "shared_up": gemm(tokens, HIDDEN, 2 * WIDTH),
        "shared_down": gemm(tokens, WIDTH, HIDDEN),
        "routed_up": up,
        "routed_down": down,
    }


def attention_half(
    batch: int, query: int, kv: int, heads: int = HEADS, *, packed: bool = False
) -> dict[str, Work]:
    """The attention of any layer: projections, absorption, attention, output projection."""
    tokens = batch * query
    return {
        "qkv_a": gemm(tokens, HIDDEN, Q_LORA + LATENT),
        "q_b": gemm(tokens, Q_LORA, heads * (NOPE + ROPE)),
        "absorb": gemm(tokens, NOPE, RANK, heads, input_bytes=2),
        "mla": attention(batch, query, kv, heads, packed=packed),
        "values": gemm(tokens, RANK, VALUE, heads, input_bytes=2),
        "o_proj": gemm(tokens, heads * VALUE, HIDDEN),
    }


def dense_layer(batch: int, query: int, kv: int, *, packed: bool = False) -> dict[str, Work]:
    """A layer of the first three: attention and a dense MLP."""
    tokens = batch * query
    return attention_half(batch, query, kv, packed=packed) | {
        "dense_up": gemm(tokens, HIDDEN, 2 * DENSE_WIDTH),
        "dense_down": gemm(tokens, DENSE_WIDTH, HIDDEN),
    }


def head(tokens: int) -> Work:
    """Logits, weights in bfloat16."""
    return gemm(tokens, HIDDEN, VOCABULARY, input_bytes=2, unit="bf16")


def _gate(tokens: int) -> Work:
    moved = 2 * tokens * HIDDEN + 2 * HIDDEN * EXPERTS + 4 * tokens * EXPERTS
    return Work(2.0 * tokens * HIDDEN * EXPERTS, float(moved), "bf16")


def total(work: dict[str, Work], device: Device) -> float:
    """Microseconds of all, one after another."""
    return sum(one.microseconds(device) for one in work.values())


def transfer(tokens: int, bandwidth: float, share: float = 1.0) -> tuple[float, float]:
    """Microseconds of dispatch and combine of `tokens` tokens, one copy for each expert.

    Args:
        tokens: of a rank.
        bandwidth: bytes a second, one way.
        share: of the copies that really cross the link.
    """
    copies = share * tokens * TOP_K / bandwidth * 1e6
    return copies * DISPATCH_BYTES, copies * COMBINE_BYTES


def step(moe: float, dense: float, logits: float) -> float:
    """Milliseconds of a decode step with one draft, from microseconds of its parts.

    58 MoE layers and the draft's, three dense ones, and logits for the model and for the draft.
    """
    layers = (MOE_LAYERS + MTP_LAYERS) * moe + DENSE_LAYERS * dense
    return (layers + (1 + MTP_LAYERS) * logits) / 1e3


def throughput(batch: int, step_ms: float) -> tuple[float, float]:
    """Tokens a second of a request, and of a GPU with `batch` requests."""
    each = TOKENS_A_STEP / step_ms * 1e3
    return each, each * batch


def prefill_pair_operations(absorbed: bool) -> int:
    """Operations for a (query, key) pair of one layer: absorbed form, or multi-head form."""
    return 2 * HEADS * ((LATENT + RANK) if absorbed else (NOPE + ROPE + VALUE))


UP_PROJECTION = 2 * RANK * HEADS * (NOPE + VALUE)
"""Operations a KV token (multi-head form) or a query token (the two absorbing products)."""


def chunked_cost(tokens: int, chunk: int) -> float:
    """Attention of a prompt in chunks over that of it at once, in operations.

    In multi-head form; every chunk projects all latents up to its own end again.
    """

    def cost(size: int) -> float:
        pairs = projected = 0.0
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            pairs += (end - start) * (start + (end - start) / 2)
            projected += end
        return prefill_pair_operations(False) * pairs + UP_PROJECTION * projected

    return cost(chunk) / cost(tokens)


def form_crossover(cached: int) -> float:
    """New tokens behind `cached` ones from which the multi-head form needs fewer operations.

    Solves (absorbed - multi-head) * new * (cached + new / 2) = up-projection * cached.
    """
    saved = prefill_pair_operations(True) - prefill_pair_operations(False)
    a, b, c = saved / 2, float(saved * cached), -float(UP_PROJECTION * cached)
    return (-b + (b * b - 4 * a * c) ** 0.5) / (2 * a)
