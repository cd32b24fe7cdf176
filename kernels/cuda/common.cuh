// Parts that the kernels of this folder share, after device.cuh: numbers, tensor maps, launches.

// A K-major tile of 128-byte rows, 128-byte swizzle, 1024 bytes between groups of eight rows.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ uint32_t packed(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t widened(uint16_t two) {
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&wide));
  return packed(values.x, values.y);
}

// Sixteen e4m3 values of row n from a column on, to swizzled panels of 64 columns of bfloat16, each
// of so many rows. Eight threads that have a row's 128 columns store to all banks at once if those
// of the second panel begin with their second half.
__device__ __forceinline__ void keep_widened(const uint4& narrow, uint8_t* panels, int rows, int n,
                                             int column, bool second_half_first = false) {
  uint8_t* const row = panels + column / 64 * rows * 128 + n * 128;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&narrow);
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const uint32_t low = second_half_first ? words[2 - 2 * turn] : words[2 * turn];
    const uint32_t high = second_half_first ? words[3 - 2 * turn] : words[2 * turn + 1];
    uint4 wide;
    wide.x = widened(low & 0xFFFF);
    wide.y = widened(low >> 16);
    wide.z = widened(high & 0xFFFF);
    wide.w = widened(high >> 16);
    const int chunk = (column % 64 / 8 + (turn ^ second_half_first)) ^ (n & 7);
    *reinterpret_cast<uint4*>(row + chunk * 16) = wide;
  }
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

// [m, heads, width] bfloat16 with strides in values; boxes of 64 rows of one head, 64 values each.
[[maybe_unused]] CUresult describe_heads(CUtensorMap* map, const void* data, int width, int heads, int m, int64_t head,
                  int64_t row) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head * 2),
                                 static_cast<cuuint64_t>(row * 2)};
  const cuuint32_t box[3] = {64, 1, 64}, ones[3] = {1, 1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes,
                   strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Once a device: allows the kernel so much shared memory.
[[maybe_unused]] cudaError_t prepare(const void* kernel, int shared_bytes) {
  static bool prepared[64];
  int device = 0;
  cudaError_t failed = cudaGetDevice(&device);
  if (failed == cudaSuccess && !prepared[device % 64])
    failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (failed == cudaSuccess) prepared[device % 64] = true;
  return failed != cudaSuccess || encoder() != nullptr ? failed : cudaErrorSymbolNotFound;
}

[[maybe_unused]] cudaLaunchConfig_t launch(dim3 grid, int threads, int shared_bytes, void* stream,
                                           cudaLaunchAttribute* attribute, int dependent) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute->val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = dependent ? 1 : 0;
  return config;
}

}  // namespace
