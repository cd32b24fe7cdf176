"""What nvcc makes of the CUDA C++ kernels: registers, spills, warnings, and loops by pipe.

    python tools/sass_report.py [--tune] [--only NAME] [--jobs 2]

Needs nvcc 13 ($CUDA_HOME, /usr/local/cuda or PATH) and nvdisasm ($NVDISASM, beside nvcc, in
Triton's package or PATH), no GPU. Ends with 1 if ptxas made products wait for each other.

A line for each loop that multiplies, or is long and loads no tiles: instructions of a warp in one
pass, without those of loops inside, and the cycles that a pass of one warpgroup (four warps, one a
scheduler) keeps each pipe of a multiprocessor busy, by the rates that NVIDIA publishes for compute
capability 9.0. The largest is a bound; warpgroups that run the same loop add up, and what waits for
memory or for each other is not in it. Both branches of a condition are counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v")
ALU = {"FMNMX", "FSEL", "FSETP", "ISETP", "SEL", "LOP3", "SHF", "IADD3", "VIADD", "VIMNMX"}
ALU |= {"VIMNMX3", "PRMT", "LEA", "F2FP", "I2FP", "POPC", "PLOP3", "FCHK", "VOTE"}
"""64 results a cycle and multiprocessor: an instruction takes two cycles of its scheduler's."""
FMA = {"FFMA": 1, "FMUL": 1, "FADD": 1, "HMUL2": 1, "HADD2": 1, "HFMA2": 1, "IMAD": 2, "MOV": 1}
"""Cycles of its scheduler's; 128 results of float32 a cycle and multiprocessor, 64 of IMAD."""
MUFU = 8
"""16 results a cycle and multiprocessor."""
SHARED_BYTES = 128
"""A cycle, of shared memory."""


class Cost(NamedTuple):
    """One pass: instructions of a warp, and cycles of a multiprocessor's pipes for four warps."""

    instructions: int
    products: int
    tensor: float
    shared: float
    alu: int
    fma: int
    mufu: int
    waits: int
    spills: int


class Loop(NamedTuple):
    function: str
    depth: int
    cost: Cost


def cost(instructions: Sequence[str]) -> Cost:
    """Of SASS instructions, each as nvdisasm prints it, without its predicate."""
    count = Counter(text.split()[0].split(".")[0] for text in instructions)
    tensor = shared = 0.0
    for text in instructions:
        name, *modifiers = text.split()[0].split(".")
        if name in ("HGMMA", "QGMMA"):
            columns = int(modifiers[0].split("x")[1])
            # 64 rows and 32 bytes of k, which takes a cycle for two columns in either type.
            tensor += columns / 2
            from_registers = not text.split(",")[1].strip().startswith("gdesc")
            shared += ((0 if from_registers else 64) + columns) * 32 / SHARED_BYTES
        elif name in ("LDS", "STS"):
            bits = max([int(m) for m in modifiers if m in ("64", "128")], default=32)
            shared += 4 * 32 * bits / 8 / SHARED_BYTES
        elif name == "LDSM":
            matrices = int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1
            shared += 4 * matrices * 128 / SHARED_BYTES
    return Cost(
        instructions=len(instructions),
        products=count["HGMMA"] + count["QGMMA"],
        tensor=tensor,
        shared=shared,
        alu=2 * sum(number for name, number in count.items() if name in ALU),
        fma=sum(FMA[name] * number for name, number in count.items() if name in FMA),
        mufu=MUFU * count["MUFU"],
        waits=count["SYNCS"] + count["BAR"] + count["WARPGROUP"] + count["MEMBAR"],
        spills=count["LDL"] + count["STL"],
    )


_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,]+),")
_LABEL = re.compile(r"(\.L_x_\d+):")
_LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+ +)?(.*?)\s*;")
_BRANCH = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")


def functions(sass: str) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Of nvdisasm's text: names, instructions, and where labels stand."""
    name, body, labels = "", list[str](), dict[str, int]()
    for line in sass.splitlines():
        if found := _SECTION.match(line):
            if body:
                yield name, body, labels
            name, body, labels = found[1], [], {}
        elif found := _LABEL.match(line):
            labels[found[1]] = len(body)
        elif found := _LINE.match(line):
            body.append(found[2])
    if body:
        yield name, body, labels


