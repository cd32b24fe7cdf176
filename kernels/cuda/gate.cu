// The gate for sm_90a and DeepSeek-V3's rule: 256 experts in 8 groups, of which 4, then 8 experts.
// Two launches instead of three, and logits that are summed up before they are written.
//
// gate_project: x [m, hidden] times w [256, hidden], both bfloat16, to logits [m, 256] float32. A
// cluster of eight takes 64 rows and 96 experts, each block an eighth of the hidden size, in the
// same pieces for any number of rows; parts are added in a fixed order by the block that has the
// rows, of which there are eight each. Warps 0-3 and 4-7 take 48 experts each, warp 8 loads.
//
// gate_choose: one cluster of eight blocks, a warp a row. Choices go to all eight; each notes them as
// a bit a row and expert, so the number of a choice within its expert is a count of bits.
//
// Compiled after common.cuh and `multiply`, a bfloat16 wgmma of 48 columns.

constexpr int PARTS = 8, ROWS = 64, EXPERTS = 256, BLOCK = 96, PANEL = 64;
constexpr int X_BYTES = ROWS * 128, W_BYTES = BLOCK * 128, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int STAGES = 11;
constexpr int PITCH = BLOCK + 8, OWN_ROWS = ROWS / PARTS;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + (2 * STAGES + 1) * 8 + 1024;
constexpr int THREADS = 288, TILES_OF_EXPERTS = (EXPERTS + BLOCK - 1) / BLOCK;
static_assert(SHARED_BYTES <= 227 * 1024, "what a multiprocessor has");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gate_project(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap w_map, float* __restrict__ logits, int m,
                 int hidden, int row_bytes) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t full = base + BARRIERS_AT, empty = full + STAGES * 8;
  const uint32_t summed = empty + STAGES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = cluster_rank();
  const int tile = blockIdx.x / PARTS, row0 = tile / TILES_OF_EXPERTS * ROWS;
  const int expert0 = tile % TILES_OF_EXPERTS * BLOCK;
  const int panels = (hidden + PANEL - 1) / PANEL;
  const int first = panels * part / PARTS, count = panels * (part + 1) / PARTS - first;

  let_next_begin();
  if (threadIdx.x == THREADS - 32) {
    prefetch(&w_map);
    prefetch(&x_map);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    barrier_init(summed, 1);
    barriers_ready();
    expect(summed, PARTS * OWN_ROWS * BLOCK * 4);
  }
  __syncthreads();

  if (warp == 8) {
    if (lane == 0) {
      const auto ask = [&](int i) {
        expect(full + i % STAGES * 8, row_bytes + W_BYTES);
        load(base + i % STAGES * STAGE_BYTES + X_BYTES, &w_map, (first + i) * PANEL, expert0,
             full + i % STAGES * 8);
      };
      const auto rows = [&](int i) {
        load(base + i % STAGES * STAGE_BYTES, &x_map, (first + i) * PANEL, row0,
             full + i % STAGES * 8);
      };
      const int ahead = min(count, STAGES);
      for (int i = 0; i < ahead; ++i) ask(i);
      wait_for_ahead();  // x is its output; the weight is not
      for (int i = 0; i < ahead; ++i) rows(i);
      for (int i = ahead; i < count; ++i) {
        wait(empty + i % STAGES * 8, (i / STAGES - 1) & 1);
        ask(i);
        rows(i);
      }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    return;
  }

  const int half = warp / 4;
  float sums[BLOCK / 4];
#pragma unroll
  for (int j = 0; j < BLOCK / 4; ++j) sums[j] = 0;
  for (int i = 0; i < count; ++i) {
    const int s = i % STAGES;
    wait(full + s * 8, i / STAGES & 1);
    const uint64_t a = descriptor(base + s * STAGE_BYTES);
    const uint64_t b = descriptor(base + s * STAGE_BYTES + X_BYTES + half * BLOCK / 2 * 128);
    pin(sums);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(sums, a + 2 * step, b + 2 * step, 1);
    wait_products();
    pin(sums);
    __syncwarp();
    if (lane == 0) arrive(empty + s * 8);
  }
  // All are through with what they loaded: the sums take its place.
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int to = warp % 4 * 2 + lower;  // eight rows, of the block of that number
    const int at = (part * OWN_ROWS + lane / 4) * PITCH + half * BLOCK / 2 + lane % 4 * 2;
    const uint32_t there = of_rank(base + at * 4, to), barrier = of_rank(summed, to);
#pragma unroll
    for (int j = 0; j < BLOCK / 16; ++j)
      push(there + j * 32, sums[4 * j + 2 * lower], sums[4 * j + 2 * lower + 1], barrier);
  }
  wait_cluster(summed, 0);
  const float* const shares = reinterpret_cast<const float*>(shared);
  for (int i = threadIdx.x; i < OWN_ROWS * BLOCK / 2; i += 256) {
    const int inside = i / (BLOCK / 2), c = i % (BLOCK / 2) * 2, row = row0 + part * OWN_ROWS + inside;
    float2 total = make_float2(0, 0);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float2 v =
          *reinterpret_cast<const float2*>(shares + (p * OWN_ROWS + inside) * PITCH + c);
      total.x += v.x, total.y += v.y;
    }
    if (row < m && expert0 + c < EXPERTS)
      *reinterpret_cast<float2*>(logits + static_cast<int64_t>(row) * EXPERTS + expert0 + c) = total;
  }
}

