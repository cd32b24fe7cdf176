"""Messages between ranks of one process."""

from __future__ import annotations

from collections import defaultdict

from pdmesh.model.parallel.exchange import Channel, Message, RankLost


class Mailboxes:
    """All ranks' messages that have been sent and not yet been taken."""

    def __init__(self) -> None:
        self.waiting: defaultdict[Channel, dict[tuple[int, int], Message]] = defaultdict(dict)

    def end(self, rank: int) -> MailboxTransport:
        """The transport of `rank`."""
        return MailboxTransport(self, rank)


class MailboxTransport:
    """One rank's end. Ranks run in turn, so what was not sent before it is taken never comes."""

    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self._mailboxes = mailboxes
        self.rank = rank

    def post(self, to: int, channel: Channel, message: Message) -> None:
        """See `Transport`."""
        boxes = self._mailboxes.waiting[channel]
        assert (self.rank, to) not in boxes, f"two messages from {self.rank} to {to}: {channel}"
        boxes[self.rank, to] = message

    def take(self, source: int, channel: Channel) -> Message:
        """See `Transport`."""
        try:
            return self._mailboxes.waiting[channel].pop((source, self.rank))
        except KeyError:
            raise RankLost(source, str(channel)) from None
