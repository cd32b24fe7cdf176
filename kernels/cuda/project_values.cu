// What heads saw to their values, quantised for the output projection, for sm_90a and
// DeepSeek-V3's sizes: [rows, 512] x [128, 512] a head, FP8 weights with a scale a 128 x 128.
//
// A thread block keeps one head's weight in shared memory as bfloat16, which holds e4m3 exactly, so
// that device memory is read once and in FP8, and streams tiles of 64 rows past it. Scales of
// weights multiply float32 sums. Warps 0-3 and 4-7 take turns at tiles; warp 8 loads the weight,
// and then them, through one ring.
//
// Compiled after common.cuh and `multiply`, a bfloat16 wgmma of 128 columns.

constexpr int K = 512, N = 128, ROWS = 64;
constexpr int PANEL = 64;  // columns of bfloat16 in 128 swizzled bytes
constexpr int PANEL_BYTES = ROWS * 128;
constexpr int SLOTS = 9, TILE_SLOTS = K / PANEL;
constexpr int AHEAD = N * K / PANEL_BYTES;  // turns of the ring that bring the weight
constexpr int OUT_PITCH = 144;  // so that eight rows lie in different banks
constexpr int OUT_BYTES = ROWS * OUT_PITCH;
constexpr int RING_AT = N * K * 2, OUT_AT = RING_AT + SLOTS * PANEL_BYTES;
constexpr int BARRIERS_AT = OUT_AT + 2 * OUT_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * SLOTS * 8 + 1024;
constexpr int THREADS = 288;
static_assert(SHARED_BYTES <= 227 * 1024, "what a multiprocessor has");
static_assert(AHEAD < SLOTS, "the weight passes the ring once");

// One head's weight [N, K] to swizzled panels of 64 columns, from the ring's first turns, which the
// warpgroups take by turns.
template <typename Release>
__device__ __forceinline__ void keep_arrived(uint8_t* shared, uint32_t full, int half,
                                             const Release& release) {
  constexpr int CHUNKS = K / 16, TURNS = PANEL_BYTES / 16 / 128;
  for (int s = half; s < AHEAD; s += 2) {
    wait(full + s * 8, 0);
    const uint4* const narrow =
        reinterpret_cast<const uint4*>(shared + RING_AT + s * PANEL_BYTES) + threadIdx.x % 128;
    uint4 loaded[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) loaded[turn] = narrow[turn * 128];
    release(s);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int index = (s * TURNS + turn) * 128 + threadIdx.x % 128;
      const int column = index % CHUNKS * 16;
      keep_widened(loaded[turn], shared, N, index / CHUNKS, column, column / 64 % 2);
    }
  }
  proxy_fence();
  meet<3>(256);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    project_values(const __grid_constant__ CUtensorMap x_map, const uint8_t* __restrict__ weights,
                   const float* __restrict__ weight_scales, uint8_t* out, float* out_scales,
                   int64_t scale_step, int m, int heads) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t full = base + BARRIERS_AT, empty = full + SLOTS * 8;
  const int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int head = blockIdx.x, tiles = (m + ROWS - 1) / ROWS;

  let_next_begin();
  if (warp == 8 && elected()) {
    prefetch(&x_map);
    for (int s = 0; s < SLOTS; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4);
    }
    barriers_ready();
  }
  __syncthreads();

  const uint8_t* const weight = weights + static_cast<int64_t>(head) * N * K;
  if (warp == 8) {
    if (elected()) {
      for (int s = 0; s < AHEAD; ++s) {
        expect(full + s * 8, PANEL_BYTES);
        load_bytes(base + RING_AT + s * PANEL_BYTES, weight + s * PANEL_BYTES, PANEL_BYTES,
                   full + s * 8);
      }
      wait_for_ahead();
      uint32_t s = AHEAD % SLOTS, passed = 1;  // a slot is free at first
      for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        for (int part = 0; part < TILE_SLOTS; ++part) {
          wait(empty + s * 8, passed);
          expect(full + s * 8, PANEL_BYTES);
          load_head(base + RING_AT + s * PANEL_BYTES, &x_map, part * PANEL, head, tile * ROWS,
                    full + s * 8);
          if (++s == SLOTS) s = 0, passed ^= 1;
        }
      }
    }
    return;
  }

  const int half = warp / 4, row = warp % 4 * 16 + lane / 4, thread = threadIdx.x % 128;
  uint8_t* const mine = shared + OUT_AT + half * OUT_BYTES;
  const auto release = [&](int s) {
    __syncwarp();
    if (lane == 0) arrive(empty + s * 8);
  };
  keep_arrived(shared, full, half, release);
  float factors[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) factors[i] = weight_scales[head * 4 + i] * 1.0f;
  wait_for_ahead();
  int number = half;
  for (int tile = blockIdx.y + half * gridDim.y; tile < tiles; tile += 2 * gridDim.y, number += 2) {
    const uint32_t begin = AHEAD + number * TILE_SLOTS;
    uint32_t s = begin % SLOTS, passed = begin / SLOTS & 1;
    float sums[64], product[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[j] = 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      uint32_t taken[2];
      pin(product);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        // The panel before this one may be the other warpgroup's, and not even have arrived.
        wait(empty + s * 8, passed ^ 1);
        wait(full + s * 8, passed);
        const uint64_t a = descriptor(base + RING_AT + s * PANEL_BYTES);
        const uint64_t b = descriptor(base + (block * 2 + p) * N * 128);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          multiply(product, a + step * 2, b + step * 2, p + step > 0);
        taken[p] = s;
        if (++s == SLOTS) s = 0, passed ^= 1;
      }
      wait_products();
      pin(product);
      for (int p = 0; p < 2; ++p) release(taken[p]);
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
  }
}

// 0, or a cudaError_t, or 10000 plus a CUresult. Strides are in values. `shares`: thread blocks of
// one head.
extern "C" int project_values_launch(const void* x, int64_t x_row, int64_t x_head,
                                     const void* weights, const float* weight_scales, void* out,
                                     float* out_scales, int64_t scale_step, int m, int heads,
                                     int shares, int dependent, void* stream) {
  const cudaError_t failed = prepare(reinterpret_cast<const void*>(project_values), SHARED_BYTES);
  if (failed != cudaSuccess) return failed;
  CUtensorMap x_map;
  if (const CUresult bad = describe_heads(&x_map, x, K, heads, m, x_head, x_row))
    return 10000 + bad;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config =
      launch(dim3(heads, shares), THREADS, SHARED_BYTES, stream, &attribute, dependent);
  return cudaLaunchKernelEx(&config, project_values, x_map, static_cast<const uint8_t*>(weights),
                            weight_scales, static_cast<uint8_t*>(out), out_scales, scale_step, m,
                            heads);
}
