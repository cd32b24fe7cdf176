"""Dispatch and combine in the catalogue: eight ranks of 32 experts, rows of 7,168.

Those of `ep_put` are apart in `PUTS`: they are linked with NVSHMEM's library for devices, which
comes with its wheel.
"""

from __future__ import annotations

from pdmesh.kernels.triton.entry import Entry

_CHOOSE = "{}! *i32! *i32! *i32! *i32! *i32! *i32! *i32! *i64! i32! i32!"
_NUMBER = "{}! *i32! *i32! *i32! *i32! *i32! *i32! *i64! *i64! *i64! *i64! i32! i32!"
_SEND = "*bf16! {}! *i32! *i32! *i32! *i64! *i64! *i64! i32! i32! i32! i32!"
_SPREAD = "i64! *i32! *i32! *i32! *fp32! *i32! *i64! i32! i32! i32! i32! i32!"
_RETURN = "*bf16! *i32! *i32! *i64! *i64! i32! i32!"
_SUM = "*bf16! {}! *fp32! *bf16! *bf16! i32!"
_WAIT_ROWS = (
    "*i64! *i64! *i32! *i64! *i64! *i32! *i32! *i64! *i32! *i32! *i32! *i32! *i64! *i64! *i32! "
    "i64! i32! i64"
)
_WAIT_OUTPUTS = "*i64! *i64! *i32! *i64! *i32! *i32! i64"
_PUT_ROWS = "i64 i64 i64 i64 i64 i64 *i32! *i32! *i64! i32 i32 i32 i32 i32 i32 i32 i32"
_PUT_OUTPUTS = "i64 *i32! *i32! i64 i64 *i32! i32 i32 i32 i32 i32 i32"
_LABEL = "*i32! *i32!"
_PADDED = {"RANKS_P2": 8, "SLOTS_P2": 32}
_IDS = ("*i64", "*i32")
"""Of choices: as `ExpertParallel` has them, and as a device's router gives them."""
_ROW = {"TOP": 8, "HIDDEN": 7168, "RECORD": 7392, "PART": 1024}

EXCHANGE = (
    *(
        Entry(
            "ep_dispatch",
            "choose_kernel",
            _CHOOSE.format(ids),
            {"MOST": most, "SLOTS": 32, "BLOCK": 2048, "COPIES": copies},
            {"num_warps": 4},
            variant=ids,
        )
        for most, copies in ((1, 1), (3, 4))
        for ids in _IDS
    ),
    *(
        Entry(
            "ep_dispatch",
            "number_kernel",
            _NUMBER.format(ids),
            {"RANKS": 8, "SLOTS": 32, "TOP": 8, "BLOCK": 256, "SLOTS_P2": 32, "TOP_P2": 8},
            {"num_warps": 8},
            variant=ids,
        )
        for ids in _IDS
    ),
    *(
        Entry(
            "ep_dispatch",
            "send_kernel",
            _SEND.format(ids),
            {"RANKS": 8, **_ROW, "RANKS_P2": 8, "TOP_P2": 8},
            variant=ids,
        )
        for ids in _IDS
    ),
    *(
        Entry(
            "ep_dispatch",
            "spread_kernel",
            _SPREAD,
            {
                "RANKS": 8,
                "SLOTS": 32,
                **_ROW,
                "PART": part,
                "RANKS_P2": 8,
                "CONTIGUOUS": contiguous,
            },
        )
        for contiguous in (False, True)
        for part in (1024, 7168)
    ),
    Entry("ep_dispatch", "label_kernel", _LABEL, {"SLOTS": 32, "SLOTS_P2": 32, "ALIGN": 128}),
    *(
        Entry(
            "ep_combine",
            "return_kernel",
            _RETURN,
            {"RANKS": 8, "SLOTS": 32, "HIDDEN": 7168, "PART": 1024, **_PADDED, "ALIGN": align},
        )
        for align in (0, 128)
    ),
    *(
        Entry(
            "ep_combine",
            "sum_kernel",
            _SUM.format(ids),
            {"TOP": 8, "HIDDEN": 7168, "PART": 1024, "PLUS": True},
            {"enable_fp_fusion": False},
            variant=ids,
        )
        for ids in _IDS
    ),
    *(
        Entry(
            "ep_wait",
            "wait_rows_kernel",
            _WAIT_ROWS,
            {"RANKS": 8, "SLOTS": 32, **_PADDED, "ALIGN": align, "CLOCK": True},
        )
        for align in (0, 128)
    ),
    Entry(
        "ep_wait",
        "wait_outputs_kernel",
        _WAIT_OUTPUTS,
        {"RANKS": 8, "RANKS_P2": 8, "CLOCK": True},
    ),
)

PUTS = (
    Entry("ep_put", "put_rows_kernel", _PUT_ROWS, {}, {"num_warps": 8}),
    Entry("ep_put", "put_outputs_kernel", _PUT_OUTPUTS, {"SLOTS_P2": 256}, {"num_warps": 8}),
)
