"""What a whole router costs beside SGLang's, under the same prompts and answers."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator

import router_mesh
import router_sglang
from router_load import Load, Streamed
from router_match import Learnt

DECODE = 2
WORDS = 300
"""Of a prompt."""


def available(arguments: argparse.Namespace) -> bool:
    """Whether SGLang's router is there."""
    return router_sglang.importable(arguments.sglang)


def loads(arguments: argparse.Namespace) -> list[Load]:
    """Requests with next to no answer, and answers at the pace of decode workers."""
    streams = arguments.streams
    each = max(1, arguments.requests // streams)
    paced = [pace for pace in arguments.pace if pace]
    short = Load(streams, 2, 0.0, each, WORDS)
    return [short, *(Load(streams, arguments.tokens, pace, 1, WORDS) for pace in paced)]


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """For each load a line for each router: microseconds of processor time, what that comes to a
    second and core, and our time over the other's, the median, lowest and highest of the rounds."""
    others = {"sglang-router, PD": 1, "sglang-router, alike": 0} if available(arguments) else {}
    for load in loads(arguments):
        short = not load.step_ms
        count = load.streams * load.answers * (1 if short else load.tokens)
        got: dict[str, list[Streamed]] = {name: [] for name in ("ours", *others)}
        for _ in range(arguments.rounds):
            got["ours"] += asyncio.run(router_mesh.measure([load], DECODE, Learnt))
            for name, prefill in others.items():
                got[name] += router_sglang.measure([load], arguments.sglang, prefill, DECODE)
        if len(texts := {done.text for rounds in got.values() for done in rounds}) > 1:
            raise SystemExit(f"the answers differ: {sorted(texts)}")
        times = {name: [done.router_s / count * 1e6 for done in got[name]] for name in got}
        for name, each in times.items():
            us = statistics.median(each)
            values = {"us": us, "a second and core": 1e6 / us}
            if not short:
                messages = (done.per_message for done in got[name])
                values["tokens a message"] = statistics.median(messages)
            if name in others:
                ratios = [a / b for a, b in zip(times["ours"], each, strict=True)]
                values["ours / it"] = statistics.median(ratios)
                values |= {"lowest": min(ratios), "highest": max(ratios)}
            what = "request" if short else f"token, {load.step_ms:g} ms"
            yield f"{what}: {name}", values
