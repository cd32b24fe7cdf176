"""How long the client of a moving answer waits: the pause of live migration, in decode steps.

    .venv/bin/python -P bench/migration.py            (--help for sizes)

Starts a mesh of the shipped model with a longer context on this machine, streams one long answer
with others beside it, and moves it back and forth. Printed are the pause as the router saw it (from
the last token of one worker to the first of the next), the same as the client saw it, and how long
the answer stood still at its source, each beside the duration of a decode step in the same run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import meshes  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402

from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.wire.admin import MoveOrder, MoveReport  # noqa: E402
from pdmesh.wire.errors import PdmeshError  # noqa: E402
from pdmesh.wire.rpc import Client  # noqa: E402

REQUEST = "moved"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def long_context(folder: Path, context: int) -> Path:
    """The shipped checkpoint, told that it may go up to ``context`` positions."""
    target = folder / "model"
    shutil.copytree(shipped_model(), target)
    config = json.loads((target / "config.json").read_text())
    config["max_position_embeddings"] = context
    (target / "config.json").write_text(as_json(config))
    return target


async def move_about(admin: str, count: int, pauses: list[float], answer: meshes.Answer) -> None:
    """Moves the answer ``count`` times; what did not move is tried again."""
    client = Client(admin, "router")
    try:
        while len(pauses) < count:
            seen = len(answer.token_ids)
            try:
                order = MoveOrder(request_id=REQUEST)
                async for report in client.stream("MigrateAnswer", order, MoveReport, timeout=60):
                    if report.state == "moved":
                        pauses.append(report.pause_ms)
                    elif report.state != "moving":
                        print(f"  not moved: {report.reason or report.state}", file=sys.stderr)
            except PdmeshError as error:
                print(f"  not moved: {error.message}", file=sys.stderr)
                return
            while len(answer.token_ids) < seen + 3:
                await asyncio.sleep(0.005)
    finally:
        await client.close()


async def measure(mesh: meshes.Mesh, context: int, count: int, others: int) -> dict[str, float]:
    """One answer behind ``context`` prompt tokens, moved ``count`` times."""
    prompt = [3 + (7 * i) % 4000 for i in range(context)]
    pauses: list[float] = []
    async with meshes.chat_stub(mesh.info["address"]) as stub:
        beside = [
            asyncio.ensure_future(
                meshes.ask(stub, [5 + i, 9, 11], timeout=600, max_tokens=4000, ignore_eos=True)
            )
            for i in range(others)
        ]
        asking = meshes.asking(
            stub,
            prompt,
            timeout=600,
            max_tokens=12 * count + 40,
            ignore_eos=True,
            request_id=REQUEST,
        )
        async with asking as (task, answer):
            await meshes.first_token(task, answer)
            while len(answer.token_ids) < 4:
                await asyncio.sleep(0.01)
            await move_about(mesh.info["router_admin"], count, pauses, answer)
            await task
        for other in beside:
            other.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        steps = [s.step_ms for s in await mesh.statuses() if s.role == "decode" and s.step_ms]
    times = answer.token_times
    gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    return {
        "moves": len(pauses),
        "step_ms": statistics.mean(steps),
        "pause_median_ms": statistics.median(pauses),
        "pause_p99_ms": percentile(pauses, 0.99),
        "gap_median_ms": statistics.median(gaps) * 1e3,
        "gap_longest_ms": gaps[-1] * 1e3,
    }


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--context", type=int, default=4096, help="prompt tokens (default: 4096)")
    parser.add_argument("--moves", type=int, default=40, help="default: 40")
    parser.add_argument(
        "--others", type=int, nargs="*", default=[0, 7], help="answers beside it (default: 0 7)"
    )
    parser.add_argument("--transports", nargs="*", default=["shm", "tcp"], help="default: shm tcp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = long_context(Path(folder), 2 * options.context)
        for transport in options.transports:
            topology = f"""
            [model]
            path = "{model}"
            [mesh]
            transports = ["{transport}"]
            [prefill]
            workers = 1
            pages = {options.context // 64 + 64}
            [decode]
            workers = 2
            pages = {4 * (options.context // 64) + 640}
            """
            with meshes.running_mesh(topology=topology) as mesh:
                for others in options.others:
                    found = asyncio.run(measure(mesh, options.context, options.moves, others))
                    step = found["step_ms"]
                    print(
                        f"{transport}, context {options.context}, {others} beside it:"
                        f" {found['moves']:.0f} moves,"
                        f" pause median {found['pause_median_ms']:.1f} ms"
                        f" = {found['pause_median_ms'] / step:.2f} steps,"
                        f" p99 {found['pause_p99_ms']:.1f} ms"
                        f" = {found['pause_p99_ms'] / step:.2f} steps"
                        f" (a step: {step:.1f} ms; between tokens: median"
                        f" {found['gap_median_ms']:.1f} ms, longest {found['gap_longest_ms']:.1f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
