// What both kernels over 656-byte latents share: PTX of Hopper's barriers, copies and products, the
// arguments, the queries, the maps of the pool.

#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int PAGE = 64, PAIRS = 64, TILES = 4, RANK = 512, ROPE = 64, BYTES = 656;
constexpr int TILE = 64 * 128;  // bytes of 64 rows of 128
constexpr int V_STAGE = TILES * TILE;
constexpr float ROOM = 64.0f;  // P up to 4, scales up to 1.75 of the reference: 448 at most

struct Arguments {
    const __nv_bfloat16* query;
    __nv_bfloat16* out;
    float* partial;
    float* sums;
    const int* page_table;
    const int* lengths;
    long page_rows;
    int table_stride, rows, heads, split, splits, number;
    float scale_log2;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t at, int parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\nbra again;\ndone:\n}" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool meet_any(int id, int threads, bool mine) {
    int any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\n"
        "barrier.cta.red.or.pred q, %1, %2, p;\nselp.s32 %0, 1, 0, q;\n}"
        : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<int>(mine)) : "memory");
    return any != 0;
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void hold(float (&r)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
// Rows of 128 bytes, swizzled in 16-byte pieces over eight rows: the lower half of a matrix descriptor. 32
// bytes on along the rows are two more. The upper half is DESCRIPTOR_HIGH, eight rows being 1024 bytes.
__device__ __forceinline__ uint32_t descriptor(uint32_t at) { return ((at & 0x3ffff) >> 4) | (1u << 16); }
#define DESCRIPTOR_HIGH "0x40000040"

#define ACC32(d)                                                                                            \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),        \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),            \
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),          \
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),          \
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define REGS32                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "      \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

template <bool ADD>
__device__ __forceinline__ void mma_fp8(float (&d)[32], uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .b64 a, b;\nmov.b64 a, {%32, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%33, " DESCRIPTOR_HIGH
                 "};\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGS32 ", a, b, %34, 1, 1;\n}"
                 : ACC32(d) : "r"(a), "r"(b), "n"(ADD));
}
template <bool ADD>
__device__ __forceinline__ void mma_bf16(float (&d)[32], uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .b64 a, b;\nmov.b64 a, {%32, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%33, " DESCRIPTOR_HIGH
                 "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGS32 ", a, b, %34, 1, 1, 0, 0;\n}"
                 : ACC32(d) : "r"(a), "r"(b), "n"(ADD));
}
__device__ __forceinline__ void mma_fp8_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%36, " DESCRIPTOR_HIGH
                 "};\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGS32
                 ", {%32, %33, %34, %35}, b, 1, 1, 1;\n}"
                 : ACC32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
__device__ __forceinline__ uint32_t pack_fp8(__half2 a, __half2 b) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\nmov.b32 %0, {low, high};\n}"
        : "=r"(word) : "r"(*reinterpret_cast<uint32_t*>(&a)), "r"(*reinterpret_cast<uint32_t*>(&b)));
    return word;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// V^T of 16 values and 32 tokens as an A operand: tokens are the rows of a swizzled tile.
__device__ __forceinline__ void load_values(uint32_t (&a)[4], uint32_t at) {
    uint32_t x[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
    a[0] = __byte_perm(x[0], x[1], 0x6420);
    a[1] = __byte_perm(x[0], x[1], 0x7531);
    a[2] = __byte_perm(x[2], x[3], 0x6420);
    a[3] = __byte_perm(x[2], x[3], 0x7531);
}

// A tile's queries to FP8 with one power of two a row: thread t does a quarter of row t / 4.
__device__ __forceinline__ void load_query(const Arguments& a, char* to_query, float* row_scale, int tid, long first,
                                           int count) {
    const int row = tid / 4, part = tid % 4;
    uint4 raw[16], rope[2];
    float most = 0.0f;
    const bool inside = row < count;
    const uint4* from = reinterpret_cast<const uint4*>(a.query + (first + row) * (RANK + ROPE));
#pragma unroll
    for (int i = 0; i < 16; ++i) raw[i] = inside ? from[part * 16 + i] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) rope[i] = inside ? from[64 + part * 2 + i] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const __nv_bfloat162* v = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 f = __bfloat1622float2(v[j]);
            most = fmaxf(most, fmaxf(fabsf(f.x), fabsf(f.y)));
        }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    int exponent = 0;
    frexpf(fmaxf(most, 1e-10f) * (1.0f / 448.0f), &exponent);  // most <= 448 * 2^exponent
    const float back = exp2f(static_cast<float>(-exponent));
    if (part == 0) row_scale[row] = exp2f(static_cast<float>(exponent)) * a.scale_log2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4& half = raw[2 * i + j / 2];
            const uint32_t* w = reinterpret_cast<const uint32_t*>(&half) + 2 * (j % 2);
            const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(w));
            const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(w + 1));
            word[j] = pack_fp8(x.x * back, x.y * back, y.x * back, y.y * back);
        }
        char* to = to_query + part * TILE + row * 128 + ((i ^ (row & 7)) << 4);
        *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        __nv_bfloat162* v = reinterpret_cast<__nv_bfloat162*>(&rope[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 f = __bfloat1622float2(v[j]);
            v[j] = __floats2bfloat162_rn(f.x * back, f.y * back);
        }
        const int piece = part * 2 + i;
        *reinterpret_cast<uint4*>(to_query + TILES * TILE + row * 128 + ((piece ^ (row & 7)) << 4)) = rope[i];
    }
}

// Where a token of a page stands among the summed index of P and V.
__device__ __forceinline__ int position(int token) {
    const int t = token % 16;
    return token - t + 4 * (t % 8 / 2) + 2 * (t / 8) + t % 2;
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

bool make_map(CUtensorMap* map, Encode encode, void* pages, uint64_t rows, uint32_t width, CUtensorMapSwizzle swizzle) {
    const cuuint64_t size[2] = {BYTES, rows}, stride[1] = {BYTES};
    const cuuint32_t box[2] = {width, PAGE}, step[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, pages, size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace
