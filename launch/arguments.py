"""The arguments of every command, with help and examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from pdmesh.launch.registry_arguments import TEXT as REGISTRY_TEXT
from pdmesh.launch.registry_arguments import add_arguments as add_registry_arguments
from pdmesh.launch.verify.arguments import EPILOG as VERIFY_EPILOG
from pdmesh.launch.verify.arguments import TEXT as VERIFY_TEXT
from pdmesh.launch.verify.arguments import add_arguments as add_verify_arguments

EXIT_WRONG_INPUT = 2

_SIMULATE = """\
Workers, a router and clients in one process, on a virtual clock and a simulated network, store and
model: the code is the real one. The seed decides the mesh, the requests, the faults and every
delay, so a run that failed is repeated by its seed.

examples:
  pdmesh simulate --seed 7 --trace            one run, event by event
  pdmesh simulate --seeds 0..999              a thousand; stops at none, exit code 1 if one failed
"""
_TOP = """\
Serves DeepSeek-V3-type models with separate prefill and decode workers.

  pdmesh up --chat             start a mesh on this machine and talk to it
  pdmesh up                    start a mesh and keep it running
  pdmesh chat                  talk to a running mesh
  pdmesh status                what runs, and how full it is

  pdmesh scale decode=3        more or fewer workers, while answers are streaming
  pdmesh restart               replace the workers one by one
  pdmesh drain WORKER          let a worker take nothing new
  pdmesh answers               what is being answered, and where
  pdmesh migrate REQUEST       move a running answer to another worker
  pdmesh registry check        whether the store knows who has which pages
"""
_UP = """\
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
_CHAT = """\
examples:
  pdmesh chat                                 a conversation; /reset forgets, /exit ends
  pdmesh chat --prompt "Who are you?"         one answer
  echo "Who are you?" | pdmesh chat           the same
  pdmesh chat --address 10.0.0.5:7080         a mesh on another machine
"""
_SERVE = """\
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

_SCALE = """\
New workers start first and take a share of the cores as at the start; then those with the highest
number are drained and stopped. The mesh answers meanwhile. Stopping this command with Ctrl-C does
not stop the change: it goes on in the mesh.

examples:
  pdmesh scale decode=3                       one more decode worker than by default
  pdmesh scale prefill=2 decode=4             both roles
  pdmesh scale decode=1 --mesh default-2      another mesh of this machine
"""
_DRAIN_TEXT = """\
The worker takes nothing new and finishes what it has, or hands it over. It stays up, and still
lends its cached pages. Waits until it is empty; Ctrl-C stops the waiting, not the draining.

examples:
  pdmesh drain decode-1                       before its host is taken down
  pdmesh drain decode-1 --undo                take it back
  pdmesh drain decode-1 --redis redis://10.0.0.5 --mesh default
"""
_RESTART = """\
For each worker in turn another one starts, and when it is ready the old one is drained and stopped.
The new one has another number. Stopping this command with Ctrl-C does not stop the change.

examples:
  pdmesh restart                              all workers
  pdmesh restart decode-0 prefill-0           these two
"""
_ANSWERS = """\
examples:
  pdmesh answers                              request, answer, worker, tokens
  pdmesh answers --json                       for programs
"""
_MIGRATE = """\
The answer goes on at the other decode worker, from the same bits; its client notices a short pause
at most. Ctrl-C stops the waiting; a move that has begun ends by itself, and the answer goes on
either way.

examples:
  pdmesh migrate 4f1c0d                       wherever there is room; a request id as pdmesh answers
                                              shows it, or its beginning
  pdmesh migrate 4f1c0d --to decode-2         to this worker
  pdmesh migrate 4f1c0d --index 1             one of its answers
"""

_EXPLAIN = """\
Every choice of a prefill and a decode worker that was made for a request, and what each worker
would have cost. A router remembers its last 512 requests.

examples:
  pdmesh explain 4f1c0d                       a request id, or its beginning
  pdmesh explain 4f1c0d --all --json          every worker, for programs
"""

_DOCTOR = """\
Exit status 0 if a mesh can run here, 2 if something is missing.

