"""The arguments of ``pdmesh up`` and ``pdmesh serve``, with examples."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdmesh.launch.mode import add_mode

UP = """\
examples:
  pdmesh up --chat                            one prefill and two decode workers, then a chat
  pdmesh up --prompt "Tell me a story."       one answer, then stop everything
  pdmesh up --decode 4 --port 9000            four decode workers, on port 9000
  pdmesh up --model ./DeepSeek-V3-tiny        another checkpoint (Hugging Face directory)
  pdmesh up --redis redis://10.0.0.5:6379     a store of your own instead of the embedded one
  pdmesh up --device cuda --random-weights --layers 8 --decode 1 --no-mtp
                                              full-width DeepSeek-V3 layers without a checkpoint
  pdmesh up --topology mesh.toml              everything from a file
"""
SERVE = """\
One process of a mesh, for a mesh over several hosts. All of them need the same store, mesh name,
model and secret file (any 16 to 64 random bytes, copied by hand).

A worker that joins a running mesh asks it for all it needs but the secret; on the machine of the
mesh for that too.

examples:
  pdmesh serve decode --join default                                    a mesh of this machine
  pdmesh serve decode --join 10.0.0.1:7080 --secret-file key            a mesh elsewhere
  pdmesh serve router  --redis redis://10.0.0.5 --secret-file key --host 10.0.0.1 --port 7080
  pdmesh serve prefill --redis redis://10.0.0.5 --secret-file key --host 10.0.0.2
  pdmesh serve decode  --redis redis://10.0.0.5 --secret-file key --host 10.0.0.3
  pdmesh serve weights --weights-socket w.sock --model DIR              for workers of this host
