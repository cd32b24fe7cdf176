"""``pdmesh verify`` asks again for an answer that was over before anything was done to it."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from pdmesh.launch.verify.cases import Case
from pdmesh.launch.verify.checks import FAULTS, check_fault, check_move
from pdmesh.launch.verify.mesh import Place
from pdmesh.wire import chat_pb2
from pdmesh.wire.admin import MoveReport
from pdmesh.wire.hashes import PageFormat

FORMAT = PageFormat("tiny", "w", "float32", 64, 2, 0, 8, arithmetic="exact")
QUICK = Case("greedy", (5,), 2, (1,), {"temperature": 0.0})


class QuickMesh:
    """A mesh whose answers are over at once, but for those of the numbers in ``slow``: these end
    when they were moved or their worker is dead."""

    def __init__(self, slow, pid=0):
        self.slow, self.pid, self.asked = slow, pid, 0
        self.disturbed = asyncio.Event()
        self.stub = self
        self.place = Place("default", "", "", "", pids=lambda: {"decode-0": pid})
        self.records = self.decode = [
            SimpleNamespace(worker_id=name, page_format=FORMAT) for name in ("decode-0", "decode-1")
        ]

    async def StreamChat(self, request, timeout):
        self.asked += 1
        yield chat_pb2.ChatResponse(token_ids=[5])
        if self.asked in self.slow:
            while self.pid and not self.disturbed.is_set():
                if ended(self.pid):
                    self.disturbed.set()
                await asyncio.sleep(0.01)
            await self.disturbed.wait()
        yield chat_pb2.ChatResponse(token_ids=[6], finish_reason="length")

    async def phase(self, request_id):
        return "running"

    async def holder(self, request_id):
        return "decode-0"

    async def move(self, request_id, target=""):
        self.disturbed.set()
        return [MoveReport(index=0, state="moved", source="decode-0", pause_ms=2.0)]

    async def refresh(self):
        pass

    async def unrest(self, patience=0.0):
        return []

    def whole(self):
        return True


async def test_an_answer_that_is_over_before_it_moves_is_asked_for_again():
    mesh = QuickMesh(slow={6})  # left alone and moved by turns: at the third try
    result = await check_move(mesh, QUICK)
    assert (result.verdict, result.moves, mesh.asked) == ("passed", 1, 6)
    result = await check_move(QuickMesh(slow=()), QUICK)
    assert (result.verdict, result.moves) == ("not tried", 0)
    assert result.detail == "it did not move: the answer was over before"


async def test_a_fault_that_was_not_done_is_not_passed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        mesh = QuickMesh(slow=(), pid=process.pid)
        result = await check_fault(mesh, QUICK, FAULTS[0])
        assert (result.verdict, result.detail) == ("not tried", "the answer was over before")
        assert not ended(process.pid)
        mesh = QuickMesh(slow={4}, pid=process.pid)
        assert (await check_fault(mesh, QUICK, FAULTS[0])).verdict == "passed"
        assert ended(process.pid)
        assert mesh.asked == 4
    finally:
        process.kill()
        process.wait()


def ended(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