examples:
  pdmesh doctor                               this machine, the shipped model
  pdmesh doctor --device cuda --model DIR     which kernels a model would use on a GPU, and why
  pdmesh doctor --redis redis://10.0.0.5      whether a store can be used
"""

_DRAFTS = "MTP drafts a step and sequence: 0 to 4, or auto: as many as pay off (default: 1)"


_TRANSPORTS = "ways that pages may go, best first: cuda_ipc, shm, tcp, nixl (default: all but nixl)"
_EP = "{} workers that share the routed experts; 1: each has them all (default: 1)"
_TP = "of them, {} workers that share a batch's attention heads (default: 1)"
_VIRTUAL = "ranks in the process of each {} worker, to try a large group (default: 1)"
_DRAIN = "seconds that a worker told to end may take to finish what it has (default: 30)"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_INPUT, f"pdmesh: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Of ``pdmesh``; ``command`` names what was asked for."""
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(prog="pdmesh", description=_TOP, formatter_class=raw, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=raw,
            allow_abbrev=False,
        )

    _add_up(command("up", "start a mesh on this machine", _UP))
    _add_chat(command("chat", "talk to a running mesh", _CHAT))
    _add_serve(command("serve", "run one process of a mesh by hand", _SERVE))
    _add_status(command("status", "show the workers of a running mesh"))
    _add_scale(command("scale", "run more or fewer workers", _SCALE))
    _add_restart(command("restart", "replace workers one by one", _RESTART))
    _add_drain(command("drain", "let a worker take nothing new", _DRAIN_TEXT))
    _add_answers(command("answers", "show the running answers", _ANSWERS))
    _add_migrate(command("migrate", "move a running answer to another worker", _MIGRATE))
    _add_explain(command("explain", "why a request went to its workers", _EXPLAIN))
    registry = command("registry", "look at the store's page lists, and check them", REGISTRY_TEXT)
    add_registry_arguments(registry)
    add_verify_arguments(command("verify", VERIFY_TEXT, VERIFY_EPILOG))
    _add_simulate(command("simulate", "run the mesh on virtual time, with faults", _SIMULATE))
    _add_doctor(command("doctor", "what is here, and what computes each operation", _DOCTOR))
    command("version", "show the version")
    return top


def _add_up(up: argparse.ArgumentParser) -> None:
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
    _add_mode(up)
    up.add_argument("--no-mtp", action="store_true", help="no draft tokens from the MTP module")
    up.add_argument("--draft-tokens", type=_drafts, metavar="N", help=_DRAFTS)
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


def _add_random(parser: argparse.ArgumentParser) -> None:
    """Weights that no file holds; all processes of a mesh must agree on them too."""
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="make weights instead of reading them: for the config.json in --model DIR, or for "
        "--model deepseek-v3 (default) or small",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="random weights: so many layers, MTP's besides"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="random weights: routed experts of a layer"
    )
    parser.add_argument(
        "--weights-seed", type=int, metavar="N", help="random weights: which (default: 0)"
    )


def _add_mode(parser: argparse.ArgumentParser) -> None:
    """What all processes of a mesh must agree on besides the checkpoint."""
    _add_random(parser)
    parser.add_argument(
        "--arithmetic",
        metavar="MODE",
        help="fast: prompts in MHA form (default); exact: prompts and answers in one form, slower, "
        "and a retry or a cached answer never changes a token",
    )
    parser.add_argument(
        "--device",
        help="where workers compute: cpu (default), cuda or cuda:N; up: cuda:N,cuda:M in turn",
    )
    parser.add_argument(
        "--precision", metavar="P", help="of products: plain, fp8 or auto: fp8 on CUDA (default)"
    )
    parser.add_argument("--latents", metavar="P", help="in the pages: plain (default) or fp8")
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        help="a worker whose step takes longer leaves (default: 60 on CUDA, 600 on a CPU)",
    )
    parser.add_argument(
        "--page-size", type=int, metavar="N", help="tokens a page: 16, 32 ... 512 (default: 64)"
    )


def _drafts(text: str) -> int | str:
    """A number where it is one; else a word, which the topology knows or refuses."""
    return int(text) if text.lstrip("-").isdigit() else text


