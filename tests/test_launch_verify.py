"""``pdmesh verify`` without a mesh: its cases, its judgement, its reports."""

import asyncio
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from child_path import python_path

from pdmesh.launch.verify.cases import MAX_MOVES, Room, cases
from pdmesh.launch.verify.checks import FAULTS, stand_still
from pdmesh.launch.verify.command import without_password
from pdmesh.launch.verify.compare import (
    Answer,
    beyond_rounding,
    checksum_difference,
    difference,
)
from pdmesh.launch.verify.mesh import at_work
from pdmesh.launch.verify.report import Report, Result
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PoolStatus, WorkerStatus

ROOM = Room(page_size=64, vocab_size=4096, max_context=1024)
FORMAT = PageFormat("tiny", "w", "float32", 64, 2, 0, 8)


def answer(**fields):
    told = {
        "token_ids": [5, 6, 7],
        "logprobs": [(-0.5, (5,), (-0.5,))] * 3,
        "text": "abc",
        "finish": "length",
    }
    return Answer(**{**told, **fields})


def report(*results, arithmetic="fast"):
    return Report(
        "default",
        ("prefill-0", "decode-0", "decode-1"),
        arithmetic,
        7,
        "pdmesh verify",
        list(results),
    )


def test_the_cases_of_a_seed_are_always_the_same():
    assert list(islice(cases(ROOM, 3), 20)) == list(islice(cases(ROOM, 3), 20))
    assert list(islice(cases(ROOM, 3), 20)) != list(islice(cases(ROOM, 4), 20))


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("max_context", [256, 1024])
def test_every_case_fits_the_context_and_moves_inside_its_answer(page_size, max_context):
    room = Room(page_size, 4096, max_context)
    for case in islice(cases(room, 1), 200):
        assert all(0 <= token < room.vocab_size for token in case.prompt)
        assert len(case.prompt) + case.max_tokens <= max_context
        assert 1 <= len(case.points) <= MAX_MOVES
        assert list(case.points) == sorted(set(case.points))
        assert 1 <= case.points[0] <= case.points[-1] < case.max_tokens


def test_the_cases_move_at_both_sides_of_page_boundaries():
    places = {
        (len(case.prompt) + point) % ROOM.page_size
        for case in islice(cases(ROOM, 0), 100)
        for point in case.points
    }
    assert {ROOM.page_size - 1, 0, 1} <= places


def test_the_cases_use_every_feature():
    names = {case.name.split(": ")[1].split(",")[0] for case in islice(cases(ROOM, 0), 16)}
    assert {"greedy", "seeded", "logprobs", "penalties", "n=2", "stop string", "json"} <= names


def test_equal_answers_do_not_differ():
    assert difference([answer()], [answer()]) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [5, 9, 7]}, "token 1 is 9, left alone it is 6"),
        ({"token_ids": [5, 6]}, "2 tokens, left alone 3"),
        ({"logprobs": [(-0.5, (5,), (-0.5,))] * 2 + [(-0.6, (5,), (-0.5,))]}, "token 2 differs"),
        ({"logprobs": [(-0.5, (5,), (-0.5,))] * 2}, "token 2 differs"),
        ({"text": "abd"}, "'abd', left alone 'abc'"),
        ({"finish": "stop"}, "'stop', left alone with 'length'"),
    ],
)
def test_any_difference_is_named(change, words):
    assert words in difference([answer()], [answer(**change)])
    assert "answer 1: " in difference([answer()] * 2, [answer(), answer(**change)])


def test_a_missing_answer_is_a_difference():
    assert difference([answer()] * 2, [answer()]) == "1 answers came, 2 were due"


def likely(*pairs):
    """One token's entry: (token, log-probability) from the likeliest on, which is the token."""
    return pairs[0][1], tuple(t for t, _ in pairs), tuple(p for _, p in pairs)


def likely_answer(token, *pairs, **fields):
    entries = [likely((5, -0.5)), likely(*pairs), likely((7, -0.5))]
    return answer(token_ids=[5, token, 7], logprobs=entries, **fields)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_near_tie_may_be_decided_the_other_way_and_all_else_may_differ_after_it(greedy):
    alone = likely_answer(6, (6, -0.69310), (8, -0.69319))
    moved = likely_answer(8, (8, -0.69315), (6, -0.69317), text="another", finish="stop")
    assert difference([alone], [moved])
    assert beyond_rounding([alone], [moved], 1e-3, greedy=greedy) is None


def test_another_token_of_the_same_likelihoods_is_wrong_only_where_the_best_is_taken():
    alone = likely_answer(6, (6, -0.1), (8, -2.4))
    moved = likely_answer(8, (6, -0.1), (8, -2.4))
    found = beyond_rounding([alone], [moved], 1e-3, greedy=True)
    assert found == "token 1 is 8, 2.3 less likely than the best"
    assert beyond_rounding([alone], [moved], 1e-3, greedy=False) is None


