"""Every kernel of this package with the arguments of typical launches.

`pdmesh.kernels.triton.ahead` compiles them without a device. A new kernel needs an `Entry` in
`ENTRIES`; tests/test_triton_compiles.py says which have none.
"""

from __future__ import annotations

from pdmesh.kernels.triton.catalogue_exchange import EXCHANGE
from pdmesh.kernels.triton.catalogue_products import PRODUCTS
from pdmesh.kernels.triton.entry import Entry

_NORM = "*bf16! *bf16! *bf16! *fp8e4nv! *fp32! *bf16! i32! i32! i32! i32! i32 fp32"
_ROPE = (
    "*bf16! *bf16! *bf16! *bf16! *fp32! *fp32! *i64! *i64! *bf16! {} i32! i32! i32! i32! i32! i32!"
    " i32! fp32"
)
_PROJECT = "*bf16! {} *fp32! i32! i32! i32! i32!"
_CHOOSE = "*fp32! *fp32! *i32! *i32! *fp32! i32! fp32"
_DECODE = "*bf16! {} *bf16! *i32! *i32! *bf16! *fp32! *fp32! fp32 i32! i32 i32! i32! i32! i32! i32"
_PREFILL = "*bf16! *bf16! *bf16! *i32! *i32! *bf16! fp32 i32! i32! i32! i32! i32! i32!"
_QUANTISE = "*bf16! *fp8e4nv! *fp32! i32 i32! i32! i32! i32 i32"

