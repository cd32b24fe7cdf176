"""What a rank process takes in memory, by how many ranks share the experts.

    .venv/bin/python -P bench/ep_memory.py           (--help for sizes)

Writes a random checkpoint whose weights are mostly routed experts, starts a mesh with `--decode-ep`
1, 2, 4 and 8, has it answer, and prints for each what a decode worker has in memory of its own
(``RssAnon``: no mapped file counts) in the mean, what of it the weights must be, and the same over
EP1. A process without any weight takes something too, which is in the first number only.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import meshes  # noqa: E402 - the path is set above
from checkpoints import random_checkpoint  # noqa: E402

MIB = 1 << 20


def own_memory(pid: int) -> float:
    """MiB of anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


async def answers(mesh: meshes.Mesh, count: int) -> None:
    """Answers that ask for many experts."""
    async with meshes.chat_stub(mesh.address) as stub:
        asked = [[20 + (7 * i + 3 * n) % 4000 for i in range(40)] for n in range(count)]
        fields = {"max_tokens": 16, "ignore_eos": True, "timeout": 300}
        await asyncio.gather(*(meshes.ask(stub, prompt, **fields) for prompt in asked))


def measured(folder: Path, ep: int, pages: int) -> list[float]:
    """Of each decode worker."""
    topology = f"[decode]\nworkers = {ep}\npages = {pages}\n[prefill]\npages = {pages}\n"
    flags = ("--model", str(folder), *(("--decode-ep", str(ep)) if ep > 1 else ()))
    with meshes.running_mesh(*flags, topology=topology) as mesh:
        asyncio.run(answers(mesh, 2 * ep))
        return [own_memory(pid) for name, pid in mesh.pids().items() if name.startswith("decode")]


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="sizes of the group"
    )
    parser.add_argument("--experts", type=int, default=64, help="routed experts of a layer")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--intermediate", type=int, default=256, help="width of an expert")
    parser.add_argument("--layers", type=int, default=5, help="of the model")
    parser.add_argument("--pages", type=int, default=64, help="of a worker")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        model = random_checkpoint(
            folder,
            hidden_size=options.hidden,
            moe_intermediate_size=options.intermediate,
            n_routed_experts=options.experts,
            num_hidden_layers=options.layers,
            num_nextn_predict_layers=0,
        )
        weights = sum(p.nbytes for p in model.parameters()) / MIB
        routed = sum(
            p.nbytes
            for block in model.blocks()
            for name, p in block.mlp.named_parameters()
            if name in ("gate_up_proj", "down_proj")
        )
        routed /= MIB
        del model
        print(f"{weights:.0f} MiB of weights, {routed:.0f} of them routed experts")
        print("ranks | MiB of a rank | over EP1 | weights of a rank, MiB | over EP1")
        first = 0.0
        for ep in options.ranks:
            took = statistics.mean(measured(folder, ep, options.pages))
            first = first or took
            held = weights - routed + routed / ep
            print(f"{ep} | {took:.0f} | {took / first:.2f} | {held:.0f} | {held / weights:.2f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
