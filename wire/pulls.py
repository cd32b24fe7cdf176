"""Messages of a pull: one worker (reader) takes cached pages from another (owner).

Reader to owner: ``LoanRequest`` gets a ``Loan``; the reader reads over a transport, renews the loan
while that takes long, and asks ``LoanQuestion("Validate")`` after the last read: only a yes lets it
use what it read. ``LoanQuestion("Return")`` ends a loan. Times are durations, never clock readings.
"""

from __future__ import annotations

import msgspec

from pdmesh.wire.hashes import PageFormat


class LoanRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reader to owner: keep these pages as they are for a while."""

    loan_id: str
    """Drawn by the reader; the request is idempotent by it."""
    page_format: PageFormat
    hashes: tuple[bytes, ...]
    """Of the prefix, from its first page."""
    first_page: int = 0
    """Pages before it are not wanted."""


class Loan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Owner to reader: pages ``first_page`` to ``num_pages - 1`` are pinned."""

    instance: str
    num_pages: int
    """Leading pages of the prefix that are here; at most ``first_page``: nothing is lent."""
    page_ids: tuple[int, ...] = ()
    """Where they are, for transports that read the owner's memory."""
    ttl_ms: int = 0
    """From receipt, unless it is renewed."""
    transports: tuple[tuple[str, str], ...] = ()
    """(name, address) of each transport that reads from the owner, best first."""


class LoanQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reader to owner: about a loan (methods ``RenewLoan``, ``ValidateLoan``, ``ReturnLoan``)."""

    loan_id: str
    instance: str


class LoanAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Owner to reader: whether the pages have been pinned from the grant until now."""

    valid: bool