def loops(sass: str) -> list[Loop]:
    """Those to be shown; a wait that is tried again behind the end of a function is none."""
    found = []
    for name, body, labels in functions(sass):
        ends: dict[int, int] = {}
        for at, text in enumerate(body):
            begin = labels.get(hit[1], at) if (hit := _BRANCH.match(text)) else at
            if begin < at and not any(t.split()[0] == "EXIT" for t in body[begin:at]):
                ends[begin] = max(at, ends.get(begin, at))
        spans = sorted(ends.items(), key=lambda span: (span[0], -span[1]))
        for begin, end in spans:
            inner = [s for s in spans if begin <= s[0] and s[1] <= end and s != (begin, end)]
            own = [body[i] for i in range(begin, end + 1) if not any(a <= i <= b for a, b in inner)]
            depth = sum(a <= begin and end <= b for a, b in spans) - 1
            of = cost(own)
            loads = any(text.startswith("UTMALDG") for text in own)
            if of.products or (of.instructions >= 40 and not loads):
                found.append(Loop(short(name), depth, of))
    return found


def short(name: str) -> str:
    """A function's name, of C++'s mangled one the last two parts of the scope."""
    parts, rest = [], name.removeprefix("_ZN")
    while rest != name and (found := re.match(r"\d+", rest)):
        end = found.end() + int(found[0])
        parts.append(rest[found.end() : end])
        rest = rest[end:]
    return "::".join(parts[-2:]) or name


def compiled(log: str) -> dict[str, tuple[int, int]]:
    """By function, of `ptxas -v`: registers, and bytes spilled."""
    found: dict[str, tuple[int, int]] = {}
    name, spilled = "", 0
    for line in log.splitlines():
        if hit := re.search(r"Compiling entry function '(\S+)'", line):
            name, spilled = short(hit[1]), 0
        elif hit := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = max(spilled, int(hit[1]), int(hit[2]))
        elif hit := re.search(r"Used (\d+) registers", line):
            found[name] = int(hit[1]), spilled
    return found


def warnings(log: str) -> list[str]:
    """What ptxas says it could not do well."""
    return [line.split("ptxas info")[-1].strip(" :") for line in log.splitlines() if "(C75" in line]


def disassembler(nvcc: str) -> str | None:
    """nvdisasm's path."""
    triton = importlib.util.find_spec("triton")
    folders = [Path(nvcc).resolve().parent]
    if triton is not None and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    places = [os.environ.get("NVDISASM"), *(str(f / "nvdisasm") for f in folders)]
    there = [place for place in places if place and Path(place).exists()]
    return there[0] if there else shutil.which("nvdisasm")


def inspect(text: str, nvcc: str, nvdisasm: str) -> tuple[str, str]:
    """ptxas's messages and the instructions of a translation unit.

    Raises:
        RuntimeError: it does not compile, or what came out cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "unit.cu", Path(folder) / "unit.cubin"
        source.write_text(text)
        log = _run([nvcc, *FLAGS, "-o", str(made), str(source)])
        return log.stderr + log.stdout, _run([nvdisasm, "-c", str(made)]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr[-500:]}")
    return done


HEAD = "function                instr wgmma  tensor  shared    alu    fma  mufu waits local"


def report(name: str, log: str, sass: str) -> tuple[str, bool]:
    """Lines for one translation unit, and whether something is wrong with it."""
    said = warnings(log)
    lines = [f"\n{name}", *(f"  WARNING {line[:150]}" for line in said)]
    for function, (registers, spilled) in compiled(log).items():
        lines.append(f"  {function}: {registers} registers, {spilled} bytes spilled")
    lines.append(f"  {HEAD}")
    for function, depth, of in loops(sass):
        label = f"{' ' * depth}{function}"[:22]
        lines.append(
            f"  {label:22} {of.instructions:6} {of.products:5} {of.tensor:7.0f} {of.shared:7.0f}"
            f" {of.alu:6} {of.fma:6} {of.mufu:5} {of.waits:5} {of.spills:5}"
        )
    return "\n".join(lines), bool(said)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tune", action="store_true", help="also the forms that a search tries")
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(given)
    from pdmesh.kernels import cuda_build
    from pdmesh.tools.prebuild_kernels import texts

    nvcc = cuda_build.nvcc()
    nvdisasm = disassembler(nvcc) if nvcc else None
    if nvcc is None or nvdisasm is None:
        missing = "nvcc (set CUDA_HOME)" if nvcc is None else "nvdisasm (set NVDISASM)"
        print(f"sass_report: there is no {missing}", file=sys.stderr)
        return 2
    chosen = {name: text for name, text in texts(args.tune).items() if args.only in name}
    bad = []
    with ThreadPoolExecutor(args.jobs) as pool:
        work = {name: pool.submit(inspect, text, nvcc, nvdisasm) for name, text in chosen.items()}
        for name, done in work.items():
            try:
                lines, wrong = report(name, *done.result())
            except RuntimeError as error:
                lines, wrong = f"\n{name}\n  {error}", True
            print(lines, flush=True)
            bad += [name] * wrong
    print(f"\n{len(chosen)} kernels, {len(bad)} with something wrong {' '.join(bad)}".rstrip())
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
