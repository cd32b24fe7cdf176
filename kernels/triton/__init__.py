"""Kernels in Triton, one operation a file; nothing outside of `pdmesh.kernels` imports them.

On a machine without a CUDA device they run in Triton's interpreter: TRITON_INTERPRET=1 must be set
before triton is imported.
"""
