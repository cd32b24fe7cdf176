"""The driver's calls: what they are given, checked against a library that notes it down."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer import cuda_driver
from pdmesh.kvtransfer.cuda_driver import (
    INVALID_VALUE,
    IPC_CAPABLE,
    MPS_ENABLED,
    NOT_READY,
    PROTOTYPES,
    CudaMemory,
    IpcHandle,
)
from pdmesh.kvtransfer.device_memory import Copy, DeviceError, ExportedPool

HANDLE = bytes(range(64))
UUIDS = [bytes([n]) * 16 for n in range(3)]
ROWS = Copy((1 << 47) + 3, (1 << 46) + 5, 700, 9, (1 << 33) + 1, (1 << 32) + 1)
"""A copy of rows whose every number is another."""
HEADERS = [Path("/usr/local/cuda/include"), Path("/usr/include")]


def name_of(uuid):
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Function:
    """One function of the driver: takes only what fits its prototype, and notes it down."""

    def __init__(self, library, name):
        self.library, self.name = library, name
        self.argtypes, self.restype = None, None

    def __call__(self, *arguments):
        assert self.restype is c_int
        assert len(arguments) == len(self.argtypes) == len(PROTOTYPES[self.name]), self.name
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            pointed = getattr(argument, "_obj", None)
            if pointed is None:
                assert type(argument) is kind, (self.name, argument, kind)
            else:
                assert kind is c_void_p or type(pointed) is kind._type_, (self.name, pointed, kind)
        values = [getattr(a, "_obj", a) for a in arguments]
        return self.library.called(self.name, values)


class Library:
    """A driver with three devices, of which 0 and 1 reach each other."""

    def __init__(self, without=()):
        self.calls = []
        self.results = {}
        self.capable, self.mps, self.base, self.whole = 1, 0, 0, 1 << 40
        for name in set(PROTOTYPES) - set(without):
            setattr(self, name, Function(self, name))

    def called(self, name, values):
        plain = [
            bytes(v) if isinstance(v, IpcHandle) else getattr(v, "value", v) or 0 for v in values
        ]
        self.calls.append((name, *plain))
        if self.results.get(name):
            return self.results[name]
        match name:
            case "cuGetErrorString":
                values[1].value = b"the device said no"
            case "cuDeviceGetCount":
                values[0].value = 3
            case "cuDeviceGet":
                values[0].value = values[1].value + 10
            case "cuDeviceGetUuid_v2":
                ctypes.memmove(ctypes.byref(values[0]), UUIDS[values[1].value - 10], 16)
            case "cuDeviceGetAttribute":
                assert values[1].value == MPS_ENABLED
                values[0].value = self.mps
            case "cuDeviceCanAccessPeer":
                values[0].value = int(12 not in (values[1].value, values[2].value))
            case "cuPointerGetAttribute":
                assert values[1].value == IPC_CAPABLE
                values[0].value = self.capable
            case "cuMemGetAddressRange_v2":
                values[0].value = self.base or values[2].value - 4096
                values[1].value = self.whole
            case "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.byref(values[0]), HANDLE, 64)
            case "cuIpcOpenMemHandle_v2":
                values[0].value = 0x7000_0000_0000
            case "cuCtxGetStreamPriorityRange":
                values[0].value, values[1].value = 0, -5
            case "cuDevicePrimaryCtxRetain" | "cuStreamCreateWithPriority" | "cuEventCreate":
                values[0].value = {"cuDevice": 77, "cuStream": 88, "cuEventC": 99}[name[:8]]
        return 0

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def store():
    return LatentStore(4, 2, 4, 3, torch.float32)


def test_a_pool_is_exported_as_an_allocation_and_its_place_there():
    library = Library()
    memory, pages = CudaMemory(1, library), store()
    pool = memory.export(pages)
    assert pool == ExportedPool(HANDLE, 4096, 4 * pages.page_bytes, name_of(UUIDS[1]))
    assert library.named("cuDevicePrimaryCtxRetain") == [(0, 11)]
    assert library.named("cuIpcGetMemHandle")[0][1] == pages.tensor.data_ptr() - 4096
    order = [call[0] for call in library.calls]
    assert order.index("cuCtxSetCurrent") < order.index("cuPointerGetAttribute")


def test_memory_that_cannot_be_lent_is_named_in_the_sentence():
    library = Library()
    memory = CudaMemory(0, library)
    assert memory.lend(8192, 100, "the weights") == ExportedPool(
        HANDLE, 4096, 100, name_of(UUIDS[0])
    )
    library.whole = 4196 - 1
    with pytest.raises(DeviceError, match="^the weights lie in more than one allocation$"):
        memory.lend(8192, 100, "the weights")
    library.capable = 0
    with pytest.raises(DeviceError, match="^the weights are in memory that CUDA shares with no"):
        memory.lend(8192, 100, "the weights")


def test_a_pool_is_opened_with_its_handle_by_value_and_closed_by_its_allocation():
    library = Library()
    memory = CudaMemory(0, library)
    pool = ExportedPool(HANDLE, 512, 100, name_of(UUIDS[0]))
    address = memory.open(pool)
    assert address == 0x7000_0000_0000 + 512
    assert library.named("cuIpcOpenMemHandle_v2") == [(0, HANDLE, 1)]
    memory.close(pool, address)
    assert library.named("cuIpcCloseMemHandle") == [(0x7000_0000_0000,)]
    assert not library.named("cuDeviceCanAccessPeer"), "it is the same device"


@pytest.mark.parametrize(("number", "able"), [(1, True), (2, False)])
def test_a_pool_of_another_device_is_opened_if_this_one_reaches_it(number, able):
    library = Library()
    memory = CudaMemory(0, library)
    pool = ExportedPool(HANDLE, 0, 100, name_of(UUIDS[number]))
    if able:
        assert memory.open(pool)
    else:
        with pytest.raises(DeviceError, match=f"cannot reach the memory of {name_of(UUIDS[2])}"):
            memory.open(pool)
        assert not library.named("cuIpcOpenMemHandle_v2")
    assert library.named("cuDeviceCanAccessPeer") == [(0, 10, 10 + number)]


def test_a_device_that_is_not_seen_here_is_left_to_the_driver():
    library = Library()
    assert CudaMemory(0, library).open(ExportedPool(HANDLE, 0, 100, "GPU-elsewhere"))


class Event:
    cuda_event = 4711


def test_copies_go_on_a_stream_of_their_own_behind_the_event_they_follow():
    library = Library()
    lane = CudaMemory(0, library).lane()
    assert library.named("cuStreamCreateWithPriority") == [(0, 1, -5)], "not blocked, and ahead"
    library.calls.clear()
    lane.follow(Event())
    lane.copy([Copy(1 << 47, 2 << 40, 100), Copy(3, 4, 5 << 33)])
    mark = lane.record()
    assert [call for call in library.calls if call[0] != "cuCtxSetCurrent"] == [
        ("cuStreamWaitEvent", 88, 4711, 0),
        ("cuMemcpyAsync", 1 << 47, 2 << 40, 100, 88),
        ("cuMemcpyAsync", 3, 4, 5 << 33, 88),
        ("cuEventCreate", 0, 3),
        ("cuEventRecord", 99, 88),
    ]
    assert mark.done
    library.results["cuEventQuery"] = NOT_READY
    assert not mark.done
    mark.wait()
    assert library.named("cuEventSynchronize") == [(99,)]
    mark.wait()
    assert mark.done
    del mark
    assert library.named("cuEventDestroy_v2") == [(99,)]
    lane.record()
    assert len(library.named("cuEventDestroy_v2")) == 2
    lane.close()
    assert library.named("cuStreamDestroy_v2") == [(88,)]


def test_rows_go_by_one_call_and_one_by_one_where_the_driver_refuses_their_pitch():
    library = Library()
    lane = CudaMemory(0, library).lane()
    lane.copy([ROWS])
    assert len(library.named("cuMemcpy2DAsync_v2")) == 1
    assert not library.named("cuMemcpyAsync")
    library.results["cuMemcpy2DAsync_v2"] = INVALID_VALUE
    lane.copy([Copy(1000, 5000, 7, 3, 100, 200), Copy(1, 2, 3)])
    assert library.named("cuMemcpyAsync") == [
        (1000, 5000, 7, 88),
        (1100, 5200, 7, 88),
        (1200, 5400, 7, 88),
        (1, 2, 3, 88),
    ]
    library.results["cuMemcpy2DAsync_v2"] = 700
    with pytest.raises(DeviceError, match="cuMemcpy2DAsync_v2: the device said no"):
        lane.copy([ROWS])


def test_settling_waits_for_an_event_on_the_stream_that_computes():
    library = Library()
    CudaMemory(0, library).settle()
    assert library.named("cuEventRecord") == [(99, 0)]
    assert library.named("cuEventSynchronize") == [(99,)]


def test_every_thread_enters_the_devices_context_before_it_calls():
    library = Library()
    memory = CudaMemory(0, library)
    pool = ExportedPool(HANDLE, 0, 1, memory.uuid)
    lane = memory.lane()
    calls = [
        lambda: memory.open(pool),
        lambda: memory.close(pool, 1),
        lambda: memory.export(store()),
        lambda: lane.follow(Event()),
        lambda: lane.copy([Copy(1, 2, 3)]),
        lane.record,
        memory.settle,
        lane.close,
    ]
    for call in calls:
        library.calls.clear()
        call()
        assert library.calls[0] == ("cuCtxSetCurrent", 77)


def test_an_error_is_the_drivers_words():
    library = Library()
    memory = CudaMemory(0, library)
    library.results["cuIpcOpenMemHandle_v2"] = 400
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle_v2: the device said no"):
        memory.open(ExportedPool(HANDLE, 0, 100, memory.uuid))
    mark = memory.lane().record()
    library.results["cuEventQuery"] = library.results["cuEventSynchronize"] = 700
    for ask in (lambda: mark.done, mark.wait):
        with pytest.raises(DeviceError, match="the device said no"):
            ask()


def test_memory_that_cannot_be_shared_names_the_setting():
    library = Library()
    library.capable = 0
    with pytest.raises(DeviceError, match="leave expandable_segments and .* of PYTORCH_CUDA_ALLOC"):
        CudaMemory(0, library).export(store())


def test_pages_in_more_than_one_allocation_are_not_exported():
    library, pages = Library(), store()
    library.whole = 4096 + 4 * pages.page_bytes - 1
    with pytest.raises(DeviceError, match="more than one allocation"):
        CudaMemory(0, library).export(pages)


def test_a_handle_of_another_length_is_refused():
    with pytest.raises(DeviceError, match="a memory handle of 3 bytes"):
        CudaMemory(0, Library()).open(ExportedPool(b"abc", 0, 1, "x"))


def test_a_device_under_mps_is_refused_and_a_driver_that_knows_of_none_is_not():
    library = Library()
    library.mps = 1
    with pytest.raises(DeviceError, match="shared through MPS"):
        CudaMemory(0, library)
    library.results["cuDeviceGetAttribute"] = 1
    assert CudaMemory(0, library).uuid == name_of(UUIDS[0])


def test_a_driver_without_a_function_or_no_driver_at_all_is_a_sentence(monkeypatch):
    with pytest.raises(DeviceError, match="too old: it has no cuDeviceGetUuid_v2"):
        CudaMemory(0, Library(without=["cuDeviceGetUuid_v2"]))

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="there is no CUDA driver here"):
        CudaMemory(0)


def header():
    return next((folder for folder in HEADERS if (folder / "cuda.h").is_file()), None)


STUB = """
#include <string.h>
#include <cuda.h>
static unsigned long long seen[15];
unsigned long long probe(int at) { return seen[at]; }
_Static_assert(CU_IPC_HANDLE_SIZE == HANDLE_BYTES, "handle");
_Static_assert(CUDA_ERROR_NOT_READY == NOT_READY, "not ready");
_Static_assert(CUDA_ERROR_INVALID_VALUE == INVALID_VALUE, "invalid value");
_Static_assert(CU_MEMORYTYPE_UNIFIED == UNIFIED, "unified");
_Static_assert(CU_DEVICE_ATTRIBUTE_MPS_ENABLED == MPS_ENABLED, "mps");
_Static_assert(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE == IPC_CAPABLE, "capable");
_Static_assert(CU_STREAM_NON_BLOCKING == NON_BLOCKING, "stream");
_Static_assert((CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING) == WAITS_ASLEEP, "event");
_Static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == LAZY_PEER_ACCESS, "peer");
CUresult cuInit(unsigned int a) { return 0; }
CUresult cuGetErrorString(CUresult a, const char **b) { *b = "no"; return 0; }
CUresult cuDeviceGetCount(int *a) { *a = 1; return 0; }
CUresult cuDeviceGet(CUdevice *a, int b) { *a = b; return 0; }
CUresult cuDeviceGetUuid(CUuuid *a, CUdevice b) { memset(a, 7, sizeof *a); return 0; }
CUresult cuDeviceGetAttribute(int *a, CUdevice_attribute b, CUdevice c) { *a = 0; return 0; }
CUresult cuDeviceCanAccessPeer(int *a, CUdevice b, CUdevice c) { *a = 1; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *a, CUdevice b) { *a = (CUcontext)77; return 0; }
CUresult cuCtxSetCurrent(CUcontext a) { return a != (CUcontext)77; }
CUresult cuPointerGetAttribute(void *a, CUpointer_attribute b, CUdeviceptr c) {
  memset(a, 1, 1); return 0; }