def _add_chat(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("--address", metavar="HOST:PORT", help="router (default: the running mesh's)")
    chat.add_argument("--mesh", metavar="NAME", help="which mesh of this machine")
    chat.add_argument("--prompt", metavar="TEXT", help="ask this and exit")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--model", default="", help="model name (default: the one served)")
    chat.add_argument(
        "--temperature",
        type=float,
        help="0: always the likeliest token (default: the checkpoint's generation_config.json)",
    )
    chat.add_argument(
        "--top-p",
        type=float,
        help="keep the likeliest tokens up to this probability (default: as above)",
    )
    chat.add_argument("--seed", type=int, help="fixes the random choices")
    chat.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    chat.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer")
    chat.add_argument(
        "--input-timeout",
        type=float,
        metavar="S",
        help="seconds that a pipe may be silent before a default question is asked (default: any)",
    )
    chat.add_argument("--show-timing", action="store_true", help="tokens and times of each answer")


def _add_serve(serve: argparse.ArgumentParser) -> None:
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
    _add_mode(serve)
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
        "--pages", type=_drafts, metavar="N", help="workers: pages of KV memory, or auto"
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
    serve.add_argument("--chunk-tokens", type=int, help="prefill: most tokens in one step")
    serve.add_argument("--max-queue", type=int, metavar="N", help="prefill: prompts that may wait")
    serve.add_argument("--max-batch", type=int, help="decode: most sequences in one step")
    serve.add_argument("--draft-tokens", type=_drafts, metavar="N", help=f"decode: {_DRAFTS}")
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


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    which = simulate.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="one run")
    which.add_argument("--seeds", metavar="A..B", help="a run for each of these seeds")
    simulate.add_argument(
        "--requests", type=int, default=10, metavar="R", help="requests of a run (default: 10)"
    )
    simulate.add_argument("--trace", action="store_true", help="print every event")


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--model", type=Path, metavar="DIR", help="checkpoint (default: shipped)")
    doctor.add_argument("--device", help="cpu, cuda, cuda:N or cuda:N,cuda:M (default: the best)")
    doctor.add_argument("--latents", metavar="P", help="in the pages: plain (default) or fp8")
    doctor.add_argument("--precision", metavar="P", help="plain, fp8 or auto (default)")
    _add_random(doctor)
    doctor.add_argument("--redis", metavar="URL", help="look at this store (default: embedded)")


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument("--mesh", metavar="NAME", help="which mesh")
    status.add_argument("--redis", metavar="URL", help="ask this store (a mesh elsewhere)")
    status.add_argument("--json", action="store_true", help="one JSON object")


def _add_scale(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("targets", nargs="+", metavar="ROLE=N", help="e.g. prefill=2 decode=3")
    scale.add_argument("--mesh", metavar="NAME", help="which mesh of this machine")


def _add_restart(restart: argparse.ArgumentParser) -> None:
    restart.add_argument("workers", nargs="*", metavar="WORKER", help="which (default: all)")
    restart.add_argument("--mesh", metavar="NAME", help="which mesh of this machine")


def _add_drain(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", metavar="WORKER", help="its name, as pdmesh status shows it")
    drain.add_argument("--undo", action="store_true", help="let it take new requests again")
    drain.add_argument("--mesh", metavar="NAME", help="which mesh")
    drain.add_argument("--redis", metavar="URL", help="ask this store (a mesh elsewhere)")


def _add_answers(answers: argparse.ArgumentParser) -> None:
    _add_router(answers)
    answers.add_argument("--json", action="store_true", help="one JSON object")


def _add_migrate(migrate: argparse.ArgumentParser) -> None:
    migrate.add_argument("request", metavar="REQUEST", help="request id, or its beginning")
    migrate.add_argument("--to", default="", metavar="WORKER", help="decode worker (default: any)")
    migrate.add_argument("--index", type=int, metavar="I", help="which answer (default: all)")
    _add_router(migrate)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("request", metavar="REQUEST", help="request id, or its beginning")
    explain.add_argument("--all", action="store_true", help="every worker, not the cheapest only")
    explain.add_argument("--json", action="store_true", help="one JSON object")
    _add_router(explain)


def _add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", metavar="NAME", help="which mesh of this machine")
    parser.add_argument(
        "--admin", metavar="HOST:PORT", help="internal service of a router elsewhere"
    )
