"""Chunks that wait for a reader are merged, and what the reader gets says the same as they did."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.decode.framing import MOST_TOKENS, Framer, merged
from pdmesh.wire.handoff import AbortAsked
from pdmesh.wire.messages import TokenChunk, TokenLogprobs


def chunk(position, ids, **rest):
    return TokenChunk(attempt=rest.pop("attempt", 1), position=position, token_ids=ids, **rest)


def queue_of(*items):
    queue = asyncio.Queue()
    for item in items:
        queue.put_nowait(item)
    return queue


async def drained(framer, queue):
    """All items that come without waiting, with their parts."""
    found = []
    while not queue.empty() or framer._held:
        found.append(await framer.next())
    return found


def entries(ids):
    return tuple(TokenLogprobs(logprob=-float(token)) for token in ids)


@st.composite
def streams(draw):
    """A stream's items, as steps and a handoff put them there: often in order, not always."""
    with_logprobs, attempt, position = draw(st.booleans()), 1, 0
    items = []
    for number in range(draw(st.integers(1, 30))):
        kind = draw(st.sampled_from(["step"] * 8 + ["handoff", "attempt", "again", "no logprobs"]))
        if kind == "handoff":
            items.append(AbortAsked(handoff=number, reason="not now"))
            continue
        attempt += kind == "attempt"
        if kind == "again":
            position = draw(st.integers(0, position))
        ids = tuple(draw(st.lists(st.integers(0, 99), max_size=draw(st.sampled_from([1, 5, 90])))))
        logprobs = entries(ids) if with_logprobs and kind != "no logprobs" else ()
        items.append(
            chunk(
                position,
                ids,
                attempt=attempt,
                logprobs=logprobs,
                finish="stop" if draw(st.integers(0, 40)) == 0 else None,
                drafted=2 * number,
                accepted=number,
                step_ms=1.0,
            )
        )
        position += len(ids)
    return items


@given(streams(), st.lists(st.integers(0, 4), min_size=1))
def test_whenever_the_reader_comes_it_gets_all_items_in_order(items, pace):
    """``pace``: how many more items are there each time that the reader comes."""

    async def read():
        queue, found, rest = asyncio.Queue(), [], list(items)
        framer = Framer(queue)
        for turn in range(len(items) * 5):
            for _ in range(pace[turn % len(pace)] or (queue.empty() and not framer._held)):
                if rest:
                    queue.put_nowait(rest.pop(0))
            if not queue.empty() or framer._held:
                found.append(await framer.next())
        assert not rest
        return found + await drained(framer, queue)

    found = asyncio.run(read())
    assert [p for item, parts in found for p in (parts or (item,))] == items
    for item, parts in found:
        if not parts:
            assert not isinstance(item, TokenChunk)
            continue
        assert item.token_ids == tuple(t for part in parts for t in part.token_ids)
        assert item.logprobs == tuple(e for part in parts for e in part.logprobs)
        assert (item.attempt, item.position) == (parts[0].attempt, parts[0].position)
        assert (item.drafted, item.accepted) == (parts[-1].drafted, parts[-1].accepted)
        assert item.finish == parts[-1].finish
        assert item.step_ms == len(parts)
        assert len(parts) == 1 or len(item.token_ids) <= MOST_TOKENS
        assert all(part.finish is None for part in parts[:-1])
        assert len(item.logprobs) in (0, len(item.token_ids)) or len(parts) == 1
        for before, after in zip(parts, parts[1:], strict=False):
            assert after.position == before.position + len(before.token_ids)
            assert after.attempt == before.attempt


async def test_a_reader_that_keeps_up_gets_a_chunk_a_step():
    queue = asyncio.Queue()
    framer = Framer(queue)
    for position in range(5):
        waiting = asyncio.ensure_future(framer.next())
        await asyncio.sleep(0)
        assert not waiting.done(), "nothing is there yet"
        one = chunk(position, (7,))
        queue.put_nowait(one)
        assert await waiting == (one, (one,))


async def test_what_waits_comes_at_once_and_in_as_few_chunks_as_may_be():
    steps = [chunk(i, (i % 50,)) for i in range(2 * MOST_TOKENS + 1)]
    queue = queue_of(*steps)
    found = await drained(Framer(queue), queue)
    assert [len(item.token_ids) for item, _ in found] == [MOST_TOKENS, MOST_TOKENS, 1]


async def test_a_handoff_keeps_its_place_between_tokens():
    asked = AbortAsked(handoff=1, reason="no")
    queue = queue_of(chunk(0, (1,)), chunk(1, (2,)), asked, chunk(2, (3,)), None)
    found = [item for item, _ in await drained(Framer(queue), queue)]
    assert found == [chunk(0, (1, 2)), asked, chunk(2, (3,)), None]


async def test_the_chunk_that_says_that_a_moved_answer_is_active_stays_by_itself():
    active, token = chunk(9, (), attempt=2), chunk(9, (4,), attempt=2)
    queue = queue_of(active, token)
    assert [item for item, _ in await drained(Framer(queue), queue)] == [active, token]


async def test_the_end_comes_with_the_last_tokens():
    end = chunk(1, (), finish="stop", stop_token=1, drafted=8, accepted=5)
    queue = queue_of(chunk(0, (6,)), end)
    ((item, parts),) = await drained(Framer(queue), queue)
    assert (item.token_ids, item.finish, item.stop_token) == ((6,), "stop", 1)
    assert (item.drafted, item.accepted) == (8, 5)
    assert parts == (chunk(0, (6,)), end)


def test_one_chunk_alone_is_itself():
    one = chunk(3, (1, 2), logprobs=entries((1, 2)), transfer_ms=4.0)
    assert merged([one]) is one
