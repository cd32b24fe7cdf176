"""Every error that may reach a person or another process, each with the status it maps to.

A boundary (gRPC server, HTTP server, command line) maps these and nothing else; an error of a
third-party library is turned into one of these where the library is called.
"""

from __future__ import annotations


class PdmeshError(Exception):
    """Base of all errors of the mesh. ``status`` is the name of a gRPC status code."""

    status = "INTERNAL"

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(PdmeshError):
    """The request can never be served as it stands: the client has to change it."""

    status = "INVALID_ARGUMENT"


class UnknownModel(InvalidRequest):
    """The model named by the client is not served here."""


class TooLarge(PdmeshError):
    """A message or prompt over a stated size limit."""

    status = "RESOURCE_EXHAUSTED"


class Overloaded(PdmeshError):
    """No room now; the same request may be served later.

    Attributes:
        retry_after_s: when to come again, in seconds; not sent between workers.
    """

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(PdmeshError):
    """A part of the mesh that the request needs is absent or starting."""

    status = "UNAVAILABLE"


class Draining(Unavailable):
    """A worker that takes nothing new, or hands back what it has not begun; nothing went wrong."""


class WorkerLost(Unavailable):
    """A worker went away, or stopped answering, while it served the request."""


class TransferFailed(Unavailable):
    """The pages of a prompt did not all arrive; nothing was generated from them."""


class LeaseGone(PdmeshError):
    """A reservation that has been released, replaced by a later generation, or never existed."""

    status = "ABORTED"


class Preempted(PdmeshError):
    """A sequence gave its pages up for others; it goes on from its last token elsewhere."""

    status = "ABORTED"


class Cancelled(PdmeshError):
    """The client, or its deadline, ended the request."""

    status = "CANCELLED"


class DeadlineExceeded(Cancelled):
    """The time given to the request, or to one call, is over."""

    status = "DEADLINE_EXCEEDED"


class Incompatible(PdmeshError):
    """Two peers differ in version, page format or model; the message names both sides."""

    status = "FAILED_PRECONDITION"


class ConfigError(PdmeshError):
    """A file, key, flag or checkpoint is wrong: one sentence with the fix. Exit code 2."""

    status = "INVALID_ARGUMENT"


class InternalError(PdmeshError):
    """A fault of the mesh itself."""


_BY_NAME: dict[str, type[PdmeshError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        UnknownModel,
        TooLarge,
        Overloaded,
        Unavailable,
        Draining,
        WorkerLost,
        TransferFailed,
        LeaseGone,
        Preempted,
        Cancelled,
        DeadlineExceeded,
        Incompatible,
        ConfigError,
        InternalError,
    )
}


def error_from_wire(name: str, message: str) -> PdmeshError:
    """The error a peer raised, from its class name and message as sent over the wire."""
    return _BY_NAME.get(name, InternalError)(message)
