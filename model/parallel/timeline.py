"""What ran when: recorded or predicted, as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdmesh.model.parallel.exchange import Channel, Message, Transport
from pdmesh.model.parallel.schedule import WHOLE, Item, Stage


@dataclass(frozen=True)
class Event:
    """`name` on `track` of rank `rank`; times in microseconds."""

    rank: int
    track: str
    name: str
    microbatch: int
    layer: int
    begin_us: float
    end_us: float


class Timeline:
    """Collects events; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self.events: list[Event] = []

    def add(self, rank: int, item: Item, began: float) -> None:
        """A stage, or a part of one between two waits, ran from `began` until now."""
        self.events.append(
            Event(
                rank,
                "compute",
                item.stage.name.lower(),
                item.microbatch,
                item.layer,
                began * 1e6,
                self.now() * 1e6,
            )
        )

    def waited(self, rank: int, channel: Channel, began: float) -> None:
        """A rank waited for a message from `began` until now."""
        self.events.append(
            Event(
                rank,
                "waits",
                channel.kind,
                channel.microbatch,
                channel.layer,
                began * 1e6,
                self.now() * 1e6,
            )
        )


class TimedTransport:
    """A transport whose waits for other ranks are events."""

    def __init__(self, transport: Transport, timeline: Timeline) -> None:
        self._transport = transport
        self._timeline = timeline
        self.rank = transport.rank
        self.post = transport.post

    def take(self, source: int, channel: Channel) -> Message:
        """See `Transport`."""
        began = self._timeline.now()
        try:
            return self._transport.take(source, channel)
        finally:
            self._timeline.waited(self.rank, channel, began)


def chrome_trace(events: Sequence[Event], names: Mapping[int, str] | None = None) -> str:
    """The JSON text; ranks are processes and tracks threads, times begin at zero.

    `names` are those of the processes, where they are not to be called after their ranks.
    """
    called = names or {}
    start = min((event.begin_us for event in events), default=0.0)
    tracks = sorted({event.track for event in events})
    entries: list[dict[str, object]] = [
        {
            "ph": "M",
            "pid": rank,
            "name": "process_name",
            "args": {"name": called.get(rank, f"rank {rank}")},
        }
        for rank in sorted({event.rank for event in events})
    ]
    entries += [
        {
            "ph": "M",
            "pid": rank,
            "tid": tracks.index(track),
            "name": "thread_name",
            "args": {"name": track},
        }
        for rank, track in sorted({(event.rank, event.track) for event in events})
    ]
    entries += [
        {
            "ph": "X",
            "pid": event.rank,
            "tid": tracks.index(event.track),
            "name": event.name,
            "cat": event.track,
            "ts": round(event.begin_us - start, 3),
            "dur": round(event.end_us - event.begin_us, 3),
            "args": {"microbatch": event.microbatch, "layer": event.layer},
        }
        for event in events
    ]
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"})


@dataclass(frozen=True)
class StageCosts:
    """Microseconds of one microbatch; `halved` turns those of a whole batch into a half's.

    A stage without wire computes; `dispatch` and `combine` are on the wire from their send on.
    """

    project: float
    attend: float
    shared: float
    experts: float
    dispatch: float
    combine: float
    dense: float = 0.0

    def halved(self, compute: float = 0.5, wire: float = 0.5) -> StageCosts:
        """The costs of half the batch, as shares of the whole's."""
        return StageCosts(
            self.project * compute,
            self.attend * compute,
            self.shared * compute,
            self.experts * compute,
            self.dispatch * wire,
            self.combine * wire,
            self.dense,
        )


def predict(
    schedule: Sequence[Item], costs: StageCosts, half: StageCosts, rank: int = 0
) -> list[Event]:
    """One rank's timeline if stages took these times: one unit computes, rows travel beside it.

    Two exchanges at a time share nothing: the wire takes them one after the other.

    Args:
        schedule: what runs.
        costs: of the whole batch.
        half: of a microbatch.
        rank: whose number the events get.
    """
    clock = _Clock(rank)
    for item in schedule:
        clock.run(item, costs if item.microbatch == WHOLE else half)
    return clock.events


class _Clock:
    def __init__(self, rank: int) -> None:
        self.events: list[Event] = []
        self._rank = rank
        self._now = 0.0
        self._wire = 0.0
        self._arrives: dict[int, float] = {}

    def run(self, item: Item, costs: StageCosts) -> None:
        match item.stage:
            case Stage.DENSE:
                self._compute(item, "dense", costs.dense)
            case Stage.PROJECT:
                self._compute(item, "project", costs.project)
            case Stage.ATTEND:
                self._compute(item, "attend", costs.attend)
            case Stage.SEND:
                self._send(item, "dispatch", costs.dispatch)
                self._compute(item, "shared", costs.shared)
            case Stage.SHARED_FIRST:
                self._compute(item, "shared", costs.shared)
                self._send(item, "dispatch", costs.dispatch)
            case Stage.EXPERTS:
                self._wait(item)
                self._compute(item, "experts", costs.experts)
                self._send(item, "combine", costs.combine)
            case Stage.RECEIVE:
                self._wait(item)

    def _compute(self, item: Item, name: str, duration: float) -> None:
        end = self._now + duration
        self._add(item, "compute", name, self._now, end)
        self._now = end

    def _send(self, item: Item, name: str, duration: float) -> None:
        begin = max(self._now, self._wire)
        self._wire = self._arrives[item.microbatch] = begin + duration
        self._add(item, "wire", name, begin, self._wire)

    def _wait(self, item: Item) -> None:
        until = max(self._now, self._arrives[item.microbatch])
        if until > self._now:
            self._add(item, "compute", "wait", self._now, until)
        self._now = until

    def _add(self, item: Item, track: str, name: str, begin: float, end: float) -> None:
        self.events.append(Event(self._rank, track, name, item.microbatch, item.layer, begin, end))
