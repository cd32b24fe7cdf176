"""CUDA C++ sources, compiled when first used; `kernels.cuda_gemm` builds and calls them."""
