// A cluster of thread blocks on a CPU: every CUDA thread is a fibre, which gives way where it waits.
//
// Copies and pushes happen some time after they were asked for, in random order; products read their
// operands when they are waited for. Shared memory is full of NaNs at first. A cluster in which nobody
// can go on is reported. Global memory named by `cpu_late` has its content only when the kernel ahead
// is said to have ended.

#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace cpu {

constexpr size_t STACK = 96 << 10;
#ifndef SHARED_BASE
#define SHARED_BASE 16  // no multiple of 1024
#endif
constexpr uint32_t BASE = SHARED_BASE;  // where dynamic shared memory begins

struct Barrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  int phase = 0;
};

struct Product {
  float* d;
  uint64_t a, b;
  int add;
  void (*multiply)(const Product&);  // of the width asked for
};

struct Block {
  uint3 index{};
  std::vector<uint8_t> shared;
  std::map<uint32_t, Barrier> barriers;
  std::array<int, 16> arrived{}, generation{};
  std::vector<std::array<uint64_t, 32>> exchanged;
  std::vector<std::pair<int, int>> warps;  // arrived, generation
};

struct Fibre {
  void* stack_pointer = nullptr;
  std::unique_ptr<uint8_t[]> stack;
  bool done = false;
  uint3 thread{};
  Block* block = nullptr;
  std::vector<Product> products;
  std::vector<size_t> groups;  // of products, by their ends
  std::vector<std::shared_ptr<bool>> stores;
  int cluster_generation = 0;
  bool at_cluster = false;  // has arrived in that generation
};

struct Late {
  uint8_t* to;
  std::vector<uint8_t> content;
};

inline std::vector<Late> late;
inline std::vector<Fibre> fibres;
inline std::vector<Block> blocks;
inline std::vector<std::function<void()>> copies;
inline Fibre* me = nullptr;
inline void* scheduler = nullptr;
inline long progress = 0;
inline bool ahead_ended = true;
inline int cluster_arrived = 0, cluster_generation = 0, alive = 0;
inline dim3 grid, block_size;
inline std::function<void()> body;
inline std::mt19937 draw(1);

extern "C" void cpu_switch(void** from, void* to);
asm(R"(
.text
.globl cpu_switch
cpu_switch:
  push %rbx
  push %rbp
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbp
  pop %rbx
  ret
)");

inline void yield() { cpu_switch(&me->stack_pointer, scheduler); }

template <typename Done>
void until(const Done& done) {
  while (!done()) yield();
  ++progress;
}

inline void cluster_advance() {
  if (cluster_arrived == alive && alive) cluster_arrived = 0, ++cluster_generation, ++progress;
}

[[noreturn]] inline void enter() {
  body();
  me->done = true;
  if (me->at_cluster && me->cluster_generation == cluster_generation) --cluster_arrived;
  --alive, ++progress;
  cluster_advance();
  for (;;) yield();
}

inline Block& block_of(uint32_t address) {
  return address >> 24 ? blocks.at((address >> 24) - 1) : *me->block;
}

inline uint8_t* shared_at(Block& block, uint32_t address) {
  const uint32_t offset = address & 0xFFFFFF;
  if (offset < BASE || offset >= BASE + block.shared.size()) {
    std::fprintf(stderr, "shared memory address %u is outside\n", offset);
    std::abort();
  }
  return block.shared.data() + offset - BASE;
}

inline Barrier& barrier_of(Block& block, uint32_t address) {
  Barrier& barrier = block.barriers[address & 0xFFFFFF];
  if (!barrier.expected) {
    std::fprintf(stderr, "a barrier at %u that nobody initialised\n", address & 0xFFFFFF);
    std::abort();
  }
  return barrier;
}

inline void advance(Barrier& barrier) {
  ++progress;
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.expected;
}

inline void arrived(Block& block, uint32_t address) {
  Barrier& barrier = barrier_of(block, address);
  if (--barrier.pending < 0) {
    std::fprintf(stderr, "more arrivals at %u than it counts\n", address & 0xFFFFFF);
    std::abort();
  }
  advance(barrier);
}

inline void moved(Block& block, uint32_t address, long bytes) {
  Barrier& barrier = barrier_of(block, address);
  barrier.bytes -= bytes;
  advance(barrier);
}

inline void run_copies(bool all) {
  std::shuffle(copies.begin(), copies.end(), draw);
  std::vector<std::function<void()>> now;
  const size_t left = all ? 0 : copies.size() / 2;
  while (copies.size() > left) now.push_back(std::move(copies.back())), copies.pop_back();
  for (auto& copy : now) copy(), ++progress;
}

inline void run_cluster() {
  int rounds = 0;
  long before = -1;
  while (alive) {
    for (Fibre& fibre : fibres)
      if (!fibre.done) me = &fibre, cpu_switch(&scheduler, fibre.stack_pointer);
    if (!ahead_ended && ++rounds == 8) {
      for (const Late& one : late) std::memcpy(one.to, one.content.data(), one.content.size());
      ahead_ended = true, ++progress;
    }
    run_copies(false);
    if (progress == before && ahead_ended && copies.empty()) {
      std::fprintf(stderr, "nobody in the cluster of block %u can go on\n", blocks[0].index.x);
      std::abort();
    }
    before = progress;
  }
  run_copies(true);
}

template <typename Run>
void run(dim3 grid_size, dim3 threads, uint32_t cluster, size_t shared_bytes, const Run& kernel) {
  grid = grid_size, block_size = threads, body = kernel;
  const uint32_t count = grid.x * grid.y * grid.z, each = threads.x;
  for (uint32_t first = 0; first < count; first += cluster) {
    blocks.assign(cluster, Block());
    fibres.clear();
    fibres.resize(cluster * each);
    copies.clear();
    alive = cluster * each, cluster_arrived = cluster_generation = 0;
    ahead_ended = late.empty();
    for (const Late& one : late) std::memset(one.to, 0xFF, one.content.size());
    for (uint32_t b = 0; b < cluster; ++b) {
      const uint32_t at = first + b;
      blocks[b].index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
      blocks[b].shared.assign(shared_bytes, 0xFF);
      blocks[b].exchanged.resize(each / 32);
      blocks[b].warps.resize(each / 32);
      for (uint32_t t = 0; t < each; ++t) {
        Fibre& fibre = fibres[b * each + t];
        fibre.thread = {t, 0, 0};
        fibre.block = &blocks[b];
        fibre.stack.reset(new uint8_t[STACK]);
        auto top = (reinterpret_cast<uintptr_t>(fibre.stack.get()) + STACK) & ~uintptr_t(15);
        void** stack = reinterpret_cast<void**>(top) - 8;
        stack[6] = reinterpret_cast<void*>(&enter);
        stack[7] = nullptr;
        fibre.stack_pointer = stack;
      }
    }
    run_cluster();
  }
}

}  // namespace cpu
