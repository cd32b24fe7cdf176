"""What a verification found: for a terminal, as JSON, as one HTML page. Pure."""

from __future__ import annotations

import html
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Literal

import msgspec

Verdict = Literal["passed", "failed", "not tried"]


@dataclass(frozen=True)
class Result:
    """One check.

    Attributes:
        group: what kind of check.
        name: which one.
        verdict: "not tried" where the mesh gave no chance to, e.g. an answer that ended too early.
        detail: what was wrong, or why it was not tried; else what was seen.
        moves: times that an answer changed its worker.
        pages: pages whose checksums were compared.
        pauses_ms: of each move, as the router saw it.
        seconds: that the check took.
    """

    group: str
    name: str
    verdict: Verdict
    detail: str = ""
    moves: int = 0
    pages: int = 0
    pauses_ms: tuple[float, ...] = ()
    seconds: float = 0.0


@dataclass
class Report:
    """All checks of one run against one mesh."""

    mesh: str
    workers: tuple[str, ...]
    arithmetic: str
    seed: int
    command: str
    results: list[Result] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == "failed"]

    @property
    def ok(self) -> bool:
        """Nothing failed and something passed."""
        return not self.failed and any(r.verdict == "passed" for r in self.results)

    @property
    def moves(self) -> int:
        return sum(result.moves for result in self.results)

    @property
    def pauses_ms(self) -> list[float]:
        return sorted(pause for result in self.results for pause in result.pauses_ms)

    def as_json(self) -> str:
        """One JSON object."""
        whole = {**asdict(self), "ok": self.ok, "moves": self.moves}
        return msgspec.json.format(msgspec.json.encode(whole)).decode()

    def as_text(self) -> str:
        """Counts by group, then what failed and what was not tried."""
        lines = [f"mesh {self.mesh}, arithmetic {self.arithmetic}: {', '.join(self.workers)}"]
        for group in dict.fromkeys(result.group for result in self.results):
            lines.append("  " + self._line(group))
        lines.append(f"  {self.moves} moves{_pauses(self.pauses_ms)}")
        for result in self.results:
            if result.verdict != "passed":
                lines.append(f"  {result.verdict}: {result.group}, {result.name}: {result.detail}")
        lines.append("verified" if self.ok else "NOT VERIFIED")
        return "\n".join(lines)

    def _line(self, group: str) -> str:
        mine = [result for result in self.results if result.group == group]
        counts = Counter(result.verdict for result in mine)
        words = [f"{counts[v]} {v}" for v in ("passed", "failed", "not tried") if counts[v]]
        pages = sum(result.pages for result in mine)
        compared = f", {pages} pages compared" if pages else ""
        return f"{group}: {', '.join(words)}{compared}"

    def as_html(self) -> str:
        """One page without outside parts."""
        rows = "\n".join(_row(result) for result in self.results)
        head = html.escape(f"pdmesh verify: mesh {self.mesh}")
        verdict = "verified" if self.ok else "not verified"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began))
        facts = html.escape(
            f"{when}; arithmetic {self.arithmetic}; seed {self.seed}; {len(self.results)} checks,"
            f" {self.moves} moves{_pauses(self.pauses_ms)}; workers {', '.join(self.workers)}"
        )
        return _PAGE.format(
            head=head,
            verdict=verdict,
            kind="good" if self.ok else "bad",
            facts=facts,
            command=html.escape(self.command),
            rows=rows,
        )


def _pauses(pauses: list[float]) -> str:
    if not pauses:
        return ""
    middle, last = pauses[len(pauses) // 2], pauses[min(len(pauses) - 1, len(pauses) * 99 // 100)]
    return f", pause median {middle:.1f} ms, p99 {last:.1f} ms"


def _row(result: Result) -> str:
    kind = {"passed": "good", "failed": "bad", "not tried": "none"}[result.verdict]
    cells = (
        result.group,
        result.name,
        result.verdict,
        str(result.moves),
        str(result.pages),
        f"{result.seconds:.2f}",
        result.detail,
    )
    filled = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f'<tr class="{kind}">{filled}</tr>'


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{head}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; color: #1b1f24; background: #fff; }}
h1 {{ font-size: 1.4rem; margin-bottom: .2rem; }}
.verdict {{ display: inline-block; padding: .1rem .6rem; border-radius: .3rem; color: #fff;
  font-weight: 600; }}
.verdict.good {{ background: #1a7f37; }} .verdict.bad {{ background: #cf222e; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 1rem; }}
th, td {{ text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4;
  vertical-align: top; }}
td:nth-child(4), td:nth-child(5), td:nth-child(6) {{ text-align: right;
  font-variant-numeric: tabular-nums; }}
tr.bad td:nth-child(3) {{ color: #cf222e; font-weight: 600; }}
tr.good td:nth-child(3) {{ color: #1a7f37; }} tr.none td:nth-child(3) {{ color: #6e7781; }}
code {{ background: #f6f8fa; padding: .1rem .3rem; }}
</style></head><body>
<h1>{head}</h1>
<p><span class="verdict {kind}">{verdict}</span></p>
<p>{facts}</p>
<p>Repeat with <code>{command}</code></p>
<table><thead><tr><th>group</th><th>check</th><th>verdict</th><th>moves</th><th>pages</th>
<th>s</th><th>detail</th></tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""
