"""What is in memory at a time while a model computes, and a device's operations without numbers."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pdmesh.kernels.backends import PLAIN, Backends, Choice
from pdmesh.kernels.quantised import Rows, new_scales
from pdmesh.kernels.routing import Permuted, Routing
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import ShapeSource

META = torch.device("meta")
PAGE = 64
MIB = 1 << 20


class Live(TorchDispatchMode):
    """Follows the tensors that are made while it is entered: bytes there now, and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tree_map_only(torch.Tensor, lambda given: self._note(given, 0), (args, kwargs))
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda t: self._note(t, t.untyped_storage().nbytes()), made)
        return made

    def _note(self, tensor, size):
        """Counts memory that was not known; what was there before is of size 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)
        return tensor

    def _gone(self, key, size):
        self._known.discard(key)
        self.now -= size


class Pieces(Live):
    """What torch's allocator of a device reserves for them, too: segments are never given back, a
    tensor takes the smallest free piece that it fits in, and what it leaves is a piece again."""

    def __init__(self):
        super().__init__()
        self.reserved = 0
        self._segments = {True: [], False: []}  # small ones and others: pieces [size, free]
        self._where = {}

    def _note(self, tensor, size):
        key = tensor.untyped_storage()._cdata
        if key not in self._known and size:
            self._where[key] = self._placed(-(-size // 512) * 512)
        return super()._note(tensor, size)

    def _placed(self, size):
        small = size <= MIB
        fitting = [
            (piece[0], number, piece, segment)
            for number, segment in enumerate(self._segments[small])
            for piece in segment
            if piece[1] and piece[0] >= size
        ]
        if fitting:
            _, _, piece, segment = min(fitting, key=lambda found: found[:2])
        else:
            step = 2 * MIB if small or size >= 10 * MIB else 20 * MIB
            piece = [-(-size // step) * step, True]
            segment = [piece]
            self._segments[small].append(segment)
            self.reserved += piece[0]
        left, piece[1] = piece[0] - size, False
        if left > (511 if small else MIB):
            piece[0] = size
            segment.insert(_at(segment, piece) + 1, [left, True])
        return segment, piece

    def _gone(self, key, size):
        super()._gone(key, size)
        if not size:
            return
        segment, piece = self._where.pop(key)
        piece[1], at = True, _at(segment, piece)
        for before in (at, at - 1):
            if 0 <= before < len(segment) - 1 and segment[before][1] and segment[before + 1][1]:
                segment[before][0] += segment.pop(before + 1)[0]


def _at(segment, piece):
    return next(i for i, one in enumerate(segment) if one is piece)


def _quantised(x, *shape):
    """Rows of a shape beside x."""
    values = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    return Rows(values, new_scales(*shape[:-1], -(-shape[-1] // 128), device=x.device))


def _product(x, weight, *_, out=None):
    if out is not None:
        return out
    shape = (*x.values.shape[:-1], weight.values.shape[-2])
    return x.values.new_empty(shape, dtype=torch.bfloat16)


def _normed(x, *_):
    return _quantised(x, *x.shape), torch.empty_like(x)


def _activated(x, *_):
    return _quantised(x, *x.shape[:-1], x.shape[-1] // 2)


def _routed(x, weight, bias, rule, num_rows=None):
    work = x.new_empty((8 if x.shape[0] < 512 else 1, x.shape[0], rule.num_experts)).float()
    ids = x.new_empty((x.shape[0], rule.top_k), dtype=torch.int32)
    counts = ids.new_empty(rule.num_experts)
    del work
    return Routing(ids, ids.float(), counts, counts.clone(), ids.clone())


def _masked(x, ids, places, experts, rows):
    return Permuted(_quantised(x.values, experts, rows, x.values.shape[1]), ids.clone(), None)


def _contiguous(x, ids, places, counts, capacity):
    moved = _quantised(x.values, capacity, x.values.shape[1])
    return Permuted(moved, ids.clone(), ids.new_empty(capacity))


def _decoded(query, pages, page_table, lengths, rows, scale, *, rank=512, first_key=0):
    """With the partial sums in float32 that FlashMLA allocates: of each sequence and processor."""
    pairs = rows * query.shape[1]
    parts = lengths.shape[0] + max(1, 132 // -(-pairs // 64))
    partial = query.new_empty((parts, pairs, rank + 1), dtype=torch.float32)
    seen = query.new_empty((*query.shape[:2], rank))
    del partial
    return seen


CALLS = {
    "rms_norm": lambda x, *_: torch.empty_like(x),
    "rms_norm_quantise": _normed,
    "add_rms_norm_quantise": lambda x, *_: _normed(x),
    "quantise_rows": lambda x: _quantised(x, *x.shape),
    "silu_mul_quantise": _activated,
    "masked_silu_mul_quantise": _activated,
    "fp8_gemm": _product,
    "masked_grouped_gemm": _product,
    "contiguous_grouped_gemm": _product,
    "absorb_query": lambda x, weight, rotated, _: x.new_empty(
        (*x.shape[:2], weight.values.shape[1] + rotated.shape[2])
    ),
    "project_values_quantise": lambda x, w: _quantised(x, x.shape[0], w.values[..., 0].numel()),
    "rope_append": lambda rope, *_, out, **__: out,
    "gate_topk": _routed,
    "permute_masked": _masked,
    "permute_contiguous": _contiguous,
    "unpermute": lambda parts, ids, *_: parts.new_empty((ids.shape[0], parts.shape[-1])),
    "join_keys": lambda own, shared: own.new_empty(
        (*own.shape[:2], own.shape[2] + shared.shape[1])
    ),
    "mla_decode": _decoded,
    "mla_prefill": lambda query, key, value, *_: query.new_empty(
        (*query.shape[:2], value.shape[2])
    ),
}


def shapes_only(config, mtp=True):
    """A model that has shapes and makes tensors as a device's kernels do, but no numbers."""
    assert CALLS.keys() == PLAIN.keys()
    ops = Backends([Choice(op, "shapes", "for a test", call) for op, call in CALLS.items()])
    return DeviceModel(config, build_weights(config, ShapeSource(None, config), META, mtp), ops)


def batch_of(pieces, device=META):
    """Sequences of (first position computed, end), all over the same pages."""
    table = tuple(range(-(-max(end for _, end in pieces) // PAGE)))
    items = [SequenceSlice(table, start, end, end) for start, end in pieces]
    return Batch.build(items, [[0] * (end - start) for start, end in pieces], PAGE, device)


def run(model, pieces, form, packed=False):
    """A step and the MTP layer's behind it."""
    pool = model.new_latents(1, PAGE, packed)
    hidden = model.forward(batch_of(pieces), pool, form)
    later = [(max(1, start), end) for start, end in pieces]
    previous = hidden[: sum(end - start for start, end in later)]
    model.mtp_forward(batch_of(later), previous, pool, form)


def peak_of(model, pieces, form, packed=False):
    """Bytes that a step takes at most, its batch included."""
    with Live() as live:
        run(model, pieces, form, packed)
    return live.peak
