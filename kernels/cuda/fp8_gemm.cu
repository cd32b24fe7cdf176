// Block-scaled FP8 product y = x w^T for sm_90a: x [m, k] with one scale a row and 128 values, w
// [n, k] with one scale a 128 x 128, y [m, n] bfloat16 (DeepSeek-V3 report, section 3.3.2).
//
// A cluster of SPLIT x PAIR thread blocks shares one tile of n. Its SPLIT parts sum different parts
// of k; each then copies what it has of another's rows into that one's shared memory, which adds up
// in a fixed order. Its PAIR members hold different rows of x, and the weight's tiles, which both
// need, are read once and multicast.
//
// A thread block: warps 0-3 and 4-7 multiply 64 rows each; warp 8 keeps the copy engine busy with
// weights, and warp 9 with rows once the kernel before has written them, each in its own order. With
// SHORT there are 64 rows in all, and the two take turns at the steps: each sums half of the part.
//
// Compiled with BLOCK_N, SPLIT, PAIR, STAGES and SHORT defined, after common.cuh and `multiply`, one
// wgmma of that width.

constexpr int BLOCK_M = SHORT ? 64 : 128;
constexpr int TURNS = SHORT ? 2 : 1;  // warpgroups that take turns at steps
constexpr int SHARES = SPLIT * TURNS;  // of a sum
constexpr int GROUP = 128;  // values of k with one scale, and bytes of a swizzled row
constexpr int CLUSTER = SPLIT * PAIR;
constexpr int X_BYTES = BLOCK_M * GROUP;
constexpr int W_BYTES = BLOCK_N * GROUP;
constexpr int SCALE_BYTES = BLOCK_M * 4;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int SUM_PITCH = BLOCK_N % 32 == 8 || BLOCK_N % 32 == 24 ? BLOCK_N : BLOCK_N + 8;
constexpr int PART_ROWS = BLOCK_M / SPLIT;  // of the result, which a thread block adds up
constexpr int PART_BYTES = PART_ROWS * SUM_PITCH * 4;
constexpr int WARP_BYTES = 16 * SUM_PITCH * 4;
constexpr int OUT_PITCH = BLOCK_N + 8;  // of bfloat16
constexpr int OUT_BYTES =
    SPLIT > 1 ? SHARES * PART_BYTES : BLOCK_M * OUT_PITCH * 2;
