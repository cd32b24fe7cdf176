"""The owner of lent pages: what it promises, for how long, and what it says afterwards."""

import msgspec
import pytest
from pull_rig import FORMAT, SIZE, Clock, chain

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.pull_lender import PageLender
from pdmesh.wire.errors import Incompatible, Unavailable
from pdmesh.wire.pulls import LoanQuestion, LoanRequest


class Bank:
    """A lender over pages that are cached, and its clock."""

    def __init__(self, cached=4, pages=16):
        self.clock = Clock()
        self.kv = KvManager(pages, SIZE, lambda _: None, lambda _: None)
        held = self.kv.reserve(chain(cached), cached, cached)
        held.grow(cached)
        held.publish(0, chain(cached))
        held.release()
        self.unpinned = 0
        self.lender = PageLender(self.kv, "me", FORMAT, ttl_s=10.0, clock=self.clock)
        self.lender.on_unpinned = self._count

    def _count(self):
        self.unpinned += 1

    def lend(self, loan_id="loan", hashes=None, first_page=0):
        return self.lender.lend(
            LoanRequest(
                loan_id=loan_id,
                page_format=FORMAT,
                hashes=chain(4) if hashes is None else hashes,
                first_page=first_page,
            )
        )

    def ask(self, method, loan_id="loan", instance="me"):
        return getattr(self.lender, method)(LoanQuestion(loan_id=loan_id, instance=instance)).valid

    def evictable(self):
        """Pages that the worker itself could take now."""
        return self.kv.available

    def check(self):
        assert not self.lender.check_integrity()
        assert not self.kv.check_integrity()


def test_leading_pages_are_lent_with_their_places():
    bank = Bank(cached=3)
    loan = bank.lend(hashes=chain(5))
    held = bank.kv.reserve(chain(3), 3, 3)
    assert (loan.instance, loan.num_pages, loan.ttl_ms) == ("me", 3, 10_000)
    assert loan.page_ids == held.page_table
    assert [bank.lender.lent_page("loan", page) for page in range(4)] == [*loan.page_ids, None]
    held.release()


def test_pages_that_the_reader_has_are_not_named():
    bank = Bank()
    loan = bank.lend(first_page=3)
    assert loan.num_pages == 4
    assert len(loan.page_ids) == 1
    assert bank.lender.lent_page("loan", 2) is None
    assert bank.lend("other", first_page=4).num_pages == 0


def test_lent_pages_are_not_evicted_and_come_back():
    bank = Bank()
    bank.lend()
    assert bank.evictable() == 12
    assert bank.ask("validate")
    assert bank.ask("give_back")
    assert bank.evictable() == 16
    assert bank.unpinned == 1
    assert not bank.ask("validate")
    bank.check()


def test_a_loan_is_asked_for_twice_and_given_once():
    bank = Bank()
    first = bank.lend()
    bank.clock.now += 4.0
    again = bank.lend()
    assert again == msgspec.structs.replace(first, ttl_ms=6_000)
    assert bank.ask("give_back")
    assert bank.evictable() == 16


def test_a_loan_ends_with_its_time():
    bank = Bank()
    bank.lend()
    bank.clock.now += 9.9
    assert bank.ask("validate")
    assert bank.lender.expire() == pytest.approx(0.1)
    bank.clock.now += 0.2
    assert bank.lender.lent_page("loan", 0) is None
    assert not bank.ask("validate")
    assert not bank.ask("renew")
    assert bank.evictable() == 16
    assert bank.unpinned == 1
    assert bank.lend().num_pages == 0, "it is not taken up again"
    bank.check()


def test_a_renewed_loan_lasts_longer():
    bank = Bank()
    bank.lend()
    for _ in range(5):
        bank.clock.now += 9.0
        assert bank.ask("renew")
    assert bank.ask("validate")
    bank.clock.now += 10.0
    assert not bank.ask("validate")


def test_pages_that_are_cached_again_do_not_make_a_lapsed_loan_valid():
    bank = Bank()
    bank.lend()
    bank.clock.now += 11.0
    bank.lender.expire()
    other = bank.lend("other")
    assert other.num_pages == 4
    assert not bank.ask("validate")


@pytest.mark.parametrize("method", ["renew", "validate", "give_back"])
def test_an_unknown_loan_is_worth_nothing(method):
    bank = Bank()
    assert not bank.ask(method)
    bank.lend("held")
    assert not bank.ask("renew", "held", instance="before")
    assert not bank.ask("validate", "x")
    assert not bank.ask("validate", "held", instance="before"), "another process granted it"
    bank.check()


def test_a_loan_given_back_before_it_is_asked_for_is_refused():
    bank = Bank()
    assert not bank.ask("give_back")
    assert bank.lend().num_pages == 0
    assert bank.evictable() == 16
    bank.clock.now += 1e4
    bank.lender.expire()
    assert not bank.lender._loans, "nothing is remembered for ever"


def test_at_most_half_of_the_pool_is_lent():
    bank = Bank(cached=6, pages=10)
    assert bank.lend("a", chain(6)).num_pages == 0
    assert bank.lend("b", chain(5)).num_pages == 5
    assert bank.lend("c", chain(4)).num_pages == 4, "the same pages"
    assert bank.lend("d", chain(6), first_page=5).num_pages == 0
    assert bank.evictable() == 5


def test_pages_behind_promises_are_not_lent():
    bank = Bank(cached=4, pages=8)
    promise = bank.kv.reserve((), 0, 7)
    assert bank.lend().num_pages == 1
    promise.release()
    bank.check()


def test_the_end_of_a_worker_ends_its_loans():
    bank = Bank()
    bank.lend()
    bank.lender.close()
    bank.lender.close()
    assert bank.evictable() == 16
    assert not bank.ask("validate")
    with pytest.raises(Unavailable):
        bank.lend("late")
    bank.check()


def test_pages_of_another_format_are_refused_by_name():
    bank = Bank()
    other = msgspec.structs.replace(FORMAT, page_size=64)
    with pytest.raises(Incompatible, match="page_size is 16 here and 64 there"):
        bank.lender.lend(LoanRequest(loan_id="x", page_format=other, hashes=chain(4)))