"""

_DRAFTS = "MTP drafts a step and sequence: 0 to 4, or auto: as many as pay off (default: 1)"
_TRANSPORTS = "ways that pages may go, best first: cuda_ipc, shm, tcp, nixl (default: all but nixl)"
_EP = "{} workers that share the routed experts; 1: each has them all (default: 1)"
_TP = "of them, {} workers that share a batch's attention heads (default: 1)"
_VIRTUAL = "ranks in the process of each {} worker, to try a large group (default: 1)"
_DRAIN = "seconds that a worker told to end may take to finish what it has (default: 30)"


def add_up(up: argparse.ArgumentParser) -> None:
    """Of ``pdmesh up``."""
    up.add_argument("--topology", type=Path, metavar="FILE", help="TOML file that describes a mesh")
    up.add_argument("--name", help="name of the mesh (default: default, or default-2 ...)")
    up.add_argument("--redis", metavar="URL", help="use this store instead of the embedded one")
    up.add_argument("--port", type=int, help="public port (default: 7080, or the next free one)")
    up.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    up.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint (default: the shipped one)"
    )
    up.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: 1)")
    up.add_argument("--decode", type=int, metavar="N", help="decode workers (default: 2)")
    up.add_argument("--prefill-ep", type=int, metavar="N", help=_EP.format("prefill"))
    up.add_argument("--decode-ep", type=int, metavar="N", help=_EP.format("decode"))
    up.add_argument("--prefill-tp", type=int, metavar="N", help=_TP.format("prefill"))
    up.add_argument("--decode-tp", type=int, metavar="N", help=_TP.format("decode"))
    for role in ("prefill", "decode"):
        flag = f"--{role}-virtual-ranks"
        up.add_argument(flag, type=int, metavar="N", help=_VIRTUAL.format(role))
    up.add_argument("--routers", type=int, metavar="N", help="router replicas (default: 1)")
    add_mode(up)
    up.add_argument("--no-mtp", action="store_true", help="no draft tokens from the MTP module")
    up.add_argument("--draft-tokens", type=_number_or_word, metavar="N", help=_DRAFTS)
    up.add_argument("--drain-s", type=float, metavar="S", help=_DRAIN)
    up.add_argument("--transports", metavar="LIST", help=_TRANSPORTS)
    up.add_argument(
        "--share-weights",
        action="store_true",
        help="one process on each device holds the weights and its workers map them: one copy, and "
        "restarts that load nothing (on a GPU it has not run yet)",
    )
    up.add_argument("--chat", action="store_true", help="open a chat; stop everything at its end")
    up.add_argument("--prompt", metavar="TEXT", help="print one answer and stop everything")


def add_serve(serve: argparse.ArgumentParser) -> None:
    """Of ``pdmesh serve``."""
    serve.add_argument(
        "role",
        choices=("router", "prefill", "decode", "weights"),
        help="weights: hold a model's weights for the workers of this host and device",
    )
    serve.add_argument(
        "--weights-socket",
        type=Path,
        metavar="PATH",
        help="weights: offer them here; workers: map them from there instead of loading",
    )
    serve.add_argument("--topology", type=Path, metavar="FILE", help="TOML file; flags override it")
    serve.add_argument(
        "--join", metavar="ADDRESS", help="a mesh's name, or HOST:PORT of its router: ask it"
    )
    serve.add_argument("--redis", metavar="URL", help="the store (or the variable PDMESH_REDIS)")
    serve.add_argument("--mesh", metavar="NAME", help="name of the mesh (default: default)")
    serve.add_argument("--secret-file", type=Path, metavar="FILE", help="key of the page hashes")
    serve.add_argument("--host", help="this host's address, as others call it")
    serve.add_argument("--port", type=int, help="port (workers: any free one)")
    serve.add_argument("--id", metavar="NAME", help="name of the worker; unique in the mesh")
    serve.add_argument("--model", type=Path, metavar="DIR", help="checkpoint")
    serve.add_argument("--model-name", metavar="NAME", help="name that clients ask for")
    serve.add_argument("--dtype", help="float32 or bfloat16")
    add_mode(serve)
    serve.add_argument("--no-mtp", action="store_true", help="no draft tokens")
    serve.add_argument("--lease-ttl", type=float, metavar="S", help="seconds a lease lasts")
    serve.add_argument("--drain-s", type=float, metavar="S", help=_DRAIN)
    serve.add_argument("--transports", metavar="LIST", help=f"workers: {_TRANSPORTS}")
    serve.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    serve.add_argument("--ep-ranks", metavar="LIST", help="workers: HOST:PORT of each rank")
    serve.add_argument("--ep-rank", type=int, metavar="N", help="workers: which of them it is")
    serve.add_argument("--tp", type=int, metavar="N", help=_TP.format("consecutive"))
    serve.add_argument(
        "--redundant-experts", type=int, metavar="N", help="workers: copies of experts besides"
    )
    serve.add_argument(
        "--no-rebalance", action="store_true", help="workers: shared experts stay where they are"
    )
    serve.add_argument(
        "--microbatch-rows", type=int, metavar="N", help="workers: two microbatches from N rows on"
    )
    serve.add_argument("--virtual-ranks", type=int, metavar="N", help=_VIRTUAL.format("such"))
    serve.add_argument(
        "--pages", type=_number_or_word, metavar="N", help="workers: pages of KV memory, or auto"
    )
    serve.add_argument(
        "--memory-share",
        type=float,
        default=1.0,
        metavar="X",
        help="workers: part of a device's memory (default: 1)",
    )
    serve.add_argument("--threads", type=int, help="workers: threads (default: all cores)")
    serve.add_argument("--eviction", metavar="NAME", help="workers: lru or returns")
    serve.add_argument("--no-replica-hints", action="store_true", help="workers: plain lru")
    serve.add_argument(
        "--chunk-tokens",
        type=_number_or_word,
        metavar="N",
        help="prefill: most tokens in one step, or auto (default): 512 on a CPU, 4096 on a GPU",
    )
    serve.add_argument("--max-queue", type=int, metavar="N", help="prefill: prompts that may wait")
    serve.add_argument("--max-batch", type=int, help="decode: most sequences in one step")
    serve.add_argument(
        "--draft-tokens", type=_number_or_word, metavar="N", help=f"decode: {_DRAFTS}"
    )
    serve.add_argument(
        "--growth-tokens",
        type=int,
        metavar="N",
        help="decode: tokens promised ahead of a running sequence, which may have to give its "
        "pages up for others; 0: promise all it may generate",
    )
    serve.add_argument(
        "--park-mb",
        type=int,
        metavar="N",
        help="decode: host memory for the pages of such sequences, MiB; 0: computed again",
    )
    serve.add_argument("--max-waiting", type=int, metavar="N", help="decode: most waiting requests")
    serve.add_argument("--deadline", type=float, metavar="S", help="router: default deadline")
    serve.add_argument("--admin-port", type=int, default=0, help="router: internal service")
    serve.add_argument(
        "--admin-file", type=Path, metavar="FILE", help="router: write the internal address here"
    )
    serve.add_argument("--max-attempts", type=int, help="router: tries of one request")
    serve.add_argument("--policy", help="router: how workers are chosen (default: priced)")
    serve.add_argument("--metrics-port", type=int, help="Prometheus endpoint; 0: none (default)")


def _number_or_word(text: str) -> int | str:
    """A number where it is one; else a word, which the topology knows or refuses."""
    return int(text) if text.lstrip("-").isdigit() else text