constexpr int OUT_AT = STAGES * STAGE_BYTES;
constexpr int SCALES_AT = OUT_AT + OUT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + (2 * STAGES + 1) * 8 + 1024;
constexpr bool CROSSES = 128 % BLOCK_N != 0;  // a tile may lie in two blocks of weights
constexpr int THREADS = 384;  // the last two warps only give their registers
static_assert(W_BYTES % 1024 == 0, "swizzled rows");
static_assert(BLOCK_N <= 128 || BLOCK_N == 136, "a tile lies in two blocks of weights at most");
static_assert(SHARED_BYTES <= 227 * 1024 && CLUSTER <= 8, "what a multiprocessor has");
static_assert(SPLIT == 1 || 8 * WARP_BYTES <= STAGES * STAGE_BYTES, "sums on their way");
static_assert(!SHORT || (SPLIT > 1 && SPLIT <= 4 && PAIR == 1), "16 rows of a warp, one adder");
static_assert(!SHORT || STAGES % 2 == 0, "a warpgroup sees all that passes its stages");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_gemm(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
             const __grid_constant__ CUtensorMap scale_map, const float* __restrict__ w_scales,
             int w_scale_row, __nv_bfloat16* __restrict__ y, int64_t y_stride, int m, int n, int k,
             int row_bytes) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (base - address(raw));
  const uint32_t full = base + BARRIERS_AT, empty = full + STAGES * 8;
  const uint32_t summed = empty + STAGES * 8;

  const int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int part = rank / PAIR, member = rank % PAIR;
  const int groups_m = (m + PAIR * BLOCK_M - 1) / (PAIR * BLOCK_M);
  const int tiles = groups_m * ((n + BLOCK_N - 1) / BLOCK_N), apart = gridDim.x / CLUSTER;
  const auto row_of = [&](int tile) { return (tile % groups_m * PAIR + member) * BLOCK_M; };
  const auto column_of = [&](int tile) { return tile / groups_m * BLOCK_N; };
  const int steps = (k + GROUP - 1) / GROUP;
  const int first = steps * part / SPLIT, count = steps * (part + 1) / SPLIT - first;

  let_next_begin();
  if (warp == 8 && elected()) {
    prefetch(&w_map);
    prefetch(&x_map);
    prefetch(&scale_map);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8 / TURNS * PAIR);
    }
    if (SPLIT > 1) barrier_init(summed, 1);
    barriers_ready();
    if (SPLIT > 1) expect(summed, (SPLIT - 1) * TURNS * PART_BYTES);
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_arrive();
  if (PAIR > 1) cluster_wait();  // before a member loads into another

  // Stages are counted, not computed from the step: a division costs as much as a product.
  if (warp >= 8) {
    give_registers<24>();
    if (warp < 10 && elected()) {
      // Weights that pass by once need not be kept by the L2 cache: evict first, else normally.
      const uint64_t policy = groups_m == 1 ? 0x12F0000000000000ull : 0x1000000000000000ull;
      const uint16_t members = ((1 << PAIR) - 1) << (part * PAIR);
      const auto weights = [&](uint32_t stage, bool mine, int group, int column) {
        const uint32_t to = base + stage * STAGE_BYTES + X_BYTES, barrier = full + stage * 8;
        expect(barrier, row_bytes + W_BYTES);
        if (PAIR == 1)
          load(to, &w_map, group * GROUP, column, barrier, policy);
        else if (mine)
          load_to_all(to, &w_map, group * GROUP, column, barrier, members, policy);
      };
      const auto rows = [&](uint32_t stage, int group, int row0) {
        const uint32_t barrier = full + stage * 8;
        load(base + stage * STAGE_BYTES, &x_map, group * GROUP, row0, barrier);
        load(base + SCALES_AT + stage * SCALE_BYTES, &scale_map, row0, group, barrier);
      };
      // x is the output of the kernel before; the weights are not.
      const bool brings_rows = warp == 9;
      if (brings_rows) wait_for_ahead();
      uint32_t stage = 0, passed = 1;  // a stage is free at first
      int turn = member;
      for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += apart) {
        const int row0 = row_of(tile), column = column_of(tile);
#pragma unroll 1
        for (int i = 0; i < count; ++i, ++turn) {
          wait(empty + stage * 8, passed);
          if (brings_rows)
            rows(stage, first + i, row0);
          else
            weights(stage, turn % PAIR == 0, first + i, column);
          if (++stage == STAGES) stage = 0, passed ^= 1;
        }
      }
    }
    __syncwarp();
    if (SPLIT > 1 && PAIR == 1) cluster_wait();
    if (CLUSTER > 1) {
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  take_registers<240>();
  const int half = warp / 4;
  const int row0_of_half = SHORT ? 0 : half * 64;
  const int first_row = row0_of_half + warp % 4 * 16;  // of the warp
  const int row = first_row + lane / 4;                // and row + 8
  const uint64_t x_descriptor = descriptor(base + row0_of_half * GROUP);
  const uint64_t w_descriptor = descriptor(base + X_BYTES);
  // The products have been waited for: nothing is left that a wider release would have to order.
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (PAIR > 1 && lane < PAIR) arrive_at(of_rank(barrier, part * PAIR + lane));
    if (PAIR == 1 && lane == 0) arrive(barrier);
  };
  uint32_t stage = SHORT ? half : 0;
  uint32_t passed = 0;
  for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += apart) {
    const int row0 = row_of(tile), column0 = column_of(tile), block = column0 / 128;
    const bool used = row0 + row0_of_half < m;
    const int boundary = CROSSES ? ((block + 1) * 128 - column0) / 8 : BLOCK_N / 8;
    const float* const near_scales = w_scales + block * w_scale_row + first;
    const float* const far_scales =
        CROSSES && (block + 1) * 128 < n ? near_scales + w_scale_row : near_scales;
    float sums[BLOCK_N / 2], even[BLOCK_N / 2], odd[BLOCK_N / 2];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) sums[i] = 0;
    // A lane has the weight's scale of one step in 32, asked for 32 steps ahead.
    const auto scales_from = [&](const float* scales, int i) {
      return i + lane < count ? __ldg(scales + i + lane) : 0.0f;
    };
    float near_lane = 0, far_lane = 0, next_near = scales_from(near_scales, 0), next_far = 0;
    if (CROSSES) next_far = scales_from(far_scales, 0);
    int i = SHORT ? half : 0;
    const auto advance = [&]() {
      i += TURNS;
      if ((stage += TURNS) >= STAGES) stage -= STAGES, passed ^= 1;
    };
    struct Step {
      float upper, lower, near, far;
      uint32_t barrier;
    };
    const auto start = [&](float(&product)[BLOCK_N / 2], Step& step) {
      if (i % 32 < TURNS) {
        near_lane = next_near, next_near = scales_from(near_scales, i / 32 * 32 + 32);
        if (CROSSES) far_lane = next_far, next_far = scales_from(far_scales, i / 32 * 32 + 32);
      }
      step.near = __shfl_sync(0xFFFFFFFF, near_lane, i % 32);
      step.far = CROSSES ? __shfl_sync(0xFFFFFFFF, far_lane, i % 32) : step.near;
      step.barrier = empty + stage * 8;
      const uint64_t a = x_descriptor + stage * (STAGE_BYTES / 16);
      const uint64_t b = w_descriptor + stage * (STAGE_BYTES / 16);
      wait(full + stage * 8, passed);
      const float* const scales =
          reinterpret_cast<const float*>(shared + SCALES_AT + stage * SCALE_BYTES) + row;
      step.upper = scales[0], step.lower = scales[8];
      pin(product);
      products_begin();
#pragma unroll
      for (int part32 = 0; part32 < 4; ++part32)
        multiply(product, a + 2 * part32, b + 2 * part32, part32 > 0);
      products_end();
      advance();
    };
    const auto finish = [&](float(&product)[BLOCK_N / 2], const Step& step) {
      pin(product);
      release(step.barrier);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) {
        const float weight = !CROSSES || j < boundary ? step.near : step.far;
        sums[4 * j] += product[4 * j] * (step.upper * weight);
        sums[4 * j + 1] += product[4 * j + 1] * (step.upper * weight);
        sums[4 * j + 2] += product[4 * j + 2] * (step.lower * weight);
        sums[4 * j + 3] += product[4 * j + 3] * (step.lower * weight);
      }
    };
    if (!used) {
      for (; i < count; advance()) {
        wait(full + stage * 8, passed);
        release(empty + stage * 8);
      }
    } else if (i < count) {
      // A step's products are asked for before those of the last are added up: both warpgroups
      // begin when a stage arrives, and the tensor cores would stand still while both add.
      Step here, next;
      start(even, here);
      int left = (count - i + TURNS - 1) / TURNS;
      for (; left >= 2; left -= 2) {
        start(odd, next);
        wait_groups<1>();
        finish(even, here);
        start(even, here);
        wait_groups<1>();
        finish(odd, next);
      }
      if (left) {
        start(odd, next);
        wait_groups<1>();
        finish(even, here);
        wait_groups<0>();
        finish(odd, next);
      } else {
        wait_groups<0>();
        finish(even, here);
      }
    }
    if constexpr (SPLIT > 1) {
      // A warp's 16 rows go to the thread block that adds them up, beside those of other parts, by
      // way of the stages, whose last products have been waited for when all warps are here.
      if (PAIR == 1) cluster_wait();  // they have begun
      meet<3>(256);
      const int to = first_row / PART_ROWS, share = part * TURNS + (SHORT ? half : 0);
      const int place = (share * PART_ROWS + first_row - to * PART_ROWS) * SUM_PITCH * 4 + OUT_AT;
      const int at = to == part ? place : warp * WARP_BYTES;
      float* const mine =
          reinterpret_cast<float*>(shared + at) + lane / 4 * SUM_PITCH + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) {
        float* const upper = mine + 8 * j;
        *reinterpret_cast<float2*>(upper) = make_float2(sums[4 * j], sums[4 * j + 1]);
        *reinterpret_cast<float2*>(upper + 8 * SUM_PITCH) =
            make_float2(sums[4 * j + 2], sums[4 * j + 3]);
      }
      if (to != part) {
        const int there = to * PAIR + member;
        proxy_fence();
        __syncwarp();
        if (elected())
          copy_to_rank(of_rank(base + place, there), base + at, WARP_BYTES, of_rank(summed, there));
      }
      meet<3>(256);
      wait_cluster(summed, 0);
      cluster_arrive();  // what was copied here has come; what was copied from here is still read
      const float* const shares = reinterpret_cast<const float*>(shared + OUT_AT);
      constexpr int QUADS = BLOCK_N / 4, PIECES = PART_ROWS * QUADS;