CUresult cuMemGetAddressRange(CUdeviceptr *a, size_t *b, CUdeviceptr c) {
  *a = c - 4096; *b = (size_t)1 << 40; return 0; }
CUresult cuIpcGetMemHandle(CUipcMemHandle *a, CUdeviceptr b) {
  for (int i = 0; i < 64; i++) a->reserved[i] = i; return 0; }
CUresult cuIpcOpenMemHandle(CUdeviceptr *a, CUipcMemHandle b, unsigned int c) {
  for (int i = 0; i < 64; i++) if (b.reserved[i] != i) return 1;
  *a = 0x700000000000ull; seen[0] = c; return 0; }
CUresult cuIpcCloseMemHandle(CUdeviceptr a) { seen[1] = a; return 0; }
CUresult cuMemcpyAsync(CUdeviceptr a, CUdeviceptr b, size_t c, CUstream d) {
  seen[2] = a; seen[3] = b; seen[4] = c; seen[5] = (size_t)d; return 0; }
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *a, CUstream b) {
  if (a->srcMemoryType != CU_MEMORYTYPE_UNIFIED || a->dstMemoryType != CU_MEMORYTYPE_UNIFIED)
    return 1;
  if (a->srcXInBytes || a->srcY || a->dstXInBytes || a->dstY) return 1;
  seen[8] = a->dstDevice; seen[9] = a->srcDevice; seen[10] = a->WidthInBytes;
  seen[11] = a->Height; seen[12] = a->dstPitch; seen[13] = a->srcPitch; seen[14] = (size_t)b;
  return 0; }
