// The per-head products of absorbed attention for sm_90a, DeepSeek-V3's sizes, FP8 weights with a
// scale a 128 x 128. ABSORB 1: [rows, 128] x [512, 128] to a query [rows, 512 + 64 rotated];
// ABSORB 0: [rows, 512] x [128, 512] to a head's 128 values, quantised with one scale a row.
//
// A thread block keeps one head's weight in shared memory as bfloat16, which holds e4m3 exactly, so
// that device memory is read once and in FP8, and streams tiles of 64 rows past it. Scales of
// weights multiply float32 sums. Warps 0-3 and 4-7 take turns at tiles; warp 8 loads them.
//
// Compiled with ABSORB defined, after common.cuh and `multiply`: wgmma of 64 columns if ABSORB, else of 128.

constexpr int K = ABSORB ? 128 : 512, N = ABSORB ? 512 : 128;
constexpr int ROTATED = 64, ROWS = 64, PANEL = 64;  // columns of bfloat16 in 128 swizzled bytes
constexpr int PANEL_BYTES = ROWS * 128;
constexpr int SLOT_PANELS = ABSORB ? 2 : 1;
constexpr int SLOT_BYTES = SLOT_PANELS * PANEL_BYTES;
constexpr int SLOTS = ABSORB ? 4 : 9;
constexpr int TILE_SLOTS = K / PANEL / SLOT_PANELS;
constexpr int WEIGHT_BYTES = N * K * 2;
constexpr int OUT_PITCH = ABSORB ? 128 : 144;
constexpr int OUT_BYTES = ABSORB ? 2 * PANEL_BYTES : ROWS * OUT_PITCH;  // of each half
constexpr int RING_AT = WEIGHT_BYTES, OUT_AT = RING_AT + SLOTS * SLOT_BYTES;
constexpr int BARRIERS_AT = OUT_AT + 2 * OUT_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * SLOTS * 8 + 1024;
constexpr int THREADS = 288;
static_assert(SHARED_BYTES <= 227 * 1024, "what a multiprocessor has");

__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, int column, int head,
                                     int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(row),
      "r"(barrier) : "memory");
}

__device__ __forceinline__ void store(const CUtensorMap* map, int column, int head, int row,
                                      uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(map), "r"(column), "r"(head), "r"(row), "r"(from)
      : "memory");
}

__device__ __forceinline__ void half_sync(int half) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
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

// One head's weight [N, K] to swizzled panels of 64 columns.
__device__ __forceinline__ void keep_weight(const uint8_t* weight, uint8_t* shared) {
  constexpr int CHUNKS = K / 16, TURNS = N * CHUNKS / 256;
#pragma unroll 1
  for (int begin = 0; begin < TURNS; begin += 8) {
    uint4 loaded[8];
#pragma unroll
    for (int turn = 0; turn < 8; ++turn)
      loaded[turn] = __ldg(reinterpret_cast<const uint4*>(weight) + (begin + turn) * 256 +
                           threadIdx.x);
#pragma unroll
    for (int turn = 0; turn < 8; ++turn) {
      const int index = (begin + turn) * 256 + threadIdx.x;
      const int n = index / CHUNKS, column = index % CHUNKS * 16;
      uint8_t* const row = shared + column / PANEL * N * 128 + n * 128;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(&loaded[turn]);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint4 wide;
        wide.x = widened(words[2 * part] & 0xFFFF);
        wide.y = widened(words[2 * part] >> 16);
        wide.z = widened(words[2 * part + 1] & 0xFFFF);
        wide.w = widened(words[2 * part + 1] >> 16);
        const int chunk = (column % PANEL / 8 + part) ^ (n & 7);
        *reinterpret_cast<uint4*>(row + chunk * 16) = wide;
      }
    }
  }
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync 3, 256;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    absorbed(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap out_map,
             const uint8_t* __restrict__ weights, const float* __restrict__ weight_scales,
             const __nv_bfloat16* __restrict__ rotated, int64_t rotated_row, int64_t rotated_head,
             uint8_t* out, float* out_scales, int64_t scale_step, float scale, int m, int heads) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t full = base + BARRIERS_AT, empty = full + SLOTS * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x, tiles = (m + ROWS - 1) / ROWS;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + s * 8) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(empty + s * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == 8) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (lane == 0) {
      int turn = 0;
      for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        for (int part = 0; part < TILE_SLOTS; ++part, ++turn) {
          const int s = turn % SLOTS;
          if (turn >= SLOTS) wait(empty + s * 8, (turn / SLOTS - 1) & 1);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + s * 8),
                       "r"(SLOT_BYTES) : "memory");
