"""The accounting of pages, and the memory behind them."""

from __future__ import annotations

import pytest
import torch

from pdmesh.kvcache.pool import PagePool, PageState
from pdmesh.kvcache.prefix_cache import PrefixCache
from pdmesh.kvcache.store import LatentStore, tensor_bytes
from pdmesh.wire.errors import InternalError


def test_a_page_goes_from_free_to_used_to_cached_to_free():
    pool = PagePool(2)
    assert pool.reserve(1)
    page = pool.take()
    assert pool.state(page) is PageState.USED
    assert pool.unpin(page, keep=True) is PageState.CACHED
    pool.evict(page)
    assert pool.state(page) is PageState.FREE
    assert pool.check_integrity() == []


def test_the_status_adds_up_while_promises_exceed_the_free_pages():
    pool = PagePool(3)
    pool.reserve(2)
    for page in (pool.take(), pool.take()):
        pool.unpin(page, keep=True)
    assert pool.reserve(3)
    status = pool.status()
    assert (status.free, status.reserved, status.cached) == (0, 3, 0)
    assert not pool.reserve(1)
    assert pool.check_integrity() == []


def test_a_cached_page_behind_a_promise_cannot_be_pinned():
    pool = PagePool(1)
    pool.reserve(1)
    page = pool.take()
    pool.unpin(page, keep=True)
    pool.reserve(1)
    with pytest.raises(InternalError, match="needed for a promise"):
        pool.pin(page)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.take(),
        lambda pool: pool.unpin(0, keep=False),
        lambda pool: pool.pin(0),
        lambda pool: pool.evict(0),
        lambda pool: pool.quarantine(0),
        lambda pool: pool.end_quarantine(0),
        lambda pool: pool.unreserve(1),
        lambda pool: pool.reserve(-1),
    ],
)
def test_a_transition_that_the_state_does_not_allow_is_refused_and_changes_nothing(misuse):
    pool = PagePool(2)
    before = pool.status()
    with pytest.raises(InternalError):
        misuse(pool)
    assert pool.status() == before
    assert pool.check_integrity() == []


def test_a_shared_page_is_not_set_aside():
    pool = PagePool(1)
    pool.reserve(1)
    page = pool.take()
    pool.pin(page)
    with pytest.raises(InternalError, match="2 holders"):
        pool.quarantine(page)


def test_the_integrity_check_finds_a_page_that_is_lost():
    pool = PagePool(2)
    pool._free.pop()
    assert any("free list" in problem for problem in pool.check_integrity())


def test_the_integrity_check_finds_pins_on_a_page_that_is_not_used():
    pool = PagePool(2)
    pool._pins[0] = 1
    assert any("page 0" in problem for problem in pool.check_integrity())


def cached_pool(count: int) -> tuple[PagePool, PrefixCache, list[int]]:
    pool = PagePool(count)
    pool.reserve(count)
    return pool, PrefixCache(pool), [pool.take() for _ in range(count)]


def test_a_child_is_not_owned_without_its_parent():
    _, cache, pages = cached_pool(1)
    with pytest.raises(InternalError, match="parent"):
        cache.insert(b"child", b"parent", pages[0])


def test_a_hash_is_owned_once():
    _, cache, pages = cached_pool(2)
    cache.insert(b"a", None, pages[0])
    with pytest.raises(InternalError, match="already"):
        cache.insert(b"a", None, pages[1])


def test_nothing_is_evicted_while_everything_is_used():
    _, cache, pages = cached_pool(1)
    cache.insert(b"a", None, pages[0])
    with pytest.raises(InternalError, match="no cached page"):
        cache.evict_one()


def test_the_memory_of_last_uses_stays_bounded():
    pool, cache, pages = cached_pool(1)
    cache.insert(b"a", None, pages[0])
    for _ in range(1000):
        cache.start_release()
        pool.unpin(pages[0], keep=True)
        cache.released(pages[0])
        pool.pin(pages[0])
    assert len(cache._eviction._leaves) < 200


def store(dtype: torch.dtype = torch.bfloat16) -> LatentStore:
    return LatentStore(3, 2, 4, 6, dtype, "cpu")


def test_a_read_is_a_view_of_the_tensor():
    latents = store()
    view = latents.read(1, 1)
    latents.tensor[1, 1] = 3.0
    assert view == tensor_bytes(torch.full((4, 6), 3.0, dtype=torch.bfloat16))
    assert view.nbytes == latents.page_layer_bytes == 4 * 6 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_written_to_a_page_and_layer_is_there_and_nowhere_else(dtype):
    latents = store(dtype)
    values = torch.arange(24).reshape(4, 6).to(dtype)
    latents.write(2, 1, tensor_bytes(values))
    assert torch.equal(latents.tensor[2, 1], values)
    assert latents.tensor.count_nonzero() == values.count_nonzero()


def test_a_write_of_another_size_is_refused():
    with pytest.raises(InternalError, match="5 bytes"):
        store().write(0, 0, b"12345")


@pytest.mark.parametrize(("page", "layer"), [(3, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_place_outside_of_the_store_is_refused(page, layer):
    with pytest.raises(InternalError, match="outside"):
        store().read(page, layer)
