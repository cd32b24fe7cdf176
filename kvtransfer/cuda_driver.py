"""The calls of the CUDA driver that move pages between processes, through ctypes.

The driver's library is used rather than the runtime's: it is the same file name whatever CUDA torch
was built for, its streams and events are the runtime's, and it says where an allocation begins.
Prototypes and constants: cuda.h, "Unified Addressing", "Memory Management", "Event Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.device_memory import Copy, DeviceError, ExportedPool, SideStream

HANDLE_BYTES = 64
NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE: of a copy of rows, also that its pitch is too large."""
UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says whose memory it is."""
MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED; older drivers do not know it."""
IPC_CAPABLE = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: work on it does not wait for the default stream, nor that for it."""
WAITS_ASLEEP = 1 | 2
"""CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING."""
LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
DEFAULT_STREAM = 0
"""Where torch computes unless told otherwise."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class DeviceUuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(("srcXInBytes", c_size_t), ("srcY", c_size_t), ("srcMemoryType", c_uint)),
        *(("srcHost", c_void_p), ("srcDevice", c_uint64), ("srcArray", c_void_p)),
        ("srcPitch", c_size_t),
        *(("dstXInBytes", c_size_t), ("dstY", c_size_t), ("dstMemoryType", c_uint)),
        *(("dstHost", c_void_p), ("dstDevice", c_uint64), ("dstArray", c_void_p)),
        ("dstPitch", c_size_t),
        *(("WidthInBytes", c_size_t), ("Height", c_size_t)),
    )


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(DeviceUuid), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(Memcpy2D), c_void_p),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


class CudaMemory:
    """A CUDA device as this process uses it, in its primary context, which is torch's.

    Args:
        ordinal: number of the device among those that this process sees.
        library: the driver; loaded from ``libcuda.so.1`` by default.

    Raises:
        DeviceError: there is no driver or device, or the device is shared through MPS: its server
            then does the work of processes that are gone.
    """

    def __init__(self, ordinal: int, library: Any = None) -> None:
        self.driver = Driver(library if library is not None else _loaded())
        call = self.driver
        call("cuInit", c_uint(0))
        self.ordinal = ordinal
        self._device = call.device(ordinal)
        self.uuid = call.uuid(self._device)
        self._refuse_mps()
        self._context = c_void_p()
        call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._side = SideStream(ordinal)

    def holds(self, store: LatentStore) -> bool:
        device = store.tensor.device
        return device.type == "cuda" and device.index == self.ordinal

    def export(self, store: LatentStore) -> ExportedPool:
        return self.lend(store.tensor.data_ptr(), store.num_pages * store.page_bytes, "the pages")

    def lend(self, address: int, size: int, what: str) -> ExportedPool:
        self.enter()
        at, capable = c_uint64(address), c_uint64(0)
        self.driver("cuPointerGetAttribute", byref(capable), c_int(IPC_CAPABLE), at)
        if not capable.value:
            raise DeviceError(
                f"{what} are in memory that CUDA shares with no other process; leave"
                " expandable_segments and cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"
            )
        base, whole, handle = c_uint64(), c_size_t(), IpcHandle()
        self.driver("cuMemGetAddressRange_v2", byref(base), byref(whole), at)
        offset = at.value - base.value
        if offset + size > whole.value:
            raise DeviceError(f"{what} lie in more than one allocation")
        self.driver("cuIpcGetMemHandle", byref(handle), base)
        return ExportedPool(bytes(handle), offset, size, self.uuid)

    def open(self, pool: ExportedPool) -> int:
        if len(pool.handle) != HANDLE_BYTES:
            raise DeviceError(f"a memory handle of {len(pool.handle)} bytes")
        self.enter()
        self._check_peer(pool.device)
        base, handle = c_uint64(), IpcHandle.from_buffer_copy(pool.handle)
        self.driver("cuIpcOpenMemHandle_v2", byref(base), handle, c_uint(LAZY_PEER_ACCESS))
        return base.value + pool.offset

    def close(self, pool: ExportedPool, address: int) -> None:
        self.enter()
        self.driver("cuIpcCloseMemHandle", c_uint64(address - pool.offset))

    def lane(self) -> CudaLane:
        """Its copies go before what else of this process is ready to run: a layer that is computed
        leaves while the next one is, not behind it."""
        self.enter()
        stream, least, most = c_void_p(), c_int(), c_int()
        self.driver("cuCtxGetStreamPriorityRange", byref(least), byref(most))
        self.driver("cuStreamCreateWithPriority", byref(stream), c_uint(NON_BLOCKING), most)
        return CudaLane(self, stream)

    def staging(self, size: int) -> npt.NDArray[np.uint8]:
        pinned = torch.cuda.is_available()
        made: npt.NDArray[np.uint8] = torch.empty(
            size, dtype=torch.uint8, pin_memory=pinned
        ).numpy()
        return made

    def settle(self) -> None:
        self.mark(c_void_p(DEFAULT_STREAM)).wait()

    def aside(self) -> AbstractContextManager[None]:
        return self._side.entered()

    def enter(self) -> None:
        """Makes this thread's calls calls of the device."""
        self.driver("cuCtxSetCurrent", self._context)

    def mark(self, stream: c_void_p) -> CudaMark:
        """What has been queued on a stream so far."""
        self.enter()
        event = c_void_p()
        self.driver("cuEventCreate", byref(event), c_uint(WAITS_ASLEEP))
        made = CudaMark(self, event)
        self.driver("cuEventRecord", event, stream)
        return made

    def _refuse_mps(self) -> None:
        shared = c_int(0)
        try:
            self.driver("cuDeviceGetAttribute", byref(shared), c_int(MPS_ENABLED), self._device)
        except DeviceError:  # a driver that does not know the question
            return
        if shared.value:
            raise DeviceError("the device is shared through MPS")

    def _check_peer(self, uuid: str) -> None:
        """Raises if the device of that name is seen here and cannot be reached from this one."""
        call, count = self.driver, c_int()
        if uuid == self.uuid:
            return
        call("cuDeviceGetCount", byref(count))
        for other in (call.device(number) for number in range(count.value)):
            if call.uuid(other) == uuid:
                able = c_int()
                call("cuDeviceCanAccessPeer", byref(able), self._device, other)
                if not able.value:
                    raise DeviceError(f"{self.uuid} cannot reach the memory of {uuid}")


