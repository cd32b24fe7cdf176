"""``pdmesh chat``: talks to a router; a conversation at a terminal, one answer otherwise."""

from __future__ import annotations

import contextlib
import select
import sys
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdmesh.launch.settings import check_text
from pdmesh.wire import chat_pb2
from pdmesh.wire.chat_pb2_grpc import ChatServiceStub
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.rpc import MAX_PUBLIC_MESSAGE, channel_options

DEFAULT_PROMPT = "Hello! Who are you?"
_HELP = "/reset forgets the conversation, /exit ends, Ctrl-C stops an answer"
_EXIT_FAILED = 1
_EXIT_WRONG_INPUT = 2
_OUR_INPUT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
)


@dataclass(frozen=True)
class ChatOptions:
    """How to ask. None leaves a choice to the router."""

    address: str
    system: str | None = None
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    timeout_s: float = 300.0
    show_timing: bool = False
    input_timeout_s: float | None = None
    """Longest wait for the first byte of standard input; None: as long as it takes."""


@dataclass
class Conversation:
    """The messages so far; a failed or stopped question leaves none behind."""

    options: ChatOptions
    messages: list[chat_pb2.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        system = self.options.system
        self.messages = [chat_pb2.Message(role="system", content=system)] if system else []

    def request(self, prompt: str) -> chat_pb2.ChatRequest:
        """The request for the next answer."""
        options = self.options
        sampling = chat_pb2.Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        )
        question = chat_pb2.Message(role="user", content=prompt)
        return chat_pb2.ChatRequest(
            model=options.model, messages=[*self.messages, question], sampling=sampling
        )

    def keep(self, prompt: str, answer: str) -> None:
        """Adds a question and its answer."""
        self.messages.append(chat_pb2.Message(role="user", content=prompt))
        self.messages.append(chat_pb2.Message(role="assistant", content=answer))


def chat(options: ChatOptions, prompt: str | None) -> int:
    """One answer if there is a prompt or no terminal, else a conversation. Returns the exit code"""
    with grpc.insecure_channel(options.address, options=channel_options()) as channel:
        conversation = Conversation(options)
        stub: Any = ChatServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        if prompt is None and not sys.stdin.isatty():
            prompt = read_prompt(options.input_timeout_s)
        if prompt is not None:
            return _one_answer(stub, conversation, prompt)
        return _converse(stub, conversation)


def read_prompt(wait_s: float | None) -> str:
    """Standard input as a prompt; the default one if it is empty or silent for ``wait_s``.

    Raises ConfigError: it is not UTF-8.
    """
    text = ""
    if wait_s is None or _readable(wait_s):
        try:
            text = sys.stdin.read().strip()
        except UnicodeDecodeError:
            raise ConfigError("standard input is not UTF-8 text") from None
        check_text(text, "standard input")
    if not text:
        text = DEFAULT_PROMPT
        print(f"(nothing on standard input; asking: {text})", file=sys.stderr)
    return text


def _readable(wait_s: float) -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], wait_s)[0])
    except (OSError, ValueError):  # closed, or a file that select cannot watch
        return not sys.stdin.closed


def _one_answer(stub: Any, conversation: Conversation, prompt: str) -> int:
    try:
        _ask(stub, conversation, prompt)
    except KeyboardInterrupt:
        print()
        return 130
    except grpc.RpcError as error:
        print(f"pdmesh: {_sentence(error, conversation.options)}", file=sys.stderr)
        return _EXIT_WRONG_INPUT if error.code() in _OUR_INPUT else _EXIT_FAILED
    return 0


def _converse(stub: Any, conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor and a history
    print(f"Chat with the mesh at {conversation.options.address}. {_HELP}.")
    while True:
        try:
            line = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif line.startswith("/"):
            print(f"({_HELP})")
        elif line:
            _ask_at_terminal(stub, conversation, line)


def _ask_at_terminal(stub: Any, conversation: Conversation, line: str) -> None:
    try:
        _ask(stub, conversation, line)
    except KeyboardInterrupt:
        print("\n(stopped)")
    except UnicodeEncodeError:
        print("(that is not UTF-8 text)")
    except grpc.RpcError as error:
        print(f"({_sentence(error, conversation.options)})")


def _ask(stub: Any, conversation: Conversation, prompt: str) -> None:
    """Streams one answer to standard output and keeps it."""
    options = conversation.options
    call = stub.StreamChat(conversation.request(prompt), timeout=options.timeout_s)
    pieces: list[str] = []
    last = chat_pb2.ChatResponse()
    try:
        for response in call:
            pieces.append(response.text)
            _write(response.text)
            last = response
    finally:
        call.cancel()
    _write("\n")
    conversation.keep(prompt, "".join(pieces))
    if options.show_timing:
        print(_timing(last), file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _timing(last: chat_pb2.ChatResponse) -> str:
    usage, timing = last.usage, last.timing
    tries = f"; over {timing.attempts} attempts" if timing.attempts > 1 else ""
    return (
        f"[prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached; answer "
        f"{usage.completion_tokens} tokens; drafts accepted {usage.accepted_tokens} of "
        f"{usage.drafted_tokens}; first token {timing.ttft_ms:.0f} ms{tries}: queue "
        f"{timing.queue_ms:.0f}, prefill {timing.prefill_ms:.0f}; transfer "
        f"{timing.transfer_ms:.0f} ms; decode {timing.decode_ms:.0f} ms; router "
        f"{timing.router_ms:.0f} ms; {timing.prefill_worker} -> {timing.decode_worker}; "
        f"request {last.request_id}]"
    )


def _sentence(error: grpc.RpcError, options: ChatOptions) -> str:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return f"no router answers at {options.address}; start a mesh with: pdmesh up"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no complete answer within {options.timeout_s:g} s; --timeout allows more"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return f"the request is over {MAX_PUBLIC_MESSAGE >> 20} MiB, more than a router takes"
    return details or f"the router answered {code.name}"
