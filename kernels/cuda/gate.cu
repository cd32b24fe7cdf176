// The gate for sm_90a and DeepSeek-V3's rule: 256 experts in 8 groups, of which 4, then 8 experts.
// Two launches: logits that are summed up before they are written; then choice, counts and places.
//
// gate_project: x [m, hidden] times w [256, hidden], both bfloat16, to logits [m, 256] float32. A
// cluster of PARTS thread blocks takes 64 experts and up to 64 rows, each a part of the hidden
// size, in the same pieces for any number of rows; a row's parts are copied to the thread block that
// adds them up, in a fixed order. Experts are the 64 rows of a product, so that few rows of x make
// it short. Weights of 1,024 columns have room at once: nearly all of a part of DeepSeek-V3's hidden
// size is asked for before the kernel ahead has ended, and only rows come after.
//
// A thread block: warps 0-3 and 4-7 multiply and take turns at the steps; warp 8 brings weights,
// warp 9 rows.
//
// gate_choose: one cluster of up to BLOCKS thread blocks, a warp a row, rows in order. Choices are a bit
// a row and expert; the thread blocks copy how many they have of each expert to each other, a byte
// an expert, and a choice's place is what those before have and the bits of the rows before.
//
// Compiled with PARTS and BLOCKS defined, after gate_device.cuh, common.cuh and `multiply` of
// 8, 16, 32 and 64 columns, bfloat16.

constexpr int EXPERTS = 256, PANEL = 64;
constexpr int TILE = 64;  // experts: the rows of a product
constexpr int TURNS = 2;  // warpgroups that take turns at steps
constexpr int W_BYTES = TILE * 128, W_STAGES = 16;
constexpr int PITCH = TILE + 4;  // floats of a row of sums: no two lanes store to one bank
constexpr int PROJECTORS = 320, MULTIPLIERS = 256;
static_assert(PARTS <= 16 && BLOCKS <= 16, "of a cluster");

// Of shared memory, by the rows of a tile.
template <int ROWS>
struct Room {
  static constexpr int X_BYTES = ROWS * 128;
  static constexpr int X_STAGES = ROWS < 64 ? W_STAGES : 8;
  static constexpr int X_AT = W_STAGES * W_BYTES;
  static constexpr int OWN_ROWS = (ROWS + PARTS - 1) / PARTS;  // which a thread block adds up
  static constexpr int SHARES_AT = X_AT + X_STAGES * X_BYTES;
  static constexpr int BARRIERS_AT = SHARES_AT + PARTS * OWN_ROWS * PITCH * 4;
  static constexpr int BYTES = BARRIERS_AT + (2 * W_STAGES + 2 * X_STAGES + 1) * 8 + 1024;
  static_assert(BYTES <= 227 * 1024, "what a multiprocessor has");
  static_assert(X_STAGES % TURNS == 0 && W_STAGES % TURNS == 0, "each sees all of its stages");
  static_assert(ROWS * PITCH * 4 <= X_AT, "sums on their way lie where weights lay");
};

// Panels from a column on into stages. All are free at first, and then nothing is computed.
template <int STAGES, int BYTES>
__device__ __forceinline__ void bring(uint32_t to, const CUtensorMap* map, int column, int row,
                                      int count, uint32_t full, uint32_t empty) {
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (s == count) return;
    expect(full + s * 8, BYTES);
    load(to + s * BYTES, map, column + s * PANEL, row, full + s * 8);
  }
  uint32_t stage = 0, passed = 0;
#pragma unroll 1
  for (int i = STAGES; i < count; ++i) {
    wait(empty + stage * 8, passed);
    expect(full + stage * 8, BYTES);
    load(to + stage * BYTES, map, column + i * PANEL, row, full + stage * 8);
    if (++stage == STAGES) stage = 0, passed ^= 1;
  }
}

