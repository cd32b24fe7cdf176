"""Prefill attention on a GPU: the MHA form against the absorbed form, and what chunking costs.

    python -P bench/gpu_mla_prefill.py            (needs a Hopper GPU)

128 heads. The MHA form includes, where said, the projection of latents to keys and values; the
absorbed form its two products. Times are medians of CUDA events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from torch import Tensor  # noqa: E402

from pdmesh.kernels import flash_mla_backend, flashinfer_backend, mla_reference  # noqa: E402
from pdmesh.kernels.triton import mla_prefill  # noqa: E402

PAGE, HEADS, NOPE, ROPE, VALUE, RANK = 64, 128, 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5
ABSORBED_ROWS = 64
"""Query rows that the absorbed form takes as one sequence of a batch."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def starts(count: int) -> Tensor:
    return torch.tensor([0, count], dtype=torch.int32)


def milliseconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """The median."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


class Heads:
    """Up-projections of all heads. The key one takes the rotated values through an identity, so
    that one product writes keys [n, heads, 192] and nothing has to be copied."""

    def __init__(self) -> None:
        self.key = torch.zeros(HEADS, NOPE + ROPE, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.key[:, :NOPE, :RANK] = normal(HEADS, NOPE, RANK) / RANK**0.5
        self.key[:, NOPE:, RANK:] = torch.eye(ROPE, device="cuda")
        self.value = normal(HEADS, VALUE, RANK) / RANK**0.5

    def keys_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        n = latent.shape[0]
        key = (latent @ self.key.flatten(0, 1).t()).view(n, HEADS, NOPE + ROPE)
        value = (latent[:, :RANK] @ self.value.flatten(0, 1).t()).view(n, HEADS, VALUE)
        return key, value


class Prompt:
    """A prompt of n tokens in both forms."""

    def __init__(self, n: int, space: Tensor) -> None:
        self.n, self.weights, self.space = n, Heads(), space
        self.latent, self.query = normal(n, RANK + ROPE), normal(n, HEADS, NOPE + ROPE)
        self.key, self.value = self.weights.keys_values(self.latent)
        self.wrapper = flashinfer_backend.Prefill(space)
        self.wrapper.plan(starts(n), starts(n), HEADS, (NOPE + ROPE, VALUE), SCALE)

    def error(self, got: Tensor) -> float:
        """Of the last rows of some heads."""
        some, few = slice(self.n - 64, self.n), slice(0, 4)
        ends = starts(64), starts(self.n)
        wanted = mla_reference.mla_prefill(
            self.query[some, few], self.key[:, few], self.value[:, few], *ends, SCALE
        ).double()
        return ((got[some, few].double() - wanted).norm() / wanted.norm()).item()

    def flashinfer(self) -> Tensor:
        return self.wrapper.run(self.query, self.key, self.value)

    def triton(self) -> Tensor:
        ends = starts(self.n).cuda()
        return mla_prefill.mla_prefill(self.query, self.key, self.value, ends, ends, SCALE)

    def absorbed(self) -> dict[str, float]:
        """Milliseconds of the absorbed form's core by library."""
        count = self.n // ABSORBED_ROWS
        lengths = torch.arange(1, count + 1, dtype=torch.int32, device="cuda") * ABSORBED_ROWS
        pages = self.latent.view(-1, PAGE, RANK + ROPE)
        tables = torch.arange(self.n // PAGE, dtype=torch.int32, device="cuda").repeat(count, 1)
        query = normal(self.n, HEADS, RANK + ROPE)
        plan = flash_mla_backend.Plan(lengths, ABSORBED_ROWS, HEADS)
        reader = flashinfer_backend.Decode(self.space, count, tables.shape[1])
        times = {}

        def flash_mla() -> Tensor:
            return plan.decode(query, pages, tables, lengths, ABSORBED_ROWS, SCALE)

        times["FlashMLA"] = milliseconds(flash_mla)
        reader.plan(tables.cpu(), lengths.cpu(), ABSORBED_ROWS, HEADS, PAGE, SCALE)
        times["FlashInfer"] = milliseconds(lambda: reader.run(query, pages))
        return times

    def products(self) -> float:
        """Milliseconds of the absorbed form's two products."""
        query = self.query[..., :NOPE].transpose(0, 1)
        seen = normal(self.n, HEADS, RANK).transpose(0, 1)
        key, value = self.weights.key[:, :NOPE, :RANK], self.weights.value.transpose(1, 2)
        return milliseconds(lambda: (torch.bmm(query, key), torch.bmm(seen, value)))


def forms(lengths: Sequence[int], space: Tensor) -> None:
    """Both forms at the same length."""
    for n in lengths:
        prompt = Prompt(n, space)
        mha, generic = milliseconds(prompt.flashinfer), milliseconds(prompt.triton, 1)
        flop = HEADS * (NOPE + ROPE + VALUE) * n * n
        weights = prompt.weights
        up = milliseconds(lambda p=prompt, w=weights: w.keys_values(p.latent))  # type: ignore[misc]
        products, absorbed = prompt.products(), prompt.absorbed()
        best = min(absorbed.values())
        print(
            f"{n} tokens: MHA FlashInfer {mha:.3f} ms ({flop / mha / 1e9:.0f} TFLOP/s, error "
            f"{prompt.error(prompt.flashinfer()):.1e}), Triton {generic:.3f} "
            f"({prompt.error(prompt.triton()):.1e}), projection {up:.3f}; absorbed "
            f"{ {k: round(v, 3) for k, v in absorbed.items()} }, products {products:.3f}; "
            f"attention x{best / mha:.2f}, with projections "
            f"x{(best + products) / (mha + up):.2f}",
            flush=True,
        )


def chunks(total: int, sizes: Sequence[int], space: Tensor) -> None:
    """One prompt in chunks, MHA form: keys and values are projected again for every chunk."""
    prompt = Prompt(total, space)
    whole = 0.0
    for size in (total, *sizes):
        wrappers = []
        for end in range(size, total + 1, size):
            wrapper = flashinfer_backend.Prefill(space)
            wrapper.plan(starts(size), starts(end), HEADS, (NOPE + ROPE, VALUE), SCALE)
            wrappers.append(wrapper)

        def prefill(size: int = size, wrappers: Any = wrappers) -> None:
            for i, wrapper in enumerate(wrappers):
                key, value = prompt.weights.keys_values(prompt.latent[: (i + 1) * size])
                wrapper.run(prompt.query[i * size : (i + 1) * size], key, value)

        ms = milliseconds(prefill, 1)
        whole = whole or ms
        print(f"{total} tokens in chunks of {size}: {ms:.1f} ms, x{ms / whole:.3f}", flush=True)


def main() -> None:
    """Both tables."""
    command_line.parser(__doc__).parse_args()
    space = torch.empty(flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    forms((4096, 16384), space)
    chunks(32768, (8192, 4096, 2048, 1024, 512), space)


if __name__ == "__main__":
    main()
