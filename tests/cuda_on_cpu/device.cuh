// What kernels/cuda/device.cuh has, for a CPU (machine.hpp), and CUDA's own that the kernels use.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include "machine.hpp"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define threadIdx (cpu::me->thread)
#define blockIdx (cpu::me->block->index)
inline dim3 &gridDim = cpu::grid, &blockDim = cpu::block_size;

using std::max;
using std::min;

template <typename T>
T __ldg(const T* at) {
  return *at;
}

template <typename T>
T __ldcg(const T* at) {
  return *at;
}

inline int warp_of() { return threadIdx.x / 32; }

inline void __syncwarp() {
  auto& [arrived, generation] = cpu::me->block->warps[warp_of()];
  const int mine = generation;
  if (++arrived == 32)
    arrived = 0, ++generation, ++cpu::progress;
  else
    cpu::until([&] { return generation != mine; });
}

template <typename T>
T shuffled(T value, int from) {
  auto& slots = cpu::me->block->exchanged[warp_of()];
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  slots[threadIdx.x % 32] = bits;
  __syncwarp();
  memcpy(&value, &slots[from], sizeof(T));
  __syncwarp();
  return value;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffled(value, (threadIdx.x % 32) ^ mask);
}

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return shuffled(value, from);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = threadIdx.x % 32;
  return shuffled(value, lane >= step ? lane - step : lane);
}

