"""Runs a GPU benchmark to its end on the CPU: what is wrong in it but its figures shows here.

    python -P stand_in_device.py CASE [words of its command line]

"cuda" means the CPU, a graph is recorded by running it once, every wait is over and every event
lies a millisecond behind the one before. Libraries, CUDA C++ and, but for the cases that say
otherwise, Triton kernels are replaced by the definitions of `pdmesh.kernels`, sizes by tiny ones.
Whether a kernel is right is for other tests.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench"), str(ROOT / "tests")]

import torch  # noqa: E402 - the path is set above
import triton_interpreter  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

CPU = torch.device("cpu")


def here(value):
    """A device of CUDA as the CPU, anything else as it is."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


class OnTheCpu(TorchFunctionMode):
    """Every call that names CUDA gets the CPU."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        if function is torch.device:
            return function(*arguments, **(keywords or {}))
        if name in ("cuda", "pin_memory"):
            return arguments[0]
        keywords = {key: here(value) for key, value in (keywords or {}).items()}
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        if function is torch.mm and "out_dtype" in keywords:  # which the CPU has not
            return function(*arguments).to(keywords["out_dtype"])
        return function(*(here(value) for value in arguments), **keywords)


class Event:
    count = 0

    def __init__(self, **_):
        self.at = 0

    def record(self, *_):
        Event.count += 1
        self.at = Event.count

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        assert self.at, "an event that nobody recorded"
        assert later.at > self.at, "an event before its beginning"
        return float(later.at - self.at)


class Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other):
        assert isinstance(other, Stream)

    def wait_event(self, event):
        assert event.at, "waits for an event that nobody recorded"

    def synchronize(self):
        pass


class Graph:
    def replay(self):
        pass


@contextlib.contextmanager
def nothing(*_, **__):
    yield


class Profile:
    """Saw two kernels, half a microsecond apart."""

    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        spans = (SimpleNamespace(start=a, end=a + 1.0) for a in (1.0, 2.5))
        return [SimpleNamespace(time_range=span, device_type="DeviceType.CUDA") for span in spans]

    def key_averages(self):
        return [SimpleNamespace(key="a_kernel", count=2, self_device_time_total=2.0)]


def stand_in():
    """Puts the CPU where CUDA is asked for, for the rest of the process."""
    triton_interpreter.install()
    generator = torch.Generator
    current = Stream()
    for name, value in {
        "is_available": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda *_: "stand-in",
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda *_: current,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": nothing,
        "stream": nothing,
    }.items():
        setattr(torch.cuda, name, value)
    torch.Generator = type("Generator", (), {"__new__": lambda cls, device="cpu": generator("cpu")})
    torch.profiler.profile = Profile
    OnTheCpu().__enter__()


def by_definition(definition):
    """It, with the keywords of a fast one; what is asked for in `out` is written there."""
    known = list(inspect.signature(definition).parameters.values())
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in known)
    names = {p.name for p in known}

    def call(*arguments, out=None, **keywords):
        kept = {name: value for name, value in keywords.items() if name in names}
        result = definition(*arguments[:positional], **kept)
        if out is None:
            return result
        pairs = (
            [(out, result)] if isinstance(result, torch.Tensor) else zip(out, result, strict=False)
        )
        for into, value in pairs:
            if isinstance(into, torch.Tensor) and into.shape == value.shape:
                into.copy_(value)
        return result

    return call


def definitions(triton=True):
    """Puts definitions where libraries and kernels are."""
    from pdmesh.kernels import (
        cublaslt_backend,
        cuda_absorbed,
        cuda_gate,
        cuda_gemm,
        deep_gemm_backend,
        flash_mla_backend,
        flashinfer_backend,
        hopper_mla,
        mla_reference,
        quantised,
        rope_append,
        routing,
    )

    places = [
        (cublaslt_backend, quantised),
        (cuda_absorbed, quantised),
        (cuda_gate, routing),
        (cuda_gemm, quantised),
        (deep_gemm_backend, quantised),
        (hopper_mla, mla_reference),
    ]
    if triton:
        own = {
            "absorbed": quantised,
            "norm": quantised,
            "quantise": quantised,
            "splitk_gemm": quantised,
            "grouped_gemm": quantised,
            "mla_decode": mla_reference,
            "mla_prefill": mla_reference,
            "rope_append": rope_append,
            "permute": routing,
            "gate": routing,
        }
        for name, module in own.items():
            places.append((importlib.import_module(f"pdmesh.kernels.triton.{name}"), module))
    for module, where in places:
        for name, definition in vars(where).items():
            if inspect.isfunction(definition) and callable(vars(module).get(name)):
                setattr(module, name, by_definition(definition))
        if hasattr(module, "unavailable"):
            module.unavailable = lambda: None
    deep_gemm_backend.unavailable = lambda: "its settings are a device's"
    cuda_gemm.clusters = lambda tile: 8
    flash_mla_backend.unavailable = flashinfer_backend.unavailable = lambda: None
    flash_mla_backend.Plan, flashinfer_backend.Decode = FlashMla, FlashInferDecode
    flashinfer_backend.Prefill = FlashInferPrefill


def decode(*arguments):
    from pdmesh.kernels import mla_reference

    return mla_reference.mla_decode(*arguments)


class FlashMla:
    def __init__(self, lengths, rows, heads, *, fp8=False):
        self.of = lengths.clone(), rows, heads

    def refresh(self, lengths):
        assert lengths.shape == self.of[0].shape

    def decode(self, query, pages, table, lengths, rows, scale, **_):
        assert self.of[1:] == (rows, query.shape[1])
        return decode(query, pages, table, lengths, rows, scale)


class FlashInferDecode:
    def __init__(self, workspace, sequences, max_pages, *, graph=False):
        self.most = sequences, max_pages

    def plan(self, table, lengths, rows, heads, page, scale):
        assert table.shape[0] <= self.most[0]
        assert table.shape[1] <= self.most[1]
        self.planned = table, lengths, rows, scale

    def run(self, query, pages, *, out=None):
        result = decode(query, pages, *self.planned)
        return result if out is None else out.copy_(result)


class FlashInferPrefill:
    def __init__(self, workspace):
        assert workspace.dtype == torch.uint8

    def plan(self, query_starts, key_starts, heads, widths, scale):
        self.planned = query_starts, key_starts, scale

    def run(self, query, key, value, *, out=None):
        from pdmesh.kernels import mla_reference

        result = mla_reference.mla_prefill(query, key, value, *self.planned)
        return result if out is None else out.copy_(result)


def small_layers():
    """Sizes of a layer that a CPU computes in no time."""
    import bounds

    sizes = {"HIDDEN": 256, "HEADS": 2, "Q_LORA": 128, "WIDTH": 128, "DENSE_WIDTH": 128}
    vars(bounds).update(sizes, VOCABULARY=256)
    definitions()
    import gpu_timing

    gpu_timing.replay_times.__defaults__ = (1,)
    gpu_timing.rested.__defaults__ = (1, 0.0)


class Again(Graph):
    """A graph whose first replay computes again."""

    def __init__(self, function):
        self.function, self.kept = function, function()

    def replay(self):
        if self.function is not None:
            self.kept, self.function = self.function(), None


def smaller(rank):
    def make(name, ranks, batch=2, query=2, kv=70, heads=2, senders=1):
        return rank(name, ranks, batch, query, min(kv, 70), min(heads, 2), senders)

    return make


def gpu_layer():
    small_layers()
    import gpu_layer as bench
    import gpu_modes

    gpu_modes.capture = Again
    make = smaller(bench.Rank)
    names = {"ep128": ("EP128", 128), "ep8": ("EP8", 64), "tp8": ("EP8 TP8", 64)}
    bench.RANKS = {key: make(*words) for key, words in names.items()}
    bench.SETS = dict.fromkeys(names, 2)
    bench.compile_products = lambda jobs: None
    return bench.main


def roofline():
    small_layers()
    import roofline as bench

    bench.BATCHES, bench.EXPERT_RANKS, bench.CACHE = (1, 2), (64, 128), 1 << 17
    bench.DENSE = {"qkv_a": (704, 256), "q_a": (128, 256)}
    bench.GROUPED = {"routed_up": (256, 256), "routed_down": (256, 128)}
    rank = bench.Rank
    bench.Rank = lambda name, ranks, batch=128: rank(name, ranks, batch, 2, 5)
    bench.compile_products = lambda jobs, processes: None
    return bench.main


def gpu_prefill():
    small_layers()
    import gpu_prefill as bench

    bench.EP = 64
    return bench.main


def gpu_overlap():
    small_layers()
    import gpu_overlap as bench

    class Launcher:
        def __getitem__(self, grid):
            return lambda *_, **__: None

    bench.mark_kernel = bench.hold_kernel = Launcher()
    bench.Rank, bench.CHOSEN_AT = smaller(bench.Rank), (2, 4)
    bench.compile_products = lambda jobs, processes: None
    return bench.main


def gpu_gemm():
    import gemm_cases

    definitions()
    gemm_cases.SHAPES = {"qkv_a": (576, 256), "o_proj": (256, 512)}
    gemm_cases.copies = lambda size: 2
    import gemm_tune
    import gpu_gemm as bench

    bench.GROUPS = [(2, 4, 256, 256)]
    import gemm_sorted

    gemm_sorted.EXPERTS, gemm_sorted.SHAPES = {3: (5,)}, ((128, 256),)
    gemm_sorted.FEW, gemm_sorted.ROWS = (4, 2), (1, 3)
    gemm_tune.CLUSTERS = {name: gemm_tune.CLUSTERS[name] for name in gemm_cases.SHAPES}
    return bench.main


def gpu_mla():
    definitions()
    import gpu_mla as bench

    bench.KV, bench.PER, bench.MOST, bench.LAYERS = 70, 2, 4, 2
    bench.CASES = [(4, 2, 4), (2, 1, 2)]
    return bench.main


def gpu_mla_prefill():
    definitions()
    import gpu_mla_prefill as bench

    bench.HEADS = 4
    forms, chunks = bench.forms, bench.chunks
    bench.forms = lambda lengths, space: forms((128, 256), space)
    bench.chunks = lambda total, sizes, space: chunks(256, (128, 64), space)
    return bench.main


def gpu_small():
    """With Triton's kernels in its interpreter."""
    import gpu_small_cases as cases

    cases.HIDDEN, cases.DEVICE = 256, "cpu"
    import gpu_small as bench
    import gpu_small_routing as routing

    routing.EXPERTS, routing.TOP = 16, 4
    routing.V3 = routing.GateRule("noaux_tc", 16, 4, 4, 2, True, 2.5)
    bench.CASES = (
        *(cases.norm_case(2, 256, add, add) for add in (False, True)),
        cases.norm_case(2, 128, False, False),
        *(case(2, 128) for case in (cases.rows_case, cases.silu_case)),
        cases.masked_silu_case(2, 4, 2),
        *(cases.rope_case(2, packed, 2) for packed in (False, True)),
    )
    bench.ROUTING = (
        *(routing.gate_case(2, wide) for wide in (False, True)),
        *(routing.stage_case(2, stage) for stage in ("project", "choose", "place")),
        *(routing.permute_case(2, contiguous) for contiguous in (False, True)),
        routing.unpermute_case(2),
        *(routing.sample_case(2, kind, 600) for kind in ("greedy", "random", "top_p")),
    )
    bench.copy_bandwidth = lambda: 1e12
    bench.graph_time = lambda calls, repeat: (calls[0](), 1e-6)[1]
    bench.eager_time = lambda call: (call(), 1e-5)[1]
    return bench.main


def gpu_engine():
    import gpu_engine as bench
    import node_dry

    bench.full_width = lambda layers, experts: node_dry.tiny_config()
    bench.choose_backends = lambda *_: node_dry.plain_ops()
    return bench.main


if __name__ == "__main__":
    stand_in()
    name = sys.argv.pop(1)
    sys.exit(globals()[name]()())