constexpr int MOST_ROWS = 1024, WORDS = MOST_ROWS / 32, TOP = 8, GROUPS = 8, TOP_GROUPS = 4;
constexpr int NONE = -2147483647 - 1;  // less than any key
constexpr int NOBODY = 0xFFFF, CHOOSERS = 1024, MASK_PITCH = WORDS + 1;
constexpr int MASKS_AT = MOST_ROWS * TOP * 2, TOTALS_AT = MASKS_AT + EXPERTS * MASK_PITCH * 4;
constexpr int TOLD_AT = TOTALS_AT + 8 * 4, CHOOSE_BYTES = TOLD_AT + 8 + 1024;
static_assert(TOLD_AT % 8 == 0, "a barrier");

// float32 to int32 in the same order, -0 equal to 0 and NaN largest; and back.
__device__ __forceinline__ int key_of(float value) {
  const int bits = __float_as_int(value + 0.0f);
  return value != value ? 0x7FFFFFFF : bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ __forceinline__ float value_of(int key) {
  return __int_as_float(key < 0 ? key ^ 0x7FFFFFFF : key);
}

__device__ __forceinline__ float score_of(float logit) { return 1.0f / (1.0f + expf(-logit)); }

// Of lists of (key, id) the one with the larger key, of equal ones with the lower id.
__device__ __forceinline__ unsigned first_of_all(int key, unsigned id, int& most) {
  most = __reduce_max_sync(~0u, key);
  return __reduce_min_sync(~0u, key == most ? id : 65535u);
}

// The i-th best expert to lane i < 8, of all 256, eight a lane.
__device__ __forceinline__ int choose_of_all(const int (&keys)[8], int lane) {
  int left[8], expert = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) left[i] = keys[i];
#pragma unroll 1
  for (int place = 0; place < TOP; ++place) {
    int top = left[0], number = 0, most;
#pragma unroll
    for (int i = 1; i < 8; ++i)
      if (left[i] > top) top = left[i], number = i;
    const int at = first_of_all(top, lane * 8 + number, most);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (at == lane * 8 + i) left[i] = NONE;
    if (lane == place) expert = at;
  }
  return expert;
}

