// Parts that the kernels of this folder share: one line of PTX each.
//
// Kernels name these functions only, so that a test can run their text on a CPU with others in this
// file's place (tests/cuda_on_cpu).

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// The same for what other thread blocks of the cluster wrote.
__device__ __forceinline__ void wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t of_rank(uint32_t local, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

// The same number in all of a warp, which the compiler then keeps in a register of the warp.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

// One thread of the warp, of which the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
  uint32_t one;
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}

// Nothing is to be seen through it, so no fence, which would wait for all loads and stores.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ void load_head(uint32_t to, const CUtensorMap* map, int column,
                                          int head, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(row),
      "r"(barrier) : "memory");
}

__device__ __forceinline__ void half_sync(int half) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
}

template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) asm volatile("" : "+f"(values[j])::"memory");
}

__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// What was asked for since the last call is a group; all groups but so many are waited for.
__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void wait_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// For the warpgroup, of what the kernel was compiled for.
template <int LEFT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
}

template <int MOST>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of another thread block, by its address in the cluster; nothing is ordered by it.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// So many bytes, in 16s, into shared memory of the cluster, counted by a barrier beside them. What is
// copied has to stay, and the thread block that has it, until that barrier is through.
__device__ __forceinline__ void copy_to_rank(uint32_t to, uint32_t from, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, int inner, int outer,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(inner), "r"(outer), "r"(barrier)
      : "memory");
}

// As `policy` says for the L2 cache.
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, int inner, int outer,
                                     uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(inner),
      "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}

// To the same place, and barrier, of every member's shared memory.
__device__ __forceinline__ void load_to_all(uint32_t to, const CUtensorMap* map, int inner,
                                            int outer, uint32_t barrier, uint16_t members,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(members), "l"(policy)
      : "memory");
}

// So many bytes as they lie, all three in 16s.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_head(const CUtensorMap* map, int column, int head, int row,
                                           uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(map), "r"(column), "r"(head), "r"(row), "r"(from)
      : "memory");
}

// All but so many of this thread's last stores have been read from shared memory.
template <int LEFT>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What ordinary stores wrote is seen by the copy engine and the products.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int BARRIER>
__device__ __forceinline__ void meet(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "r"(threads) : "memory");
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Programmatic dependent launch: the next kernel may begin; the one ahead has ended, its results seen.
__device__ __forceinline__ void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
