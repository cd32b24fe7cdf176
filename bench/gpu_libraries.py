"""The operations of a layer through public libraries, each with the arguments of `pdmesh.kernels`.

Imported lazily: a library that is missing, or that refuses a shape, is left out of the tables with
its reason.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels.quantised import BlockWeight, Rows, quantise_rows

PAGE = 64


def deep_gemm_dense(x: Rows, weight: BlockWeight) -> Tensor:
    import deep_gemm

    output = x.values.new_empty((x.values.shape[0], weight.values.shape[0]), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(tuple(x), tuple(weight), output)
    return output


def deep_gemm_masked(x: Rows, weight: BlockWeight, counts: Tensor, expected: int) -> Tensor:
    import deep_gemm

    experts, rows, _ = x.values.shape
    output = x.values.new_empty((experts, rows, weight.values.shape[1]), dtype=torch.bfloat16)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(tuple(x), tuple(weight), output, counts, expected)
    return output


def deep_gemm_contiguous(x: Rows, weight: BlockWeight, row_expert: Tensor) -> Tensor:
    import deep_gemm

    output = x.values.new_empty((x.values.shape[0], weight.values.shape[1]), dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(tuple(x), tuple(weight), output, row_expert)
    return output


def cublaslt_dense(x: Rows, weight: BlockWeight) -> Tensor:
    """torch's block-scaled product (cuBLASLt)."""
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        x.values,
        weight.values.t(),
        x.scales,
        ScalingType.BlockWise1x128,
        weight.scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def torch_absorb(query: Tensor, key: Tensor, rotated: Tensor) -> Tensor:
    """bfloat16 batched product; key [heads, nope, rank]."""
    m, heads, _ = query.shape
    rank = key.shape[2]
    output = query.new_empty((m, heads, rank + rotated.shape[2]))
    torch.bmm(query.transpose(0, 1), key, out=output[..., :rank].transpose(0, 1))
    output[..., rank:] = rotated
    return output


def torch_values(latent: Tensor, up: Tensor) -> Rows:
    """bfloat16 batched product, then quantisation; up [heads, rank, value]."""
    m, heads, _ = latent.shape
    output = latent.new_empty((m, heads, up.shape[2]))
    torch.bmm(latent.transpose(0, 1), up, out=output.transpose(0, 1))
    return quantise_rows(output.flatten(1))


class FlashMla:
    """Decode attention of sgl-flash-mla; the plan of a batch is made once."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """query [n, q, heads, 576], pages [pages, 64, 576]: [n, q, heads, 512]."""
        import flash_mla

        key = (lengths.data_ptr(), *query.shape)
        if key not in self._plans:
            self._plans[key] = flash_mla.get_mla_metadata()[0]
        output, _ = flash_mla.flash_mla_with_kvcache(
            query,
            pages.unsqueeze(2),
            table,
            lengths,
            512,
            self._plans[key],
            softmax_scale=scale,
            causal=True,
            use_legacy=True,
        )
        return output


class FlashInferMla:
    """Decode attention of FlashInfer; the plan of a batch is made once."""

    def __init__(self, backend: str = "fa3") -> None:
        self._backend = backend
        self._plans: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        n, q, heads, _ = query.shape
        key = (lengths.data_ptr(), *query.shape)
        if key not in self._plans:
            self._plans[key] = self._plan(n, q, heads, table, lengths, scale)
        flat = query.flatten(0, 1)
        output = self._plans[key].run(
            flat[..., :512], flat[..., 512:], pages[..., :512], pages[..., 512:]
        )
        return output.view(n, q, heads, 512)

    def _plan(
        self, n: int, q: int, heads: int, table: Tensor, lengths: Tensor, scale: float
    ) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        device = table.device
        used = (lengths.long() + PAGE - 1) // PAGE
        indptr = torch.zeros(n + 1, dtype=torch.int32, device=device)
        indptr[1:] = used.cumsum(0)
        chosen = torch.cat([row[:count] for row, count in zip(table, used.tolist(), strict=True)])
        wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=device),
            use_cuda_graph=True,
            qo_indptr=torch.empty(n + 1, dtype=torch.int32, device=device),
            kv_indptr=torch.empty(n + 1, dtype=torch.int32, device=device),
            kv_indices=torch.empty(len(chosen), dtype=torch.int32, device=device),
            kv_len_arr=torch.empty(n, dtype=torch.int32, device=device),
            backend=self._backend,
        )
        wrapper.plan(
            torch.arange(0, n * q + 1, q, dtype=torch.int32, device=device),
            indptr,
            chosen,
            lengths,
            heads,
            512,
            64,
            PAGE,
            True,
            scale,
            torch.bfloat16,
            torch.bfloat16,
        )
        return wrapper


def attention_reference(
    query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float, first: int = 4
) -> Tensor:
    """The first sequences' attention in float32, rows of a sequence causal among themselves."""
    n, q, _, _ = query.shape
    parts = []
    for row in range(min(n, first)):
        length = int(lengths[row])
        latent = pages[table[row].long()].flatten(0, 1)[:length].float()
        scores = torch.einsum("qhd,kd->qhk", query[row].float(), latent) * scale
        reach = length - q + torch.arange(q, device=query.device)
        beyond = torch.arange(length, device=query.device)[None] > reach[:, None]
        scores = scores.masked_fill(beyond[:, None, :], float("-inf")).softmax(dim=-1)
        parts.append(torch.einsum("qhk,kd->qhd", scores, latent[:, :512]))
    return torch.stack(parts)


@functools.cache
def ragged_prefill(tokens: int, heads: int, scale: float) -> Any:
    """FlashInfer's multi-head prefill of one causal sequence, planned: run(q, k, v)."""
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    wrapper.plan(
        ends,
        ends,
        heads,
        heads,
        192,
        head_dim_vo=128,
        causal=True,
        sm_scale=scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return wrapper