// One row, of which a lane has the eight `logits` from lane * 8 on: lane i < 8 gets the i-th best
// expert and its weight.
__device__ __forceinline__ void choose(const float* row, const float (&logits)[8],
                                       const float (&bias)[8], float scale, int lane, int& expert,
                                       float& weight) {
  int keys[8], best = NONE, second = NONE;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    keys[i] = key_of(score_of(logits[i]) + bias[i]);
    second = max(second, min(best, keys[i]));
    best = max(best, keys[i]);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const int other = __shfl_xor_sync(~0u, best, mask);
    second = max(max(second, __shfl_xor_sync(~0u, second, mask)), min(best, other));
    best = max(best, other);
  }
  const int mine = key_of(value_of(best) + value_of(second)), group = lane / 4;
  int ahead = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int other = __shfl_sync(~0u, mine, g * 4);
    ahead += other > mine || (other == mine && g < group);
  }
  // A lane of a group that is out takes four of the eight of one that is in; then each orders four.
  const bool in = ahead < TOP_GROUPS;
  const unsigned groups = __reduce_or_sync(~0u, static_cast<unsigned>(group) << 3 * ahead);
  const int of = in ? lane : (groups >> 3 * (ahead - TOP_GROUPS) & 7) * 4 + lane % 4;
  int key[4];
  unsigned id[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int upper = __shfl_sync(~0u, keys[4 + i], of);
    key[i] = in ? keys[i] : upper;
    id[i] = of * 8 + (in ? i : 4 + i);
  }
#pragma unroll
  for (int end = 3; end > 0; --end)
#pragma unroll
    for (int i = 0; i < end; ++i) {
      const bool later = key[i + 1] > key[i];
      const int most = max(key[i], key[i + 1]), other = id[i];
      key[i + 1] = min(key[i], key[i + 1]), key[i] = most;
      id[i] = later ? id[i + 1] : id[i], id[i + 1] = later ? other : id[i + 1];
    }
  int most = NONE;
  expert = 0;
#pragma unroll
  for (int place = 0; place < TOP; ++place) {
    const unsigned at = first_of_all(key[0], id[0], most);
    if (id[0] == at) {
#pragma unroll
      for (int i = 0; i < 3; ++i) key[i] = key[i + 1], id[i] = id[i + 1];
      key[3] = NONE;
    }
    if (lane == place) expert = at;
  }
  // Infinitely bad ones are as good as those of a group that is out: then by number, of all.
  const int least = key_of(-INFINITY);
  if (most <= least) {
#pragma unroll
    for (int i = 0; i < 8; ++i) keys[i] = in ? keys[i] : least;
    expert = choose_of_all(keys, lane);
  }
  weight = lane < TOP ? score_of(row[expert]) : 0;
  float total = weight;
#pragma unroll
  for (int mask = 1; mask < TOP; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
  weight = weight / (total + 1e-20f) * scale;
}

extern "C" __global__ void __launch_bounds__(CHOOSERS, 1)
    gate_choose(const float* logits, const float* __restrict__ bias,
                const int* __restrict__ num_rows, float scale, int m, int* ids, float* weights,
                int* counts, int* offsets, int* places, int dependent) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  uint16_t* const chosen = reinterpret_cast<uint16_t*>(shared);  // [rows, 8], of all blocks
  unsigned* const masks = reinterpret_cast<unsigned*>(shared + MASKS_AT);
  int* const totals = reinterpret_cast<int*>(shared + TOTALS_AT);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
  const uint32_t told = base + TOLD_AT;
  constexpr int WARPS = CHOOSERS / 32;

  if (dependent) let_next_begin();
  float correction[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) correction[i] = bias[lane * 8 + i];
  for (int i = threadIdx.x; i < EXPERTS * MASK_PITCH; i += CHOOSERS) masks[i] = 0;
  if (threadIdx.x == 0) {
    barrier_init(told, 1);
    barriers_ready();
    expect(told, m * TOP * 2);
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();  // all have begun
  wait_for_ahead();
  const int used = num_rows ? min(*num_rows, m) : m;
#pragma unroll 1
  for (int row = rank * WARPS + warp; row < m; row += PARTS * WARPS) {
    const float* const of_row = logits + static_cast<int64_t>(row) * EXPERTS;
    const float4* const from = reinterpret_cast<const float4*>(of_row + lane * 8);
    const float4 low = from[0], high = from[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int expert;
    float weight;
    choose(of_row, values, correction, scale, lane, expert, weight);
    if (row >= used) expert = -1, weight = 0;
    if (lane < TOP) {
      ids[row * TOP + lane] = expert;
      weights[row * TOP + lane] = weight;
    }
    // To each block two of the eight, by four lanes.
    const uint32_t even = __shfl_sync(~0u, expert, lane % 4 * 2) & NOBODY;
    const uint32_t odd = __shfl_sync(~0u, expert, lane % 4 * 2 + 1) & NOBODY;
    push(of_rank(base + row * TOP * 2 + lane % 4 * 4, lane / 4), even | odd << 16,
         of_rank(told, lane / 4));
  }
  wait_cluster(told, 0);
  for (int i = threadIdx.x; i < m * TOP; i += CHOOSERS) {
    const int row = i / TOP, expert = chosen[i];
    if (expert != NOBODY) atomicOr(masks + expert * MASK_PITCH + row / 32, 1u << row % 32);
  }
  __syncthreads();
  for (int row = rank * WARPS + warp; row < m && lane < TOP; row += PARTS * WARPS) {
    const int expert = chosen[row * TOP + lane];
    int before = -1;
    if (expert != NOBODY) {
      const unsigned* const of = masks + expert * MASK_PITCH;
      before = __popc(of[row / 32] & ((1u << row % 32) - 1));
      for (int word = 0; word < row / 32; ++word) before += __popc(of[word]);
    }
    places[row * TOP + lane] = before;
  }
  if (rank == 0 && warp < EXPERTS / 32) {
    int count = 0;
    for (int word = 0; word * 32 < m; ++word) count += __popc(masks[threadIdx.x * MASK_PITCH + word]);
    int upto = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) totals[warp] = upto;
    meet<3>(EXPERTS);
    for (int w = 0; w < warp; ++w) upto += totals[w];
    counts[threadIdx.x] = count;
    offsets[threadIdx.x] = upto - count;
  }
}

