"""One thread of arithmetic in the test process: the processes of a mesh have the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