template <int ROWS>
__global__ void __launch_bounds__(PROJECTORS, 2)  // few registers: gate_choose runs beside it
    gate_project(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap w_map, float* __restrict__ logits, int m,
                 int hidden) {
  using R = Room<ROWS>;
  constexpr int X_STAGES = R::X_STAGES, X_BYTES = R::X_BYTES;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t w_full = base + R::BARRIERS_AT, w_empty = w_full + W_STAGES * 8;
  const uint32_t x_full = w_empty + W_STAGES * 8, x_empty = x_full + X_STAGES * 8;
  const uint32_t summed = x_empty + X_STAGES * 8;
  const int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32, part = cluster_rank();
  constexpr int TILES = EXPERTS / TILE;
  const int tile = blockIdx.x / PARTS, row0 = tile / TILES * ROWS, expert0 = tile % TILES * TILE;
  const int used = min(ROWS, m - row0);
  const auto first_of = [&](int p) { return used * p / PARTS; };  // row that p adds up
  const int mine = first_of(part), own = first_of(part + 1) - mine;
  const int panels = (hidden + PANEL - 1) / PANEL;
  const int first = panels * part / PARTS, count = panels * (part + 1) / PARTS - first;

  let_next_begin();
  if (warp == 8 && elected()) {
    prefetch(&w_map);
    prefetch(&x_map);
    for (int s = 0; s < W_STAGES; ++s) {
      barrier_init(w_full + s * 8, 1);
      barrier_init(w_empty + s * 8, 8 / TURNS);
    }
    for (int s = 0; s < X_STAGES; ++s) {
      barrier_init(x_full + s * 8, 1);
      barrier_init(x_empty + s * 8, 8 / TURNS);
    }
    barrier_init(summed, 1);
    barriers_ready();
    expect(summed, PARTS * own * PITCH * 4);
  }
  __syncthreads();
  cluster_arrive();

  if (warp >= 8) {
    if (elected()) {
      if (warp == 8) {
        bring<W_STAGES, W_BYTES>(base, &w_map, first * PANEL, expert0, count, w_full, w_empty);
      } else {
        wait_for_ahead();  // x is its output; the weight is not
        bring<X_STAGES, X_BYTES>(base + R::X_AT, &x_map, first * PANEL, row0, count, x_full,
                                 x_empty);
      }
    }
    __syncwarp();
    cluster_wait();
    cluster_arrive();
    cluster_wait();
    return;
  }

  const int half = warp / 4;
  float sums[ROWS / 2];
#pragma unroll
  for (int j = 0; j < ROWS / 2; ++j) sums[j] = 0;
  const uint64_t w_descriptor = descriptor(base);
  const uint64_t x_descriptor = descriptor(base + R::X_AT);
  uint32_t w_stage = half, w_passed = 0, x_stage = half, x_passed = 0;
  uint32_t last_w = 0, last_x = 0;
  // Stages are counted, not computed from the step: a division costs as much as a product.
#pragma unroll 1
  for (int i = half; i < count; i += TURNS) {
    const uint64_t a = w_descriptor + w_stage * (W_BYTES / 16);
    const uint64_t b = x_descriptor + x_stage * (X_BYTES / 16);
    wait(w_full + w_stage * 8, w_passed);
    wait(x_full + x_stage * 8, x_passed);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(sums, a + 2 * step, b + 2 * step, 1);
    products_end();
    wait_groups<1>();  // those of the step before
    if (i >= TURNS && lane == 0) arrive(last_w), arrive(last_x);
    last_w = w_empty + w_stage * 8, last_x = x_empty + x_stage * 8;
    if ((w_stage += TURNS) >= W_STAGES) w_stage -= W_STAGES, w_passed ^= 1;
    if ((x_stage += TURNS) >= X_STAGES) x_stage -= X_STAGES, x_passed ^= 1;
  }
  wait_groups<0>();
  pin(sums);
  meet<3>(MULTIPLIERS);  // all are through with what was loaded: sums take its place

  // A lane has experts `expert` and 8 on, and of each eight rows two.
  float* const out = reinterpret_cast<float*>(shared);
  const int expert = warp % 4 * 16 + lane / 4, row = lane % 4 * 2;
  // Each warpgroup sums up half of the experts: the upper of a lane's two, or the lower.
  float2* const swap = reinterpret_cast<float2*>(shared + R::X_AT) + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    float2* const to = swap + ((1 - half) * ROWS / 8 + j) * 128;
    *to = half ? make_float2(sums[4 * j], sums[4 * j + 1])
               : make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
  meet<3>(MULTIPLIERS);
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    const float2 other = swap[(half * ROWS / 8 + j) * 128];
    float* const to = out + (8 * j + row) * PITCH + expert + half * 8;
    to[0] = (half ? sums[4 * j + 2] : sums[4 * j]) + other.x;
    to[PITCH] = (half ? sums[4 * j + 3] : sums[4 * j + 1]) + other.y;
  }
  proxy_fence();
  cluster_wait();  // all have begun
  meet<3>(MULTIPLIERS);