namespace {

cudaLaunchConfig_t of_eight(int clusters, int threads, int shared_bytes, void* stream,
                            cudaLaunchAttribute* attributes, int dependent) {
  cudaLaunchConfig_t config =
      launch(dim3(clusters * PARTS), threads, shared_bytes, stream, attributes, dependent);
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = PARTS;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  if (!dependent) attributes[0] = attributes[1];
  config.numAttrs = dependent ? 2 : 1;
  return config;
}

}  // namespace

// 0, or a cudaError_t, or 10000 plus a CUresult. Choices are made if `ids` is given.
extern "C" int gate_launch(const void* x, int64_t x_row, const void* w, const float* bias,
                           const int* num_rows, float scale, int m, int hidden, float* logits,
                           int* ids, float* weights, int* counts, int* offsets, int* places,
                           int dependent, void* stream) {
  static bool prepared[64];
  int device = 0;
  cudaError_t failed = cudaGetDevice(&device);
  if (failed == cudaSuccess && !prepared[device % 64]) {
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    failed = cudaFuncSetAttribute(reinterpret_cast<const void*>(gate_project), most, SHARED_BYTES);
    if (failed == cudaSuccess)
      failed = cudaFuncSetAttribute(reinterpret_cast<const void*>(gate_choose), most, CHOOSE_BYTES);
    prepared[device % 64] = failed == cudaSuccess;
  }
  if (failed != cudaSuccess) return failed;
  if (encoder() == nullptr) return cudaErrorSymbolNotFound;
  const int rows = m >= ROWS ? ROWS : (m + 7) / 8 * 8;
  CUtensorMap x_map, w_map;
  CUresult bad = describe_rows(&x_map, x, hidden, m, x_row, rows);
  if (!bad) bad = describe_rows(&w_map, w, hidden, EXPERTS, hidden, BLOCK);
  if (bad) return 10000 + bad;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = of_eight((m + ROWS - 1) / ROWS * TILES_OF_EXPERTS, THREADS,
                                       SHARED_BYTES, stream, attributes, dependent);
  failed = cudaLaunchKernelEx(&config, gate_project, x_map, w_map, logits, m, hidden, rows * 128);
  if (failed != cudaSuccess || ids == nullptr) return failed;
  config = of_eight(1, CHOOSERS, CHOOSE_BYTES, stream, attributes, 1);
  return cudaLaunchKernelEx(&config, gate_choose, static_cast<const float*>(logits), bias,
                            num_rows, scale, m, ids, weights, counts, offsets, places, dependent);
}
