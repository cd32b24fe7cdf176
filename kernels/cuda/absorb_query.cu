// The query of absorbed attention for sm_90a and DeepSeek-V3's sizes: [rows, 128] x [512, 128] a
// head, with 64 rotated values behind: [rows, heads, 576]. FP8 weights with a scale a 128 x 128.
//
// Most of what moves is the result, so it has to begin to move early: a thread block holds up to
// four tiles of 64 rows, and widens its head's weight to bfloat16, which holds e4m3 exactly, 64
// outputs at a time, while the results of the 64 before are on their way. Warps 0-3 and 4-7 share
// the products; warp 8 loads the rows.
//
// Compiled after common.cuh and `multiply`, a bfloat16 wgmma of 64 columns.

constexpr int K = 128, N = 512, ROTATED = 64, ROWS = 64, WIDTH = N + ROTATED;
constexpr int PANEL_BYTES = 64 * 128;  // 64 rows of 64 bfloat16
constexpr int TILE_BYTES = 2 * PANEL_BYTES, TILES = 4;
constexpr int CHUNK = 64, CHUNKS = N / CHUNK, CHUNK_BYTES = 2 * PANEL_BYTES;
constexpr int BUFFERS = 4;  // of each half, a result of 64 x 64 each
constexpr int WEIGHT_AT = TILES * TILE_BYTES, OUT_AT = WEIGHT_AT + 2 * CHUNK_BYTES;
constexpr int BARRIERS_AT = OUT_AT + 2 * BUFFERS * PANEL_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * TILES * 8 + 1024;
constexpr int THREADS = 288;
static_assert(SHARED_BYTES <= 227 * 1024, "what a multiprocessor has");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    absorb_query(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap out_map, const uint8_t* __restrict__ weights,
                 const float* __restrict__ weight_scales,
                 const __nv_bfloat16* __restrict__ rotated, int64_t rotated_row,
                 int64_t rotated_head, float scale, int m, int next_may_begin) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t full = base + BARRIERS_AT, empty = full + TILES * 8;
  const int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int head = blockIdx.x, every = (m + ROWS - 1) / ROWS;
  const int tiles = (every - static_cast<int>(blockIdx.y) + gridDim.y - 1) / gridDim.y;
  const int first = CHUNKS * blockIdx.z / gridDim.z, last = CHUNKS * (blockIdx.z + 1) / gridDim.z;
  const auto row_of = [&](int i) { return (blockIdx.y + i * gridDim.y) * ROWS; };

  const uint8_t* const mine_of_weights = weights + static_cast<int64_t>(head) * N * K;
  // Only where it was asked for: FlashMLA's decode is launched as a dependent of whatever stands
  // before it and does not wait, so it would read queries that are not written yet.
  if (next_may_begin) let_next_begin();
  if (warp == 8 && elected()) {
    prefetch(&x_map);
    prefetch(&out_map);
    for (int s = 0; s < TILES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp == 8) {
    if (elected()) {
      wait_for_ahead();
      for (int i = 0; i < tiles; ++i) {
        const int s = i % TILES;
        if (i >= TILES) wait(empty + s * 8, (i / TILES - 1) & 1);
        expect(full + s * 8, TILE_BYTES);
        for (int p = 0; p < 2; ++p)
          load_head(base + s * TILE_BYTES + p * PANEL_BYTES, &x_map, p * 64, head, row_of(i),
                    full + s * 8);
      }
    }
    return;
  }

  const uint4* const weight = reinterpret_cast<const uint4*>(mine_of_weights) + threadIdx.x;
  constexpr int TURNS = CHUNK * K / 16 / 256;
  uint4 narrow[TURNS];
  // `shared` is here for the order of registers, which was measured with it.
  const auto fetch = [&shared, &narrow, &weight](int chunk) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      narrow[turn] = __ldg(weight + chunk * (CHUNK * K / 16) + turn * 256);
  };
  fetch(first);
  const int half = warp / 4, row = warp % 4 * 16 + lane / 4, thread = threadIdx.x % 128;
  uint8_t* const mine = shared + OUT_AT + half * BUFFERS * PANEL_BYTES;
  int stored = 0;
  // A buffer whose last result has been read by the copy engine.
  const auto buffer = [&]() {
    if (thread == 0) wait_stores_read<BUFFERS - 1>();
    half_sync(half);
    return mine + stored++ % BUFFERS * PANEL_BYTES;
  };
  const auto send = [&](const uint8_t* from, int column, int i) {
    proxy_fence();
    half_sync(half);
    if (thread == 0) store_head(&out_map, column, head, row_of(i), address(from));
  };
  wait_for_ahead();
  for (int begin = 0; begin < tiles; begin += TILES) {
    const int count = min(TILES, tiles - begin);
    const int r = thread / 2, column = thread % 2 * 32;
    uint4 turned[TILES / 2][4] = {};
#pragma unroll
    for (int turn = 0; turn < TILES / 2; ++turn) {
      const int i = 2 * turn + half, source = row_of(begin + i) + r;
      if (first > 0 || i >= count || source >= m) continue;
      const uint4* const from = reinterpret_cast<const uint4*>(
          rotated + source * rotated_row + head * rotated_head + column);
#pragma unroll
      for (int part = 0; part < 4; ++part) turned[turn][part] = from[part];
    }
    const auto send_turned = [&]() {
#pragma unroll
      for (int turn = 0; turn < TILES / 2; ++turn) {
        const int i = 2 * turn + half;
        if (i >= count) break;
        uint8_t* const to = buffer();
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          uint4 values = turned[turn][part];
          uint32_t* const words = reinterpret_cast<uint32_t*>(&values);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 two = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&words[e]));
            words[e] = packed(two.x * scale, two.y * scale);
          }
          *reinterpret_cast<uint4*>(to + r * 128 + ((column / 8 + part) ^ (r & 7)) * 16) = values;
        }
        send(to, N, begin + i);
      }
    };
    if (first == 0) send_turned();
    for (int chunk = first; chunk < last; ++chunk) {
      // Who reads this part's memory last has passed the barrier of the chunk before.
      uint8_t* const panels = shared + WEIGHT_AT + chunk % 2 * CHUNK_BYTES;
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int index = turn * 256 + threadIdx.x;
        const int column = index % (K / 16) * 16;
        keep_widened(narrow[turn], panels, CHUNK, index / (K / 16), column);
      }
      proxy_fence();
      meet<3>(256);
      fetch(chunk + 1 < last ? chunk + 1 : first);
      const float by = weight_scales[head * (N / 128) + chunk / 2] * scale;
      const uint64_t b = descriptor(address(panels));
      for (int i = 0; i < count; ++i) {
        if ((chunk * count + i) % 2 != half) continue;
        const int s = (begin + i) % TILES;
        wait(full + s * 8, (begin + i) / TILES & 1);
        const uint64_t a = descriptor(base + s * TILE_BYTES);
        float product[32];
        pin(product);
        products_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step)
          multiply(product, a + (step / 4 * PANEL_BYTES >> 4) + step % 4 * 2,
                   b + (step / 4 * PANEL_BYTES >> 4) + step % 4 * 2, step > 0);
        wait_products();
        pin(product);
        uint8_t* const to = buffer();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint8_t* const at = to + row * 128 + ((j ^ (row & 7)) * 16) + lane % 4 * 4;
          *reinterpret_cast<uint32_t*>(at) = packed(product[4 * j] * by, product[4 * j + 1] * by);
          *reinterpret_cast<uint32_t*>(at + 8 * 128) =
              packed(product[4 * j + 2] * by, product[4 * j + 3] * by);
        }
        send(to, chunk * CHUNK, begin + i);
      }
    }
    __syncwarp();
    if (lane < count)
      arrive(empty + (begin + lane) % TILES * 8);
    // The next rows' first part of the weight may take the memory of these rows' last one.
    if (begin + TILES < tiles) meet<3>(256);
  }
  // Written, not only read: nothing else makes them wait who begin when this kernel has ended.
  if (thread == 0) wait_stores();
}