#pragma unroll
  for (int eight = 0; eight < PARTS; eight += 8) {
    const int to = eight + warp, from = first_of(to);
    const int bytes = (first_of(to + 1) - from) * PITCH * 4;
    if (to < PARTS && bytes && elected())
      copy_to_rank(of_rank(base + R::SHARES_AT + part * R::OWN_ROWS * PITCH * 4, to),
                   base + from * PITCH * 4, bytes, of_rank(summed, to));
  }
  wait_cluster(summed, 0);
  cluster_arrive();  // what was copied here has come; what was copied from here is still read
  const float* const shares = reinterpret_cast<const float*>(shared + R::SHARES_AT);
  constexpr int QUADS = TILE / 4, PIECES = R::OWN_ROWS * QUADS;
#pragma unroll
  for (int piece = 0; piece < (PIECES + MULTIPLIERS - 1) / MULTIPLIERS; ++piece) {
    const int i = piece * MULTIPLIERS + threadIdx.x, inside = i / QUADS, c = i % QUADS * 4;
    if (inside >= own) break;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float4 v = *reinterpret_cast<const float4*>(
          shares + (p * R::OWN_ROWS + inside) * PITCH + c);
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    const int64_t of_row = static_cast<int64_t>(row0 + mine + inside) * EXPERTS;
    *reinterpret_cast<float4*>(logits + of_row + expert0 + c) = total;
  }
  cluster_wait();
}

constexpr int TOP = 8, TOP_GROUPS = 4;  // of 8 groups
constexpr int NONE = -2147483647 - 1;  // less than any key
constexpr int FEWEST_WARPS = 16, MOST_WARPS = 32;  // of a thread block that chooses, a row each
constexpr int MASKS_AT = 16, OWN_AT = MASKS_AT + EXPERTS * 4, HEARD_AT = OWN_AT + BLOCKS * EXPERTS;
constexpr int CHOOSE_BYTES = HEARD_AT + BLOCKS * EXPERTS;
static_assert(BLOCKS <= FEWEST_WARPS, "a warp copies to one thread block");

// float32 to int32 in the same order, NaN largest, of what is not -0; and back.
__device__ __forceinline__ int key_of(float value) {
  const int bits = __float_as_int(value);
  return value != value ? 0x7FFFFFFF : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

__device__ __forceinline__ float value_of(int key) {
  return __int_as_float(key ^ (key >> 31 & 0x7FFFFFFF));
}

__device__ __forceinline__ float score_of(float logit) {
  return reciprocal_about(1.0f + exp2_about(logit * -1.442695041f));
}

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

// One row, of which a lane has the eight scores from lane * 8 on: the i-th best expert to lane i < 8.
__device__ __forceinline__ int choose(const float (&scores)[8], const float (&bias)[8], int lane) {
  int keys[8], best = NONE, second = NONE;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    keys[i] = key_of(scores[i] + bias[i]);  // a score is no -0, so no sum is
    second = max(second, min(best, keys[i]));
    best = max(best, keys[i]);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const int other = __shfl_xor_sync(~0u, best, mask);
    second = max(max(second, __shfl_xor_sync(~0u, second, mask)), min(best, other));
    best = max(best, other);
  }
  // Each lane of a group's four compares it with two others.
  const int mine = key_of(value_of(best) + value_of(second)), group = lane / 4;
  int ahead = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int g = lane % 4 * 2 + i, other = __shfl_sync(~0u, mine, g * 4);
    ahead += other > mine || (other == mine && g < group);
  }
  ahead += __shfl_xor_sync(~0u, ahead, 1);
  ahead += __shfl_xor_sync(~0u, ahead, 2);
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
  int most = NONE, expert = 0;
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
  return expert;
}

