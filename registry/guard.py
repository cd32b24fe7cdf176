"""Ties a process's life to its parent's, also when the parent is killed with SIGKILL (Linux).

As a program, ``guard.py PARENT_PID -- COMMAND...``: asks the kernel for SIGKILL at the parent's
death, then becomes the command. It imports the standard library alone, so it starts at once and
needs no import path. The kernel counts the *thread* that started the child as the parent
(prctl(2), PR_SET_PDEATHSIG): start children from a thread that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends; at once if it has ended already.

    Elsewhere than on Linux it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def guarded(command: list[str]) -> list[str]:
    """``command`` as a command line that dies with the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), "--", *command]


def main(argv: list[str]) -> None:
    """Becomes the command in ``argv[2:]``."""
    if len(argv) < 3 or argv[1] != "--" or not argv[0].isdigit():
        sys.exit("usage: guard.py PARENT_PID -- COMMAND...")
    die_with_parent(int(argv[0]))
    try:
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        sys.exit(f"cannot start {argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
