"""A watched stream passes items on, and ends when worker and stream are silent together."""

import asyncio
from contextlib import suppress

import pytest

from pdmesh.router.silence import Watched
from pdmesh.wire.errors import LeaseGone, WorkerLost

LIMIT = 0.1


class Worker:
    """Sends what a test puts in; answers, when asked, as the test says."""

    def __init__(self, *answers):
        self.sent = asyncio.Queue()
        self.answers = list(answers)
        self.asked = []
        self.closed = False

    async def items(self):
        try:
            while True:
                item = await self.sent.get()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True

    async def alive(self, within):
        self.asked.append(within)
        answer = self.answers.pop(0)
        if callable(answer):
            return await answer()
        return answer

    def watched(self, limit=LIMIT):
        return Watched("decode-0", self.items(), limit, self.alive)


async def test_items_come_through_in_order_and_a_working_stream_is_never_asked_about():
    worker = Worker()
    watched = worker.watched(limit=60)
    for n in range(100):
        worker.sent.put_nowait(n)
    assert [await watched.next() for _ in range(100)] == list(range(100))
    await watched.aclose()
    assert worker.closed
    assert worker.asked == []


async def test_a_worker_that_does_not_answer_either_is_lost():
    worker = Worker(False)
    watched = worker.watched()
    with pytest.raises(WorkerLost, match=r"decode-0 has sent nothing for 0\.1 s and does not"):
        await watched.next()
    assert worker.asked == [LIMIT / 2]
    await watched.aclose()
    assert worker.closed


async def test_a_worker_that_answers_may_take_its_time():
    worker = Worker(True, True, True)
    watched = worker.watched()
    waiting = asyncio.create_task(watched.next())
    async with asyncio.timeout(60):
        while len(worker.asked) < 3:
            await asyncio.sleep(0.005)
    worker.sent.put_nowait("late")
    assert await waiting == "late"
    await watched.aclose()


async def test_an_item_that_comes_while_the_worker_is_asked_counts():
    worker = Worker()

    async def send_and_say_no():
        worker.sent.put_nowait("just in time")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return False

    worker.answers = [send_and_say_no, False]
    watched = worker.watched()
    assert await watched.next() == "just in time"
    with pytest.raises(WorkerLost):
        await watched.next()
    assert len(worker.asked) == 2
    await watched.aclose()


async def test_a_reader_that_is_slow_itself_blames_nobody():
    worker = Worker()
    watched = worker.watched(limit=0.02)
    worker.sent.put_nowait(1)
    assert await watched.next() == 1
    await asyncio.sleep(0.06)
    worker.sent.put_nowait(2)
    assert await watched.next() == 2
    assert worker.asked == []
    await watched.aclose()


async def test_the_first_item_is_asked_for_before_anybody_waits():
    worker = Worker()
    watched = worker.watched(limit=60)
    worker.sent.put_nowait("early")
    watched.open()
    async with asyncio.timeout(60):
        while not worker.sent.empty():
            await asyncio.sleep(0)
    assert await watched.next() == "early"
    await watched.aclose()


async def test_an_end_is_a_loss_and_an_error_is_passed_on():
    worker = Worker()
    watched = worker.watched(limit=60)
    worker.sent.put_nowait(None)
    with pytest.raises(WorkerLost, match="ended the stream before the answer"):
        await watched.next()
    await watched.aclose()
    worker = Worker()
    watched = worker.watched(limit=60)
    worker.sent.put_nowait(LeaseGone("x"))
    watched.open()
    with pytest.raises(LeaseGone):
        await watched.next()
    await watched.aclose()


@pytest.mark.parametrize("opened", [True, False])
async def test_closing_in_the_middle_leaves_no_task_behind(opened):
    worker = Worker()
    watched = worker.watched(limit=60)
    if opened:
        watched.open()
        await asyncio.sleep(0)
    else:
        waiting = asyncio.create_task(watched.next())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await watched.aclose()
    assert worker.closed
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nobody_is_asked_any_more_once_a_stream_is_closed():
    """Also where the question was answered just as it was given up."""
    asked = asyncio.Event()

    async def answered():
        asked.set()
        with suppress(asyncio.CancelledError):  # as a call may that has its answer already
            await asyncio.Event().wait()
        return True

    worker = Worker(answered)
    watched = worker.watched()
    waiting = asyncio.ensure_future(watched.next())
    await asked.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    await watched.aclose()
    assert watched._timer.cancelled()
