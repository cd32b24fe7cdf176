"""How a prefill worker sends its pages."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.stream_link import MAX_QUEUED_BYTES
from pdmesh.kvtransfer.transport import Dialer
from pdmesh.kvtransfer.transports import make_dialers
from pdmesh.wire.hashes import PageFormat

_ANY = 1 << 62


def page_sender(
    page_format: PageFormat,
    store: LatentStore,
    transports: Sequence[str] = DEFAULT_TRANSPORTS,
    dialers: Sequence[Dialer] = (),
) -> TransferSender:
    """A sender whose pushes never wait for pages in CPU memory: what is queued are views of them.

    From another device pages are copied to be pushed: only then a full queue has to wait.

    Args:
        dialers: take the place of those of ``transports``.
    """
    queue_bytes = _ANY if store.on_cpu else MAX_QUEUED_BYTES
    return TransferSender(
        page_format, dialers or make_dialers(transports, store, queue_bytes), store
    )
