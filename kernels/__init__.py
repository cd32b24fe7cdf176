import os

from pdmesh.kernels.reproducible import ask_for_strict_mode

ask_for_strict_mode(os.environ)
