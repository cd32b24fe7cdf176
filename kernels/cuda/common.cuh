// Parts that the kernels of this folder share: barriers, wgmma's descriptors, tensor maps.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// A K-major tile of 128-byte rows, 128-byte swizzle, 1024 bytes between groups of eight rows.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) asm volatile("" : "+f"(values[j])::"memory");
}

__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                            const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
  static Encode found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<Encode>(symbol);
  }();
  return found;
}

// Once a device: allows the kernel so much shared memory.
cudaError_t prepare(const void* kernel, int shared_bytes) {
  static bool prepared[64];
  int device = 0;
  cudaError_t failed = cudaGetDevice(&device);
  if (failed == cudaSuccess && !prepared[device % 64])
    failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (failed == cudaSuccess) prepared[device % 64] = true;
  return failed != cudaSuccess || encoder() != nullptr ? failed : cudaErrorSymbolNotFound;
}

}  // namespace