// By a warp: counts [256] and offsets [256] of all thread blocks' counts `heard`.
__device__ __forceinline__ void write_counts(const uint8_t* heard, int blocks, int lane,
                                             int* counts, int* offsets) {
  uint32_t even[2] = {0, 0}, odd[2] = {0, 0};  // two experts a word
#pragma unroll 4
  for (int p = 0; p < blocks; ++p) {
    const uint2 four = *reinterpret_cast<const uint2*>(heard + p * EXPERTS + lane * 8);
    even[0] += four.x & 0x00FF00FF, odd[0] += four.x >> 8 & 0x00FF00FF;
    even[1] += four.y & 0x00FF00FF, odd[1] += four.y >> 8 & 0x00FF00FF;
  }
  int count[8], offset[8], total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    count[i] = (i % 2 ? odd : even)[i / 4] >> i % 4 / 2 * 16 & 0xFFFF;
    offset[i] = total, total += count[i];
  }
  int upto = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const int before = upto - total;
    *reinterpret_cast<int4*>(counts + lane * 8 + i) =
        make_int4(count[i], count[i + 1], count[i + 2], count[i + 3]);
    *reinterpret_cast<int4*>(offsets + lane * 8 + i) = make_int4(
        before + offset[i], before + offset[i + 1], before + offset[i + 2], before + offset[i + 3]);
  }
}

// Thread block i has the `each` rows from i * each on, warp j its j-th.
__global__ void __launch_bounds__(MOST_WARPS * 32, 1)
    gate_choose(const float* logits, const float* __restrict__ bias, const int* num_rows,
                float scale, int m, int each, int* ids, float* weights, int* counts, int* offsets,
                int* places) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = address(raw), told = base;
  unsigned* const masks = reinterpret_cast<unsigned*>(raw + MASKS_AT);
  const uint8_t* const heard = raw + HEARD_AT;
  const int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = blockIdx.x, blocks = gridDim.x, row = rank * each + warp;
  const bool mine = warp < each && row < m;

  let_next_begin();
  if (warp == 0 && elected()) {
    barrier_init(told, 1);
    barriers_ready();
    expect(told, blocks * EXPERTS);
  }
  if (threadIdx.x < EXPERTS) masks[threadIdx.x] = 0;
  float correction[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(bias + lane * 8 + i));
    correction[i] = four.x, correction[i + 1] = four.y;
    correction[i + 2] = four.z, correction[i + 3] = four.w;
  }
  __syncthreads();
  cluster_arrive();

  wait_for_ahead();
  int expert = -1;
  float score = 0;
  if (mine) {
    const float4* const from =
        reinterpret_cast<const float4*>(logits + static_cast<int64_t>(row) * EXPERTS) + lane * 2;
    const float4 low = __ldcg(from), high = __ldcg(from + 1);
    const int used = num_rows ? __ldcg(num_rows) : m;
    // Nothing of a padding row is kept; asked here, the load is not put off until the choice is made.
    float scores[8] = {row < used ? low.x : 0, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i] = score_of(scores[i]);
    expert = choose(scores, correction, lane);
    if (row < used && lane < TOP) atomicOr(masks + expert, 1u << warp);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float one = __shfl_sync(~0u, scores[i], expert / 8);
      if (expert % 8 == i) score = one;
    }
    if (row >= used) expert = -1;
    if (row >= used || lane >= TOP) score = 0;
  }
  __syncthreads();
  if (warp < blocks) {
    // Each of these counts for itself, so that none waits for another.
    uint32_t eight[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i / 4] |= __popc(masks[lane * 8 + i]) << i % 4 * 8;
    *reinterpret_cast<uint2*>(raw + OWN_AT + warp * EXPERTS + lane * 8) =
        make_uint2(eight[0], eight[1]);
    proxy_fence();
  }
  cluster_wait();  // all have begun
  if (warp < blocks && elected())
    copy_to_rank(of_rank(base + HEARD_AT + rank * EXPERTS, warp), base + OWN_AT + warp * EXPERTS,
                 EXPERTS, of_rank(told, warp));
  if (mine) {
    float total = score;
#pragma unroll
    for (int mask = 1; mask < TOP; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
    if (lane < TOP) {
      ids[row * TOP + lane] = expert;
      weights[row * TOP + lane] = score / (total + 1e-20f) * scale;
    }
  }
  wait_cluster(told, 0);
  cluster_arrive();  // what was copied here has come; what was copied from here is still read
  if (mine) {
    // Four lanes a choice.
    const int of = __shfl_sync(~0u, expert, lane / 4);
    int before = 0;
    if (of >= 0)
      for (int p = lane % 4; p < rank; p += 4) before += heard[p * EXPERTS + of];
    before += __shfl_xor_sync(~0u, before, 1);
    before += __shfl_xor_sync(~0u, before, 2);
    if (lane % 4 == 0)
      places[row * TOP + lane / 4] =
          of < 0 ? -1 : before + __popc(masks[of] & ((1u << warp) - 1));
  }
  if (rank == blocks - 1 && warp == FEWEST_WARPS - 1)
    write_counts(heard, blocks, lane, counts, offsets);
  cluster_wait();
}