CUresult cuCtxGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
CUresult cuStreamCreateWithPriority(CUstream *a, unsigned int b, int c) {
  *a = (CUstream)(b + (1ull << 40)); return c != -5; }
CUresult cuStreamWaitEvent(CUstream a, CUevent b, unsigned int c) { seen[6] = (size_t)b; return 0; }
CUresult cuStreamDestroy(CUstream a) { return a != (CUstream)((1ull << 40) + 1); }
CUresult cuEventCreate(CUevent *a, unsigned int b) { *a = (CUevent)(b + (1ull << 41)); return 0; }
CUresult cuEventRecord(CUevent a, CUstream b) { seen[7] = (size_t)b; return 0; }
CUresult cuEventQuery(CUevent a) { return CUDA_ERROR_NOT_READY; }
CUresult cuEventSynchronize(CUevent a) { return a != (CUevent)((1ull << 41) + 3); }
CUresult cuEventDestroy(CUevent a) { return 0; }
"""


@pytest.mark.skipif(
    header() is None or shutil.which("gcc") is None, reason="there is no cuda.h or no compiler here"
)
def test_the_prototypes_are_those_of_the_drivers_header(tmp_path):
    """A compiler holds the functions of the stub against cuda.h, and ctypes calls them."""
    source, built = tmp_path / "stub.c", tmp_path / "stub.so"
    constants = "".join(
        f"#define {name} {getattr(cuda_driver, name)}\n"
        for name in (
            *(
                "INVALID_VALUE",
                "UNIFIED",
                "HANDLE_BYTES",
                "NOT_READY",
                "MPS_ENABLED",
                "IPC_CAPABLE",
            ),
            *("NON_BLOCKING", "WAITS_ASLEEP", "LAZY_PEER_ACCESS"),
        )
    )
    source.write_text(STUB.replace("static unsigned", constants + "static unsigned", 1))
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{header()}", "-o", str(built), str(source)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(built))
    library.probe.restype = c_uint64
    memory, pages = CudaMemory(0, library), store()
    pool = memory.export(pages)
    assert pool == ExportedPool(HANDLE, 4096, 4 * pages.page_bytes, name_of(b"\x07" * 16))
    address = memory.open(pool)
    assert address == 0x7000_0000_0000 + 4096
    memory.close(pool, address)
    lane = memory.lane()
    lane.follow(Event())
    lane.copy([Copy((1 << 47) + 3, (1 << 46) + 5, (1 << 40) + 7)])
    lane.copy([ROWS])
    mark = lane.record()
    assert not mark.done
    mark.wait()
    assert [library.probe(at) for at in range(8, 15)] == [*ROWS, (1 << 40) + 1]
    probed = [library.probe(at) for at in range(8)]
    stream = (1 << 40) + 1
    copied = [(1 << 47) + 3, (1 << 46) + 5, (1 << 40) + 7, stream]
    assert probed == [1, 0x7000_0000_0000, *copied, 4711, stream]
    memory.settle()
    assert library.probe(7) == 0
    lane.close()
    assert POINTER(c_char_p) in PROTOTYPES["cuGetErrorString"]
    assert ctypes.sizeof(c_size_t) == 8