#pragma unroll
      for (int turn = 0; turn < (PIECES + 255) / 256; ++turn) {
        const int i = turn * 256 + threadIdx.x;
        if (i >= PIECES) break;
        const int inside = i / QUADS, r = row0 + part * PART_ROWS + inside, c = i % QUADS * 4;
        float total[4] = {0, 0, 0, 0};
#pragma unroll
        for (int p = 0; p < SHARES; ++p) {
          const float* const at = shares + (p * PART_ROWS + inside) * SUM_PITCH + c;
          const float4 v = *reinterpret_cast<const float4*>(at);
          total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
        }
        if (r < m && column0 + c < n)
          *reinterpret_cast<uint2*>(y + r * y_stride + column0 + c) =
              make_uint2(packed(total[0], total[1]), packed(total[2], total[3]));
      }
      break;
    } else {
      // Through memory of their own, while the copy engine is at the next tile.
      __nv_bfloat16* const mine =
          reinterpret_cast<__nv_bfloat16*>(shared + OUT_AT) + half * 64 * OUT_PITCH;
      __nv_bfloat16* const to = mine + (row - half * 64) * OUT_PITCH + lane % 4 * 2;
      half_sync(half);  // the tile before has been copied out
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) {
        *reinterpret_cast<uint32_t*>(to + 8 * j) = packed(sums[4 * j], sums[4 * j + 1]);
        *reinterpret_cast<uint32_t*>(to + 8 * OUT_PITCH + 8 * j) =
            packed(sums[4 * j + 2], sums[4 * j + 3]);
      }
      half_sync(half);
      constexpr int EIGHTS = BLOCK_N / 8;
      for (int i = threadIdx.x % 128; i < 64 * EIGHTS; i += 128) {
        const int inside = i / EIGHTS, r = row0 + half * 64 + inside, c = i % EIGHTS * 8;
        if (r < m && column0 + c < n)
          *reinterpret_cast<uint4*>(y + r * y_stride + column0 + c) =
              *reinterpret_cast<const uint4*>(mine + inside * OUT_PITCH + c);
      }
    }
  }
  // Others may still read what lies here, or say that they have read what was multicast.
  if (CLUSTER > 1) {
    if (SPLIT == 1) cluster_arrive();
    cluster_wait();
  }
}