class CudaLane:
    """A stream that waits for no other but those it is told to follow."""

    def __init__(self, memory: CudaMemory, stream: c_void_p) -> None:
        self._memory = memory
        self._stream = stream

    def follow(self, ready: torch.cuda.Event) -> None:
        self._memory.enter()
        event = c_void_p(ready.cuda_event)
        self._memory.driver("cuStreamWaitEvent", self._stream, event, c_uint(0))

    def copy(self, copies: Sequence[Copy]) -> None:
        self._memory.enter()
        call, stream = self._memory.driver, self._stream
        for one in copies:
            if one.rows > 1 and self._rows(one):
                continue
            size = c_size_t(one.size)
            for row in range(one.rows):
                target = c_uint64(one.target + row * one.target_pitch)
                source = c_uint64(one.source + row * one.source_pitch)
                call("cuMemcpyAsync", target, source, size, stream)

    def _rows(self, one: Copy) -> bool:
        """Queues all rows by one call; False if the driver takes none of it that way."""
        what = Memcpy2D(
            srcMemoryType=UNIFIED,
            srcDevice=one.source,
            srcPitch=one.source_pitch,
            dstMemoryType=UNIFIED,
            dstDevice=one.target,
            dstPitch=one.target_pitch,
            WidthInBytes=one.size,
            Height=one.rows,
        )
        call = self._memory.driver
        return call("cuMemcpy2DAsync_v2", byref(what), self._stream, also=INVALID_VALUE) == 0

    def record(self) -> CudaMark:
        return self._memory.mark(self._stream)

    def close(self) -> None:
        self._memory.enter()
        self._memory.driver("cuStreamDestroy_v2", self._stream)


class CudaMark:
    """An event. It is destroyed once somebody has waited for it."""

    def __init__(self, memory: CudaMemory, event: c_void_p) -> None:
        self._memory = memory
        self._event: c_void_p | None = event

    @property
    def done(self) -> bool:
        if self._event is None:
            return True
        self._memory.enter()
        return self._memory.driver("cuEventQuery", self._event, also=NOT_READY) != NOT_READY

    def wait(self) -> None:
        if self._event is not None:
            self._memory.enter()
            self._memory.driver("cuEventSynchronize", self._event)
            event, self._event = self._event, None
            self._memory.driver("cuEventDestroy_v2", event)

    def __del__(self) -> None:
        if self._event is not None:  # on any thread: its context is left as it is
            with suppress(DeviceError):
                self._memory.driver("cuEventDestroy_v2", self._event)


class Driver:
    """The driver's functions by name; a result that is an error is raised, in its words."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise DeviceError(f"the CUDA driver is too old: it has no {name}") from None
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function

    def __call__(self, name: str, *arguments: Any, also: int = 0) -> int:
        """Calls a function; returns its result, which is 0 or ``also``.

        Raises:
            DeviceError: it is another.
        """
        result = int(self._functions[name](*arguments))
        if result not in (0, also):
            text = c_char_p()
            self._functions["cuGetErrorString"](c_int(result), byref(text))
            said = text.value.decode(errors="replace") if text.value else f"error {result}"
            raise DeviceError(f"{name}: {said}")
        return result

    def device(self, ordinal: int) -> c_int:
        """A device by its number in this process."""
        found = c_int()
        self("cuDeviceGet", byref(found), c_int(ordinal))
        return found

    def uuid(self, device: c_int) -> str:
        """A device's name, the same in every process of the host."""
        found = DeviceUuid()
        self("cuDeviceGetUuid_v2", byref(found), device)
        return f"GPU-{UUID(bytes=bytes(found))}"


def _loaded() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("there is no CUDA driver here (libcuda.so.1)") from error