// 0, or a cudaError_t, or 10000 plus a CUresult. Strides are in values. Thread blocks of one head:
// `shares` of its rows times `parts` of its outputs. It begins as a dependent of the kernel ahead.
extern "C" int absorb_query_launch(const void* x, int64_t x_row, int64_t x_head,
                                   const void* weights, const float* weight_scales,
                                   const void* rotated, int64_t rotated_row, int64_t rotated_head,
                                   void* out, float scale, int m, int heads, int shares, int parts,
                                   int next_may_begin, void* stream) {
  const cudaError_t failed = prepare(reinterpret_cast<const void*>(absorb_query), SHARED_BYTES);
  if (failed != cudaSuccess) return failed;
  CUtensorMap x_map, out_map;
  CUresult bad = describe_heads(&x_map, x, K, heads, m, x_head, x_row);
  if (!bad) bad = describe_heads(&out_map, out, WIDTH, heads, m, WIDTH, WIDTH * heads);
  if (bad) return 10000 + bad;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config =
      launch(dim3(heads, shares, parts), THREADS, SHARED_BYTES, stream, &attribute, 1);
  return cudaLaunchKernelEx(&config, absorb_query, x_map, out_map,
                            static_cast<const uint8_t*>(weights), weight_scales,
                            static_cast<const __nv_bfloat16*>(rotated), rotated_row, rotated_head,
                            scale, m, next_may_begin);
}
