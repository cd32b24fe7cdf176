"""Small exchanges of ranks in one process on the device, for compute-sanitizer to look at.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -P tests/ep_sanitised.py

Run by test_gpu_sanitised.py. An argument names another device.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "tests")]

import torch  # noqa: E402 - the path is set above
from symmetric_rig import Group, inputs, scattered  # noqa: E402

from pdmesh.kernels.expert_exchange import ExchangeSize  # noqa: E402

placement = scattered(3, 8, seed=3)
device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
of_all = 3, max(map(len, placement.layers[0])), 6, 1024, 4
for size in (ExchangeSize(*of_all, 64), ExchangeSize.contiguous(*of_all)):
    group = Group(placement, size, device)
    for step, counts in enumerate(((6, 0, 3), (1, 6, 6))):
        group.check(*inputs(group.size, counts, "padded", 8, step, device))
if device != "cpu":
    torch.cuda.synchronize()
sys.stdout.write("right\n")
