"""Work of ranks for ``test_bench_rank_processes.py``: processes import it by name."""

import time

FOR_EVER = 3600


def doubles(rank, number, out):
    out.send((rank, 2 * number))


def second_fails(rank, number, out):
    if rank == 1:
        raise SystemExit(number)
    time.sleep(FOR_EVER)  # it waits for the other