namespace {

// [rows, width] bfloat16, `step` values from row to row; boxes of so many rows, 64 values each.
CUresult describe_rows(CUtensorMap* map, const void* data, int width, int rows, int64_t step,
                       int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(step * 2)};
  const cuuint32_t box[2] = {PANEL, static_cast<cuuint32_t>(box_rows)}, ones[2] = {1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes,
                   strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

cudaLaunchConfig_t clustered(int blocks, int cluster, int threads, int shared_bytes, void* stream,
                             cudaLaunchAttribute* attributes, int dependent) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return config;
}

template <int ROWS>
cudaError_t prepare_projection() {
  const auto kernel = reinterpret_cast<const void*>(&gate_project<ROWS>);
  const cudaError_t failed = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Room<ROWS>::BYTES);
  if (failed != cudaSuccess || PARTS <= 8) return failed;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Once a device.
cudaError_t prepare_all() {
  static bool prepared[64];
  int device = 0;
  cudaError_t failed = cudaGetDevice(&device);
  if (failed != cudaSuccess || prepared[device % 64]) return failed;
  for (const auto one : {&prepare_projection<8>, &prepare_projection<16>, &prepare_projection<32>,
                         &prepare_projection<64>})
    if (failed == cudaSuccess) failed = one();
  if (failed == cudaSuccess && BLOCKS > 8)
    failed = cudaFuncSetAttribute(reinterpret_cast<const void*>(gate_choose),
                                  cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  prepared[device % 64] = failed == cudaSuccess;
  return failed;
}

template <int ROWS>
int launch_projection(const void* x, int64_t x_row, const void* w, int m, int hidden, float* logits,
                      int dependent, void* stream) {
  CUtensorMap x_map, w_map;
  CUresult bad = describe_rows(&x_map, x, hidden, m, x_row, ROWS);
  if (!bad) bad = describe_rows(&w_map, w, hidden, EXPERTS, hidden, TILE);
  if (bad) return 10000 + bad;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config =
      clustered((m + ROWS - 1) / ROWS * (EXPERTS / TILE) * PARTS, PARTS, PROJECTORS,
                Room<ROWS>::BYTES, stream, attributes, dependent);
  return cudaLaunchKernelEx(&config, gate_project<ROWS>, x_map, w_map, logits, m, hidden);
}

}  // namespace

// 0, or a cudaError_t, or 10000 plus a CUresult. The first launch is left out if x is null, the
// second if `ids` is.
extern "C" int gate_launch(const void* x, int64_t x_row, const void* w, const float* bias,
                           const int* num_rows, float scale, int m, int hidden, float* logits,
                           int* ids, float* weights, int* counts, int* offsets, int* places,
                           int dependent, void* stream) {
  int failed = prepare_all();
  if (failed != cudaSuccess) return failed;
  if (encoder() == nullptr) return cudaErrorSymbolNotFound;
  const auto project = m <= 8    ? &launch_projection<8>
                       : m <= 16 ? &launch_projection<16>
                       : m <= 32 ? &launch_projection<32>
                                 : &launch_projection<64>;
  if (x != nullptr) failed = project(x, x_row, w, m, hidden, logits, dependent, stream);
  if (failed != cudaSuccess || ids == nullptr) return failed;
  const int most = (m + FEWEST_WARPS - 1) / FEWEST_WARPS, blocks = most < BLOCKS ? most : BLOCKS;
  const int each = (m + blocks - 1) / blocks;
  const int warps = each < FEWEST_WARPS ? FEWEST_WARPS : each;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = clustered(blocks, blocks, warps * 32, CHOOSE_BYTES, stream,
                                              attributes, x != nullptr || dependent);
  return cudaLaunchKernelEx(&config, gate_choose, static_cast<const float*>(logits), bias,
                            num_rows, scale, m, each, ids, weights, counts, offsets, places);
}
