"""The command line ``pdmesh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from pdmesh.wire.errors import ConfigError, PdmeshError

_EXIT_FAILED = 1
_EXIT_WRONG_INPUT = 2

_TOP = """\
Serves DeepSeek-V3-type models with separate prefill and decode workers.

  pdmesh up --chat             start a mesh on this machine and talk to it
  pdmesh up                    start a mesh and keep it running
  pdmesh chat                  talk to a running mesh
  pdmesh status                what runs, and how full it is
"""
_UP = """\
examples:
  pdmesh up --chat                            one prefill and two decode workers, then a chat
  pdmesh up --prompt "Tell me a story."       one answer, then stop everything
  pdmesh up --decode 4 --port 9000            four decode workers, on port 9000
  pdmesh up --model ./DeepSeek-V3-tiny        another checkpoint (Hugging Face directory)
  pdmesh up --redis redis://10.0.0.5:6379     a store of your own instead of the embedded one
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

examples:
  pdmesh serve router  --redis redis://10.0.0.5 --secret-file key --host 10.0.0.1 --port 7080
  pdmesh serve prefill --redis redis://10.0.0.5 --secret-file key --host 10.0.0.2
  pdmesh serve decode  --redis redis://10.0.0.5 --secret-file key --host 10.0.0.3
"""


_DRAFTS = "MTP drafts a step and sequence: 0 to 4, or auto: as many as pay off (default: 1)"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_WRONG_INPUT, f"pdmesh: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="pdmesh", description=_TOP, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

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
    command("version", "show the version")
    return parser


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
    _add_mode(up)
    up.add_argument("--no-mtp", action="store_true", help="no draft tokens from the MTP module")
    up.add_argument("--draft-tokens", type=_drafts, metavar="N", help=_DRAFTS)
    up.add_argument("--chat", action="store_true", help="open a chat; stop everything at its end")
    up.add_argument("--prompt", metavar="TEXT", help="print one answer and stop everything")


def _add_mode(parser: argparse.ArgumentParser) -> None:
    """What all processes of a mesh must agree on besides the checkpoint."""
    parser.add_argument(
        "--arithmetic",
        metavar="MODE",
        help="fast: prompts in MHA form (default); exact: prompts and answers in one form, slower, "
        "and a retry or a cached answer never changes a token",
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
    serve.add_argument("role", choices=("router", "prefill", "decode"))
    serve.add_argument("--topology", type=Path, metavar="FILE", help="TOML file; flags override it")
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
    serve.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    serve.add_argument("--pages", type=int, help="workers: pages of KV memory")
    serve.add_argument("--threads", type=int, help="workers: threads (default: all cores)")
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
    serve.add_argument(
        "--max-waiting", type=int, metavar="N", help="decode: reservations that may wait for pages"
    )
    serve.add_argument("--deadline", type=float, metavar="S", help="router: default deadline")
    serve.add_argument("--max-attempts", type=int, help="router: tries of one request")
    serve.add_argument("--metrics-port", type=int, help="Prometheus endpoint; 0: none (default)")


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument("--mesh", metavar="NAME", help="which mesh")
    status.add_argument("--redis", metavar="URL", help="ask this store (a mesh elsewhere)")
    status.add_argument("--json", action="store_true", help="one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        from pdmesh.launch.up import up

        return up(arguments)
    if arguments.command == "serve":
        from pdmesh.launch.serve import serve

        return serve(arguments)
    if arguments.command == "chat":
        return _chat(arguments)
    if arguments.command == "status":
        return _status(arguments)
    print(_version())
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from pdmesh.launch.chat import ChatOptions, chat
    from pdmesh.launch.runtime import find_mesh

    address = arguments.address or find_mesh(arguments.mesh).address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"the address {address!r} is not HOST:PORT")
    options = ChatOptions(
        address=address,
        system=arguments.system,
        model=arguments.model,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        timeout_s=arguments.timeout,
        show_timing=arguments.show_timing,
        input_timeout_s=arguments.input_timeout,
    )
    return chat(options, arguments.prompt)


def _status(arguments: argparse.Namespace) -> int:
    from pdmesh.launch.runtime import find_mesh
    from pdmesh.launch.status import as_json, as_table, collect

    if arguments.redis:
        name, url, address = arguments.mesh or "default", arguments.redis, None
    else:
        info = find_mesh(arguments.mesh)
        name, url, address = info.name, info.redis_url, info.address
    lines = asyncio.run(collect(url, name))
    print((as_json if arguments.json else as_table)(name, address, lines))
    return 0


def _version() -> str:
    from pdmesh.wire.messages import PROTOCOL_VERSION

    try:
        version = metadata.version("pdmesh")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"pdmesh {version}, protocol {PROTOCOL_VERSION}, Python {python}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 2 for wrong input, or 1 for what else failed."""
    parent = os.environ.pop("PDMESH_PARENT", None)
    if parent is not None:
        from pdmesh.registry.guard import die_with_parent

        die_with_parent(int(parent))
    try:
        return _run(_parser().parse_args(argv))
    except ConfigError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return _EXIT_WRONG_INPUT
    except PdmeshError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
