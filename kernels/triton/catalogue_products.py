"""The matrix products of the catalogue."""

from __future__ import annotations

from pdmesh.kernels.triton.entry import Entry

_SPLIT = "{} {} *bf16! *fp32! *fp32! *fp32! *i32! i32! i32! i32! i32! i32 i32! i32 i32!"
_MASKED = "{} {} *bf16! *fp32! *fp32! *i32! i32! i32! i32! i32! i32! i32 i32! i32 i32"
_SORTED = "{} {} *bf16! *fp32! *fp32! *i32! i32! i32 i32! i32! i32 i32! i32 i32"
_ABSORB = "*bf16! *fp8e4nv! *fp32! *bf16! *bf16! i32! fp32 i32! i32! i32! i32! i32!"
_PROJECT = "*bf16! *fp8e4nv! *fp32! *fp8e4nv! *fp32! i32! i32! i32! i32! i32!"


def _tiles(block_m: int, block_n: int, bulk: bool) -> tuple[str, str]:
    """How x and the weight come in: by address, or as descriptors of the bulk copy engine."""
    if not bulk:
        return "*fp8e4nv!", "*fp8e4nv!"
    return f"tensordesc<fp8e4nv[{block_m},128]>", f"tensordesc<fp8e4nv[{block_n},128]>"


PRODUCTS = (
    *(
        Entry(
            "splitk_gemm",
            "split_gemm_kernel",
            _SPLIT.format(*_tiles(m, n, bulk)),
            {
                "BLOCK_M": m,
                "BLOCK_N": n,
                "SPLIT": split,
                "SWAP": swap,
                "BULK": bulk,
                "EVEN": bulk,
                "DEPENDENT": False,
            },
            {"num_warps": warps, "num_stages": stages},
        )
        for m, n, split, swap, bulk, warps, stages in (
            (16, 64, 12, True, True, 4, 6),
            (64, 64, 4, False, True, 4, 4),
            (64, 128, 3, False, True, 4, 4),
            (128, 64, 1, False, True, 4, 4),
            (128, 128, 3, False, False, 8, 4),
        )
    ),
    *(
        Entry(
            "grouped_gemm",
            "masked_gemm_kernel",
            _MASKED.format(*_tiles(m, n, True)),
            {
                "EXPERTS_PADDED": 256,
                "FIND": find,
                "BLOCK_M": m,
                "BLOCK_N": n,
                "SWAP": swap,
                "BULK": True,
                "EVEN": True,
            },
            {"num_warps": warps, "num_stages": stages},
        )
        for find, m, n, swap, warps, stages in (
            (True, 16, 128, True, 4, 5),
            (False, 16, 128, True, 4, 5),
            (False, 64, 128, False, 4, 4),
        )
    ),
    *(
        Entry(
            "grouped_gemm",
            "sorted_gemm_kernel",
            _SORTED.format(*_tiles(m, n, True)),
            {"BLOCK_M": m, "BLOCK_N": n, "SWAP": swap, "BULK": True, "EVEN": True},
            {"num_warps": 4, "num_stages": stages},
        )
        for m, n, swap, stages in (
            (32, 128, True, 5),
            (64, 128, False, 4),
            (128, 64, False, 4),
        )
    ),
    *(
        Entry(
            "absorbed",
            "absorb_query_kernel",
            _ABSORB,
            {
                "NOPE": 128,
                "RANK": 512,
                "ROPE": 64,
                "BLOCK_M": 128,
                "BLOCK_N": 128,
                "BLOCK_D": 128,
                "BLOCK_R": 64,
                "CHUNKS": 1,
                "WIDE": wide,
                "SWAP": False,
            },
            {"num_warps": 8, "num_stages": 3},
        )
        for wide in (True, False)
    ),
    *(
        Entry(
            "absorbed",
            "project_values_kernel",
            _PROJECT,
            {"RANK": 512, "BLOCK_M": 64, "WIDE": wide, "SWAP": False},
            {"num_warps": 4, "num_stages": 3},
        )
        for wide in (True, False)
    ),
)
