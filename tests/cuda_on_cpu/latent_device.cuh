// What kernels/cuda/latent_device.cuh has, for a CPU, after device.cuh. Products read their operands,
// and registers, when they are waited for.

#include <map>
#include <string.h>

struct Group {
  std::vector<std::function<void()>> products;
};

inline std::map<cpu::Fibre*, std::vector<Group>> groups;  // the last one is not committed yet

inline void later(std::function<void()> product) {
  auto& mine = groups[cpu::me];
  if (mine.empty()) mine.emplace_back();
  mine.back().products.push_back(std::move(product));
}

inline uint32_t shared_address(const void* p) { return address(p); }
inline void barrier_expect(uint32_t at, int bytes) { expect(at, bytes); }
inline void barrier_arrive(uint32_t at) { arrive(at); }
inline void barrier_wait(uint32_t at, int parity) { wait(at, parity); }
inline void meet(int id, int threads) { named_meeting(id, threads); }
inline void mma_fence() {}
inline void hold(float (&)[32]) {}
inline void hold(float&) {}

inline void fetch(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  load(to, map, x, y, barrier);
}

inline void mma_commit() { groups[cpu::me].emplace_back(); }

template <int LEFT>
void mma_wait() {
  auto& mine = groups[cpu::me];
  if (mine.empty() || !mine.back().products.empty()) mine.emplace_back();  // never waited for before it is committed
  while (static_cast<int>(mine.size()) - 1 > LEFT) {
    const Group oldest = std::move(mine.front());
    mine.erase(mine.begin());
    for (const auto& product : oldest.products) product();
  }
}

template <bool ADD>
void mma_fp8(float (&d)[32], uint32_t a, uint32_t b) {
  later([&d, a, b] { multiply_now<64, true>({d, a, b, ADD, nullptr}); });
}

// A's rows of a warp lie in the registers of four lanes: words of rows g and g + 8, then those half on.
template <bool NARROW>
void multiply_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b, bool add) {
  constexpr int DEPTH = NARROW ? 32 : 16, EACH = NARROW ? 4 : 2;
  const int lane = threadIdx.x % 32;
  float rows[2][DEPTH];
  for (int from = 0; from < 4; ++from)
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = __shfl_sync(~0u, a[i], lane / 4 * 4 + from);
      for (int e = 0; e < EACH; ++e) {
        __half_raw half{};
        if (NARROW) half = __nv_cvt_fp8_to_halfraw(word >> 8 * e & 0xFF, __NV_E4M3);
        const float value = NARROW ? __half2float(*reinterpret_cast<__half*>(&half))
                                   : __int_as_float((word >> 16 * e & 0xFFFF) << 16);
        rows[i % 2][i / 2 * (DEPTH / 2) + from * EACH + e] = value;
      }
    }
  for (int j = 0; j < 8; ++j)
    for (int e = 0; e < 2; ++e) {
      float sums[2] = {add ? d[4 * j + e] : 0, add ? d[4 * j + 2 + e] : 0};
      for (int k = 0; k < DEPTH; ++k) {
        const float y = operand(b, 8 * j + lane % 4 * 2 + e, k, NARROW);
        sums[0] += rows[0][k] * y, sums[1] += rows[1][k] * y;
      }
      d[4 * j + e] = sums[0], d[4 * j + 2 + e] = sums[1];
    }
}

template <bool ADD>
void mma_bf16_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
  later([&d, &a, b] { multiply_registers<false>(d, a, b, ADD); });
}

inline void mma_fp8_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
  later([&d, &a, b] { multiply_registers<true>(d, a, b, true); });
}

inline uint32_t pack_fp8(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3)) << 16;
}

inline uint32_t pack_fp8(__half2 a, __half2 b) {
  return pack_fp8(__low2float(a), __high2float(a), __low2float(b), __high2float(b));
}

inline float exp2_fast(float x) { return exp2f(x); }

inline uint32_t matrix_word(uint32_t row, int byte) {
  uint32_t word;
  memcpy(&word, cpu::shared_at(*cpu::me->block, row) + byte, 4);
  return word;
}

inline void load_matrices(uint32_t (&x)[4], uint32_t at) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) x[i] = matrix_word(shuffled(at, 8 * i + lane / 4), lane % 4 * 4);
}

inline void load_transposed(uint32_t (&x)[4], uint32_t at) {
  const int lane = threadIdx.x % 32, column = lane / 4;
  for (int i = 0; i < 4; ++i) {
    x[i] = 0;
    for (int e = 0; e < 2; ++e) {
      const uint32_t word = matrix_word(shuffled(at, 8 * i + lane % 4 * 2 + e), column / 2 * 4);
      x[i] |= (word >> column % 2 * 16 & 0xFFFF) << 16 * e;
    }
  }
}

inline void store_word(uint32_t at, uint32_t word) { memcpy(cpu::shared_at(*cpu::me->block, at), &word, 4); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return word;
}

inline bool __any_sync(unsigned, bool mine) {
  return reduced(static_cast<int>(mine), [](int a, int b) { return a | b; });
}

inline float __uint_as_float(unsigned bits) { return __int_as_float(bits); }
inline unsigned __float_as_uint(float value) { return __float_as_int(value); }