#pragma unroll
          for (int p = 0; p < SLOT_PANELS; ++p)
            load(base + RING_AT + s * SLOT_BYTES + p * PANEL_BYTES, &x_map,
                 (part * SLOT_PANELS + p) * PANEL, head, tile * ROWS, full + s * 8);
        }
      }
    }
    return;
  }

  keep_weight(weights + static_cast<int64_t>(head) * N * K, shared);
  float factors[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) factors[i] = weight_scales[head * 4 + i] * scale;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int half = warp / 4, row = warp % 4 * 16 + lane / 4, thread = threadIdx.x % 128;
  uint8_t* const mine = shared + OUT_AT + half * OUT_BYTES;
  const auto release = [&](int s) {
    __syncwarp();
    if (lane == 0)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + s * 8) : "memory");
  };
  [[maybe_unused]] int stored = 0;
  int number = half;
  for (int tile = blockIdx.y + half * gridDim.y; tile < tiles; tile += 2 * gridDim.y, number += 2) {
#if ABSORB
    const int s = number % SLOTS;
    const int source = tile * ROWS + thread / 2;
    uint4 turned[4] = {};
    if (source < m) {
      const __nv_bfloat16* from = rotated + source * rotated_row + head * rotated_head;
      for (int i = 0; i < 4; ++i)
        turned[i] = *reinterpret_cast<const uint4*>(from + thread % 2 * 32 + i * 8);
    }
    wait(full + s * 8, number / SLOTS & 1);
    const uint64_t a = descriptor(base + RING_AT + s * SLOT_BYTES);
    for (int part = 0; part < N / PANEL + 1; ++part) {
      uint8_t* const to = mine + stored++ % 2 * PANEL_BYTES;
      float product[32];
      if (part < N / PANEL) {
        const uint64_t b = descriptor(base + part * PANEL_BYTES);
        pin(product);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 8; ++step)
          multiply(product, a + (step / 4 * PANEL_BYTES >> 4) + step % 4 * 2,
                   b + (step / 4 * N * 128 >> 4) + step % 4 * 2, step > 0);
        wait_products();
        pin(product);
        if (part == N / PANEL - 1) release(s);
      }
      // What was stored from this half of the buffer two turns ago has been read.
      if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      half_sync(half);
      if (part < N / PANEL) {
        const float first = part < 2 ? factors[0] : factors[1];
        const float last = part < 6 ? factors[2] : factors[3];
        const float by = part < 4 ? first : last;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint8_t* const at = to + row * 128 + ((j ^ (row & 7)) * 16) + lane % 4 * 4;
          *reinterpret_cast<uint32_t*>(at) = packed(product[4 * j] * by, product[4 * j + 1] * by);
          *reinterpret_cast<uint32_t*>(at + 8 * 128) =
              packed(product[4 * j + 2] * by, product[4 * j + 3] * by);
        }
      } else {
        for (int i = 0; i < 4; ++i) {
          uint32_t* const words = reinterpret_cast<uint32_t*>(&turned[i]);
          for (int e = 0; e < 4; ++e) {
            const float2 two = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&words[e]));
            words[e] = packed(two.x * scale, two.y * scale);
          }
          const int r = thread / 2, chunk = (thread % 2 * 4 + i) ^ (r & 7);
          *reinterpret_cast<uint4*>(to + r * 128 + chunk * 16) = turned[i];
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      half_sync(half);
      if (thread == 0) store(&out_map, part * PANEL, head, tile * ROWS, address(to));
    }