def test_likelihoods_apart_are_wrong_whatever_the_token():
    alone = likely_answer(6, (6, -0.10), (8, -2.4))
    for token in (6, 8):
        moved = likely_answer(token, (6, -0.11), (8, -2.4))
        found = beyond_rounding([alone], [moved], 1e-3, greedy=False)
        assert found == "the log-probabilities of token 1 are 0.01 apart"


def test_equal_tokens_with_another_text_or_a_missing_answer_are_no_rounding():
    alone = likely_answer(6, (6, -0.1))
    for moved in ([], [likely_answer(6, (6, -0.1), text="x")]):
        assert beyond_rounding([alone], moved, 1e-3, greedy=False)


def test_pages_are_compared_as_far_as_both_have_them():
    assert checksum_difference(("a", (1, 2, 3)), ("b", (1, 2))) is None
    found = checksum_difference(("a", (1, 2, 3)), ("b", (1, 5)))
    assert found == "page 1 at b is not page 1 at a"


def test_a_report_with_a_failure_is_not_ok_and_names_it():
    bad = report(
        Result("migration", "one", "passed", moves=2, pauses_ms=(1.0, 3.0)),
        Result("migration", "two", "failed", "token 3 is 1, left alone it is 2"),
    )
    assert not bad.ok
    text = bad.as_text()
    assert "token 3 is 1" in text
    assert "NOT VERIFIED" in text
    assert "1 passed, 1 failed" in text
    assert "2 moves, pause median 3.0 ms" in text


def test_a_report_in_which_nothing_was_tried_is_not_ok():
    assert not report(Result("migration", "one", "not tried", "it did not move")).ok
    assert not report().ok
    assert report(Result("migration", "one", "passed")).ok


def test_a_report_as_json_can_be_read_back():
    told = json.loads(report(Result("rest", "x", "passed", pages=3)).as_json())
    assert told["ok"] is True
    assert told["results"][0]["pages"] == 3
    assert told["seed"] == 7


def test_a_report_as_html_shows_no_raw_text_of_the_mesh():
    page = report(Result("migration", "<script>", "failed", "a & b")).as_html()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "not verified" in page


def test_a_worker_at_rest_holds_nothing():
    idle = PoolStatus(total=9, free=5, reserved=0, used=0, cached=4, quarantined=0)
    status = WorkerStatus(
        worker_id="decode-0",
        instance="i",
        role="decode",
        state="ready",
        page_format=FORMAT,
        pool=idle,
        queued=0,
        running=0,
    )
    assert at_work(status) == []


@pytest.mark.parametrize("name", ["used", "reserved", "quarantined"])
def test_a_worker_that_holds_a_page_is_not_at_rest(name):
    pool = {"total": 9, "free": 8, "reserved": 0, "used": 0, "cached": 0, "quarantined": 0, name: 1}
    status = WorkerStatus(
        worker_id="decode-0",
        instance="i",
        role="decode",
        state="ready",
        page_format=FORMAT,
        pool=PoolStatus(**pool),
        queued=0,
        running=0,
        problems=("page 3 has 2 pins",),
    )
    assert len(at_work(status)) == 2
    assert all(sentence.startswith("decode-0: ") for sentence in at_work(status))


def test_there_is_a_fault_for_each_side_of_a_move_and_for_none():
    assert {(fault.moving, fault.victim) for fault in FAULTS} == {
        (False, "source"),
        (True, "source"),
        (True, "target"),
    }
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize(
    "url", ["redis://:pw@h:1/0", "rediss://me:p%20w@h", "--redis=redis://a:pw@h"]
)
def test_the_command_in_a_report_shows_no_password(url):
    shown = without_password(["pdmesh", "verify", "--mesh", "10.0.0.1:7080", url])
    assert "pw" not in shown
    assert "p%20w" not in shown
    assert shown.startswith("pdmesh verify --mesh 10.0.0.1:7080 ")
    assert "@h" in shown


async def test_a_worker_that_stood_still_goes_on_also_where_its_answer_was_over_before():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        standing = asyncio.create_task(stand_still(process.pid, 600))
        await state_becomes(process.pid, stopped=True)
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)
        await state_becomes(process.pid, stopped=False)
    finally:
        process.kill()
        process.wait()


async def state_becomes(pid, stopped):
    async with asyncio.timeout(60):
        while (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        ) != stopped:
            await asyncio.sleep(0.01)


def test_in_a_suite_of_somebody_else_a_mesh_that_does_not_run_is_a_sentence(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "pdmesh.launch.verify.pytest_plugin"]
    told = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--pdmesh-verify", "nowhere", str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1
    assert "3 failed" in told.stdout
    assert "nowhere" in told.stdout
    assert "Traceback" not in told.stdout