template <typename T, typename Merge>
T reduced(T value, const Merge& merge) {
  for (int mask = 16; mask; mask /= 2) value = merge(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

inline int __reduce_max_sync(unsigned, int value) {
  return reduced(value, [](int a, int b) { return max(a, b); });
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return reduced(value, [](unsigned a, unsigned b) { return min(a, b); });
}

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return reduced(value, [](unsigned a, unsigned b) { return a | b; });
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

inline unsigned atomicOr(unsigned* at, unsigned bits) {
  const unsigned before = *at;
  *at |= bits;
  return before;
}

inline float exp2_about(float x) { return exp2f(x); }
inline float reciprocal_about(float x) { return 1.0f / x; }

inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline int __float_as_int(float value) {
  int bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline void named_meeting(int id, int threads) {
  cpu::Block& block = *cpu::me->block;
  const int mine = block.generation[id];
  if (++block.arrived[id] == threads)
    block.arrived[id] = 0, ++block.generation[id], ++cpu::progress;
  else
    cpu::until([&] { return block.generation[id] != mine; });
}

inline void __syncthreads() { named_meeting(0, blockDim.x); }

template <int BARRIER>
void meet(int threads) {
  named_meeting(BARRIER, threads);
}

inline void half_sync(int half) { named_meeting(1 + half, 128); }

inline uint8_t* shared_memory() { return cpu::me->block->shared.data(); }

inline uint32_t address(const void* p) {
  return static_cast<const uint8_t*>(p) - shared_memory() + cpu::BASE;
}

inline void prefetch(const CUtensorMap*) {}

inline void wait(uint32_t barrier, uint32_t parity) {
  cpu::Barrier& b = cpu::barrier_of(*cpu::me->block, barrier);
  cpu::until([&] { return b.phase != static_cast<int>(parity); });
}

inline void wait_cluster(uint32_t barrier, uint32_t parity) { wait(barrier, parity); }

inline uint32_t cluster_rank() { return cpu::me->block - cpu::blocks.data(); }

inline uint32_t of_rank(uint32_t local, uint32_t rank) { return (local & 0xFFFFFF) | (rank + 1) << 24; }

inline void cluster_arrive() {
  cpu::me->cluster_generation = cpu::cluster_generation;
  cpu::me->at_cluster = true;
  ++cpu::cluster_arrived, ++cpu::progress;
  cpu::cluster_advance();
}

inline void cluster_wait() {
  const int mine = cpu::me->cluster_generation;
  cpu::until([&] { return cpu::cluster_generation != mine; });
}

inline void barrier_init(uint32_t barrier, int arrivals) {
  cpu::me->block->barriers[barrier] = {arrivals, arrivals, 0, 0};
}

inline void barriers_ready() {}

inline void expect(uint32_t barrier, uint32_t bytes) {
  cpu::barrier_of(*cpu::me->block, barrier).bytes += bytes;
  cpu::arrived(*cpu::me->block, barrier);
}

inline void arrive(uint32_t barrier) { cpu::arrived(*cpu::me->block, barrier); }

inline void arrive_at(uint32_t barrier) { cpu::arrived(cpu::block_of(barrier), barrier); }

inline int of_warp(int value) { return __shfl_sync(~0u, value, 0); }

inline bool elected() { return threadIdx.x % 32 == 0; }

inline void copy_to_rank(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  cpu::Block* const there = &cpu::block_of(to);
  cpu::Block* const here = cpu::me->block;
  cpu::copies.push_back([=] {
    memcpy(cpu::shared_at(*there, to), cpu::shared_at(*here, from), bytes);
    cpu::moved(*there, barrier, bytes);
  });
}

// The tensor map that `encoder` makes here, in the place of CUDA's.
struct Map {
  uint8_t* data;
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  int rank, bytes, swizzled;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

// Between global memory and a box in shared memory; what is outside reads as zero, is not written.
inline void move_box(const Map& map, std::array<int, 3> from, cpu::Block& block, uint32_t at, bool store) {
  const uint32_t row_bytes = map.box[0] * map.bytes;
  for (uint32_t z = 0; z < map.box[2]; ++z)
    for (uint32_t y = 0; y < map.box[1]; ++y)
      for (uint32_t byte = 0; byte < row_bytes; ++byte) {
        const uint64_t x = from[0] + byte / map.bytes, yy = from[1] + y, zz = from[2] + z;
        const bool inside = x < map.sizes[0] && yy < map.sizes[1] && zz < map.sizes[2];
        uint32_t to = at + (z * map.box[1] + y) * row_bytes + byte;
        if (map.swizzled) to ^= (to >> 7 & 7) << 4;
        uint8_t* const global = map.data + x * map.bytes + byte % map.bytes + yy * map.strides[0] + zz * map.strides[1];
        uint8_t* const shared = cpu::shared_at(block, to);
        if (store && inside) *global = *shared;
        if (!store) *shared = inside ? *global : 0;
      }
}

inline void fetch_box(const CUtensorMap* map, std::array<int, 3> from, cpu::Block* block, uint32_t to, uint32_t barrier) {
  const Map copy = *reinterpret_cast<const Map*>(map);
  const uint32_t local = to & 0xFFFFFF;
  cpu::copies.push_back([=] {
    move_box(copy, from, *block, local, false);
    cpu::moved(*block, barrier, static_cast<long>(copy.box[0]) * copy.box[1] * copy.box[2] * copy.bytes);
  });
}

inline void load(uint32_t to, const CUtensorMap* map, int inner, int outer, uint32_t barrier, uint64_t = 0) {
  fetch_box(map, {inner, outer, 0}, &cpu::block_of(to), to, barrier);
}

inline void load_to_all(uint32_t to, const CUtensorMap* map, int inner, int outer, uint32_t barrier,
                        uint16_t members, uint64_t) {
  for (size_t rank = 0; rank < cpu::blocks.size(); ++rank)
    if (members >> rank & 1) fetch_box(map, {inner, outer, 0}, &cpu::blocks[rank], to, barrier);
}

inline void load_head(uint32_t to, const CUtensorMap* map, int column, int head, int row, uint32_t barrier) {
  fetch_box(map, {column, head, row}, &cpu::block_of(to), to, barrier);
}

inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  cpu::Block* const block = &cpu::block_of(to);
  cpu::copies.push_back([=] {
    memcpy(cpu::shared_at(*block, to), from, bytes);
    cpu::moved(*block, barrier, bytes);
  });
}

inline void store_head(const CUtensorMap* map, int column, int head, int row, uint32_t from) {
  const Map copy = *reinterpret_cast<const Map*>(map);
  auto done = std::make_shared<bool>(false);
  cpu::me->stores.push_back(done);
  cpu::Block* const block = cpu::me->block;
  cpu::copies.push_back([=] {
    move_box(copy, {column, head, row}, *block, from, true);
    *done = true;
  });
}

template <int LEFT>
void wait_stores_read() {
  auto& stores = cpu::me->stores;
  cpu::until([&] {
    for (size_t i = 0; i + LEFT < stores.size(); ++i)
      if (!*stores[i]) return false;
    return true;
  });
}

inline void wait_stores() { wait_stores_read<0>(); }

template <int>
void give_registers() {}
template <int>
void take_registers() {}
inline void proxy_fence() {}
inline void products_begin() {}

template <int COUNT>
void pin(float (&)[COUNT]) {}

inline float operand(uint64_t descriptor, int row, int k, bool narrow) {
  static const std::array<float, 256> e4m3 = [] {
    std::array<float, 256> all{};
    for (int i = 0; i < 256; ++i) {
      const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(i), __NV_E4M3);
      all[i] = __half2float(*reinterpret_cast<const __half*>(&half));
    }
    return all;
  }();
  uint32_t at = ((descriptor & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128 + (narrow ? k : 2 * k);
  at ^= (at >> 7 & 7) << 4;
  const uint8_t* const from = cpu::shared_at(*cpu::me->block, at);
  return narrow ? e4m3[*from] : __int_as_float((from[0] | from[1] << 8) << 16);
}

template <int COLUMNS, bool NARROW>
void multiply_now(const cpu::Product& p) {
  constexpr int DEPTH = NARROW ? 32 : 16;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float a[2][DEPTH];
  for (int k = 0; k < DEPTH; ++k)
    for (int i = 0; i < 2; ++i) a[i][k] = operand(p.a, row + 8 * i, k, NARROW);
  for (int j = 0; j < COLUMNS / 8; ++j)
    for (int e = 0; e < 2; ++e) {
      float sums[2] = {p.add ? p.d[4 * j + e] : 0, p.add ? p.d[4 * j + 2 + e] : 0};
      for (int k = 0; k < DEPTH; ++k) {
        const float b = operand(p.b, 8 * j + lane % 4 * 2 + e, k, NARROW);
        sums[0] += a[0][k] * b, sums[1] += a[1][k] * b;
      }
      p.d[4 * j + e] = sums[0], p.d[4 * j + 2 + e] = sums[1];
    }
}

inline void wait_products() {
  for (const cpu::Product& p : cpu::me->products) p.multiply(p);
  cpu::me->products.clear();
}

inline void products_end() { cpu::me->groups.push_back(cpu::me->products.size()); }

template <int LEFT>
void wait_groups() {
  std::vector<cpu::Product>& products = cpu::me->products;
  std::vector<size_t>& groups = cpu::me->groups;
  if (groups.size() <= LEFT) return;
  const size_t count = groups[groups.size() - LEFT - 1];
  for (size_t i = 0; i < count; ++i) products[i].multiply(products[i]);
  products.erase(products.begin(), products.begin() + count);
  groups.erase(groups.begin(), groups.end() - LEFT);
  for (size_t& end : groups) end -= count;
}

inline void let_next_begin() {}

inline void wait_for_ahead() {
  cpu::until([] { return cpu::ahead_ended; });
}

// Memory that the kernel ahead writes: NaNs until it has ended, then what is there now.
extern "C" void cpu_late(void* at, size_t bytes) {
  uint8_t* const to = static_cast<uint8_t*>(at);
  cpu::late.push_back({to, {to, to + bytes}});
}

extern "C" void cpu_forget() { cpu::late.clear(); }

inline CUresult encode_here(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                            const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map made{};
  made.data = static_cast<uint8_t*>(data);
  made.rank = rank;
  made.bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 4;
  made.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  for (uint32_t i = 0; i < 3; ++i) {
    made.sizes[i] = i < rank ? sizes[i] : 1;
    made.box[i] = i < rank ? box[i] : 1;
    if (i + 1 < rank) {
      made.strides[i] = strides[i];
      if (strides[i] % 16) return CUDA_ERROR_INVALID_VALUE;
    }
    if (made.box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
  }
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && made.box[0] * made.bytes % 16 == 0;
  if (!aligned || (made.swizzled && made.box[0] * made.bytes > 128)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 4, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** symbol, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return *symbol = reinterpret_cast<void*>(&encode_here), cudaSuccess;
}
}

template <typename... Taken, typename... Given>
cudaError_t launch_here(const cudaLaunchConfig_t* config, void (*kernel)(Taken...), Given... given) {
  uint32_t cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  cpu::run(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, [=] { kernel(given...); });
  return cudaSuccess;
}

#define cudaLaunchKernelEx launch_here
#define cudaOccupancyMaxActiveClusters(clusters, kernel, config) (*(clusters) = 1, cudaSuccess)
