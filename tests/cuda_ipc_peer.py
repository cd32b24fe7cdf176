"""A process on a device whose pages come and go over CUDA IPC, or over TCP to compare.

    cuda_ipc_peer.py cuda:0|fake

Run by test_cuda_ipc_gpu.py; see ``page_peer.py``. On "fake" shared memory plays the device.
"""

from __future__ import annotations

import sys

import torch
from page_peer import CHECK_EVERY, FORMAT, LAYERS, PAGE_SIZE, PAGES, WIDTH, Peer, answers, serve

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener, device_memory
from pdmesh.kvtransfer.device_memory import DeviceMemory
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener


def pool(device: str) -> tuple[LatentStore, DeviceMemory]:
    """A store on the device, in an allocation that others share, and the device."""
    shape = PAGES, LAYERS, PAGE_SIZE, WIDTH
    if device == "fake":
        from cuda_ipc_rig import FakeDevice, device_store

        return device_store(*shape, dtype=torch.bfloat16), FakeDevice()
    torch.zeros(100, device=device)  # so that the pool of a small test is not first in its block
    store = LatentStore(*shape, torch.bfloat16, device)
    return store, device_memory(store)


class CudaIpcPeer(Peer):
    """Also computes what it sends, so that copies have something to wait for."""

    def computed(self, pages: list[int], lease_id: str, to: list) -> list[int]:
        """Sends pages that the device is still computing when they are pushed; their digest."""
        size, times = (4096, 40) if self.device.type == "cuda" else (8, 1)
        slow = torch.zeros(size, size, device=self.device)
        for _ in range(times):
            slow = torch.clamp(slow @ slow, max=1.0)
        self.store.tensor[pages] = self.store.tensor[pages] * 2 + slow[0, 0].bfloat16()
        assert self.send(lease_id, to, pages, 0, "pages") == "done"
        return self.digest(pages)


def main() -> None:
    out = answers()
    store, memory = pool(sys.argv[1])
    listeners = [CudaIpcListener(FORMAT, memory, CHECK_EVERY), TcpListener(FORMAT)]
    serve(CudaIpcPeer(store, listeners, [CudaIpcDialer(memory), TcpDialer()]), out)


if __name__ == "__main__":
    main()