namespace {

CUresult describe(CUtensorMap* map, CUtensorMapDataType type, const void* data, uint64_t inner,
                  uint64_t outer, uint64_t stride_bytes, uint32_t box_inner, uint32_t box_outer,
                  CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[2] = {inner, outer}, strides[1] = {stride_bytes};
  const cuuint32_t box[2] = {box_inner, box_outer}, ones[2] = {1, 1};
  return encoder()(map, type, 2, const_cast<void*>(data), sizes, strides, box, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

cudaLaunchConfig_t clustered(int m, int n, cudaStream_t stream, cudaLaunchAttribute* attributes,
                          int dependent) {
  cudaLaunchConfig_t config = {};
  // Parts of a sum meet once: a cluster for each tile. Else clusters take tiles in turn.
  const int groups_m = (m + PAIR * BLOCK_M - 1) / (PAIR * BLOCK_M);
  const int tiles = groups_m * ((n + BLOCK_N - 1) / BLOCK_N);
  static const int processors = [] {
    int device = 0, count = 132;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  const int clusters = SPLIT > 1 || tiles < processors / PAIR ? tiles : processors / PAIR;
  config.gridDim = dim3(clusters * CLUSTER);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = SHARED_BYTES;
  config.stream = stream;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = CLUSTER;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return config;
}

}  // namespace

// 0, or a cudaError_t, or 10000 plus a CUresult. x_step: floats between two groups of x's scales.
extern "C" int fp8_gemm_launch(const void* x, const float* x_scales, int64_t x_step, const void* w,
                               const float* w_scales, int w_scale_row, void* y, int64_t y_stride,
                               int m, int n, int k, int dependent, void* stream) {
  const cudaError_t failed = prepare(reinterpret_cast<const void*>(fp8_gemm), SHARED_BYTES);
  if (failed != cudaSuccess) return failed;
  CUtensorMap x_map, w_map, scale_map;
  const auto bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  // Rows beyond m are not loaded: what lies there in shared memory reaches only results beyond m.
  const int rows = m >= BLOCK_M ? BLOCK_M : (m + 7) / 8 * 8;
  CUresult bad = describe(&x_map, bytes, x, k, m, k, GROUP, rows, CU_TENSOR_MAP_SWIZZLE_128B);
  if (!bad) bad = describe(&w_map, bytes, w, k, n, k, GROUP, BLOCK_N, CU_TENSOR_MAP_SWIZZLE_128B);
  if (!bad)
    bad = describe(&scale_map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, x_scales, m, (k + 127) / 128,
                   x_step * 4, rows, 1, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (bad) return 10000 + bad;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config =
      clustered(m, n, static_cast<cudaStream_t>(stream), attributes, dependent);
  return cudaLaunchKernelEx(&config, fp8_gemm, x_map, w_map, scale_map, w_scales, w_scale_row,
                            static_cast<__nv_bfloat16*>(y), y_stride, m, n, k, rows * (GROUP + 4));
}

// Clusters that run at a time, or less than 0.
extern "C" int fp8_gemm_clusters() {
  if (prepare(reinterpret_cast<const void*>(fp8_gemm), SHARED_BYTES) != cudaSuccess) return -1;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = clustered(128, 128, nullptr, attributes, 0);
  int clusters = -1;
  return cudaOccupancyMaxActiveClusters(&clusters, fp8_gemm, &config) == cudaSuccess ? clusters : -1;
}
