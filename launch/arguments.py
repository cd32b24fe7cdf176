"""The arguments of every command, with help and examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from pdmesh.launch.mesh_arguments import SERVE, UP, add_serve, add_up
from pdmesh.launch.random_weights import add_random
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
_CHAT = """\
examples:
  pdmesh chat                                 a conversation; /reset forgets, /exit ends
  pdmesh chat --prompt "Who are you?"         one answer
  echo "Who are you?" | pdmesh chat           the same
  pdmesh chat --address 10.0.0.5:7080         a mesh on another machine
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
would have cost. A router remembers its last 512 requests; pdmesh chat --show-timing prints the id.

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

    add_up(command("up", "start a mesh on this machine", UP))
    _add_chat(command("chat", "talk to a running mesh", _CHAT))
    add_serve(command("serve", "run one process of a mesh by hand", SERVE))
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
    chat.add_argument("--show-timing", action="store_true", help="tokens, times and request id")


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
    add_random(doctor)
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