ENTRIES = (
    Entry("quantise", "quantise_kernel", _QUANTISE, {"GROUPS": 64}, {"num_warps": 8}),
    Entry("quantise", "quantise_kernel", _QUANTISE, {"GROUPS": 1}, {"num_warps": 1}),
    Entry("quantise", "silu_mul_kernel", "*bf16! *fp8e4nv! *fp32! i32! i32! i32", {"GROUPS": 16}),
    Entry(
        "quantise",
        "masked_silu_mul_kernel",
        "*bf16! *i32! *fp8e4nv! *fp32! i32 i32! i32! i32! i32!",
        {"EXPERTS_PADDED": 32, "GROUPS": 16, "BLOCKS": 1},
    ),
    *(
        Entry(
            "norm",
            "rms_norm_kernel",
            _NORM,
            {"ADD": add, "KEEP": keep, "GROUPS": groups, "NEXT": later},
            {"num_warps": groups // 8},
        )
        for add, keep, groups, later in ((True, True, 64, True), (False, False, 16, False))
    ),
    *(
        Entry(
            "rope_append",
            "rope_append_kernel",
            _ROPE.format("*fp8e4nv! *fp32!" if packed else "*bf16! *bf16!"),
            {
                "RANK": 512,
                "ROPE": 64,
                "HEADS": 32,
                "INTERLEAVE": interleave,
                "PACKED": packed,
                "NEXT": packed,
            },
            {"enable_fp_fusion": False},
        )
        for interleave, packed in ((True, False), (True, True), (False, True))
    ),
    *(
        Entry(
            "project",
            "project_kernel",
            _PROJECT.format(weight),
            {
                "CHUNK": 448,
                "PER_PROGRAM": per_program,
                "EVEN": True,
                "EXPERTS": experts,
                "ROWS": rows,
                "STEP": 64,
                "CHAINED": True,
            },
            {"num_stages": 4},
        )
        for weight, per_program, experts, rows in (
            ("*bf16!", 1, 128, 64),
            ("*bf16!", 16, 128, 64),
            ("*bf16!", 1, 64, 16),
            ("*fp32!", 1, 64, 64),
        )
    ),
    *(
        Entry(
            "gate",
            "choose_kernel",
            _CHOOSE,
            {
                "PARTS": parts,
                "BIASED": sigmoid,
                "COUNTED": sigmoid,
                "ROWS": 1,
                "SIGMOID": sigmoid,
                "NORMALISE": sigmoid,
                "TOP": top,
                "TOP_PADDED": 8,
                "GROUPS": groups,
                "GROUPS_PADDED": groups,
                "TOP_GROUPS": best,
                "SIZE": size,
                "SIZE_PADDED": padded,
                "CHAINED": True,
            },
            {"num_warps": 1, "launch_pdl": True},
        )
        for parts, sigmoid, top, groups, best, size, padded in (
            (16, True, 8, 8, 4, 32, 32),
            (1, False, 6, 8, 3, 20, 32),
            (1, False, 6, 1, 1, 64, 64),
        )
    ),
    Entry(
        "place", "place_kernel", "*i32! *i32! *i32! *i32! i32!", {"BLOCK": 4096, "CHAINED": True}
    ),
    Entry(
        "permute",
        "permute_masked_kernel",
        "*u8! *fp32! *i32! *i32! *u8! *fp32! *i32! i32 i32! i32! i32 i32! i32! i32!",
        {"CHOICES": 8, "K_PADDED": 8192},
    ),
    Entry(
        "permute",
        "permute_contiguous_kernel",
        "*u8! *fp32! *i32! *i32! *i32! *u8! *fp32! *i32! *i32! i32! i32! i32! i32! i32 i32! i32!",
        {"CHOICES": 8, "EXPERTS_PADDED": 256, "ALIGN": 128, "K_PADDED": 8192},
    ),
    Entry(
        "permute",
        "unpermute_kernel",
        "*bf16! *i32! *fp32! *bf16! *bf16! i32!",
        {"CHOICES": 8, "PLUS": True, "COLUMNS": 1024},
        {"enable_fp_fusion": False},
    ),
    Entry(
        "join_keys",
        "join_keys_kernel",
        "*bf16! *bf16! *bf16! i32! i32! i32! i32!",
        {"NOPE": 128, "ROPE": 64, "HEADS": 32, "NOPE_PADDED": 128, "ROPE_PADDED": 64},
    ),
    Entry("sampling", "top_kernel", "*fp32! *i64! i32! i32!", {"BLOCK": 4096}),
    Entry(
        "sampling",
        "mass_kernel",
        "*fp32! *fp64! *fp64! *i64! *fp64! i32! i32!",
        {"BLOCK": 4096, "BLOCKS": 32},
        {"num_warps": 8},
    ),
    Entry(
        "sampling",
        "draw_kernel",
        "*fp32! *fp64! *fp64! *fp64! *i64! *fp64! *i64! i32! i32! i32!",
        {"BLOCK": 4096, "BLOCKS": 32},
        {"num_warps": 8},
    ),
    *(
        Entry(
            "mla_decode",
            "decode_kernel",
            _DECODE.format("*fp8e4nv! *fp32!" if packed else "*bf16! *bf16!"),
            {
                "TOKEN_STRIDE": 656 if packed else 576,
                "SCALE_STRIDE": 164 if packed else 576,
                "ROPE_STRIDE": 328 if packed else 576,
                "ROWS": rows,
                "PAGE": 64,
                "RANK": 512,
                "ROPE": 64,
                "PACKED": packed,
                "SPLITS": splits,
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
            },
            {"num_warps": warps, "num_stages": stages},
        )
        for rows, packed, splits, block_m, block_n, warps, stages in (
            (2, False, 1, 64, 64, 8, 2),
            (2, True, 4, 64, 64, 8, 2),
            (1, False, 4, 16, 32, 4, 2),
            (1, True, 4, 16, 32, 4, 3),
            (1, False, 4, 32, 32, 4, 2),
        )
    ),
    Entry(
        "mla_decode",
        "combine_kernel",
        "*fp32! *fp32! *i32! *bf16! i32! i32! i32!",
        {"RANK": 512, "SPLITS": 8},
    ),
    Entry(
        "mla_prefill",
        "prefill_kernel",
        _PREFILL,
        {
            "HEADS": 128,
            "QK": 192,
            "V": 128,
            "WIDTH": 128,
            "REST": 64,
            "V_WIDTH": 128,
            "BLOCK_M": 128,
            "BLOCK_N": 128,
        },
        {"num_warps": 8, "num_stages": 2},
    ),
    *PRODUCTS,
    *EXCHANGE,
)