#else
    float sums[64], product[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[j] = 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      pin(product);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int turn = number * TILE_SLOTS + block * 2 + p, s = turn % SLOTS;
        wait(full + s * 8, turn / SLOTS & 1);
        const uint64_t a = descriptor(base + RING_AT + s * SLOT_BYTES);
        const uint64_t b = descriptor(base + (block * 2 + p) * N * 128);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 4; ++step)
          multiply(product, a + step * 2, b + step * 2, p + step > 0);
      }
      wait_products();
      pin(product);
      for (int p = 0; p < 2; ++p) release((number * TILE_SLOTS + block * 2 + p) % SLOTS);
#pragma unroll
      for (int j = 0; j < 64; ++j) sums[j] += product[j] * factors[block];
    }
    float largest[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 64; ++j)
      largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(sums[j]));
    float inverse[2];
    half_sync(half);  // the buffer's last tile has been copied out
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
      const float by = fmaxf(largest[i], 1e-10f) / 448.0f;
      inverse[i] = 1.0f / by;
      const int r = tile * ROWS + row + 8 * i;
      if (lane % 4 == 0 && r < m) out_scales[head * scale_step + r] = by;
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int i = j % 2;
      const float2 two = make_float2(sums[2 * j] * inverse[i], sums[2 * j + 1] * inverse[i]);
      *reinterpret_cast<uint16_t*>(mine + (row + 8 * i) * OUT_PITCH + j / 2 * 8 + lane % 4 * 2) =
          __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    }
    half_sync(half);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i * 16 + thread / 8, c = thread % 8 * 16;
      if (tile * ROWS + r < m)
        *reinterpret_cast<uint4*>(out + (static_cast<int64_t>(tile * ROWS + r) * heads + head) * N +
                                  c) = *reinterpret_cast<const uint4*>(mine + r * OUT_PITCH + c);
    }
#endif
  }
  if (ABSORB && thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

namespace {

// [m, heads, width] bfloat16 with strides in values; boxes of 64 rows of one head, 64 values each.
CUresult describe(CUtensorMap* map, const void* data, int width, int heads, int m, int64_t head,
                  int64_t row) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head * 2),
                                 static_cast<cuuint64_t>(row * 2)};
  const cuuint32_t box[3] = {PANEL, 1, ROWS}, ones[3] = {1, 1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes,
                   strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

// 0, or a cudaError_t, or 10000 plus a CUresult. Strides are in values. `shares`: thread blocks of
// one head.
extern "C" int absorbed_launch(const void* x, int64_t x_row, int64_t x_head, const void* weights,
                               const float* weight_scales, const void* rotated,
                               int64_t rotated_row, int64_t rotated_head, void* out,
                               float* out_scales, int64_t scale_step, float scale, int m, int heads,
                               int shares, int dependent, void* stream) {
  const cudaError_t failed = prepare(reinterpret_cast<const void*>(absorbed), SHARED_BYTES);
  if (failed != cudaSuccess) return failed;
  CUtensorMap x_map, out_map;
  CUresult bad = describe(&x_map, x, K, heads, m, x_head, x_row);
  const int width = N + ROTATED;
  if (!bad && ABSORB) bad = describe(&out_map, out, width, heads, m, width, width * heads);
  if (!ABSORB) out_map = x_map;
  if (bad) return 10000 + bad;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(heads, shares);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = SHARED_BYTES;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, absorbed, x_map, out_map,
                            static_cast<const uint8_t*>(weights), weight_scales,
                            static_cast<const __nv_bfloat16*>(rotated), rotated_row, rotated_head,
                            static_cast<uint8_t*>(out), out_scales, scale_step, scale, m, heads);
}
