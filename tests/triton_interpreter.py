"""Triton's interpreter with the conversions and products of a device.

As it comes, it truncates float32 to bfloat16, loses mantissa carries on the way to FP8, and
multiplies the bit patterns of bfloat16 in tl.dot (seen with 3.6.0 to 3.9.0). `install` puts torch's
conversions in their place. That of 3.6.0 also ends at a loop whose bounds are known to the kernel
alone, where numpy is 2.4 or later. It has to be called before a kernel runs.
"""

from __future__ import annotations

import os

import numpy as np
import torch


def install() -> None:
    """Has no effect unless TRITON_INTERPRET is 1."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    if getattr(interpreter, "_as_torch_converts", False):
        return
    interpreter._as_torch_converts = True
    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
    }
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32}
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    array = {1: np.uint8, 2: np.int16, 4: np.int32}
    as_it_comes = interpreter._convert_float

    def convert(values, source, target, rounding):
        source, target = source.scalar, target.scalar
        nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if not (nearest and source in dtypes and target in dtypes):
            return as_it_comes(values, source, target, rounding)
        read, written = source.primitive_bitwidth // 8, target.primitive_bitwidth // 8
        bits = torch.from_numpy(np.ascontiguousarray(values).view(array[read]).copy())
        converted = bits.view(dtypes[source]).to(dtypes[target]).contiguous()
        plain = converted.view(signed[written]).numpy().view(unsigned[written * 8])
        return plain.reshape(values.shape)

    def widened(handle):
        dtype = handle.dtype.scalar
        if dtype == tl.bfloat16 or (dtype.primitive_bitwidth == 8 and dtype.is_floating()):
            return convert(handle.data, dtype, tl.float32, None).view(np.float32)
        return handle.data

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    as_it_is_patched = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        as_it_is_patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
