// Of attention over 656-byte latents: sizes, the arguments, the queries, the maps of the pool.

#pragma once

#include "latent_device.cuh"

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

// Rows of 128 bytes, swizzled in 16-byte pieces over eight rows: the lower half of a matrix descriptor. 32
// bytes on along the rows are two more. The upper half says that eight rows
// are 1024 bytes.
__device__ __forceinline__ uint32_t descriptor(uint32_t at) { return ((at & 0x3ffff) >> 4) | (1u << 16); }
// V^T of 16 values and 32 tokens as an A operand: tokens are the rows of a swizzled tile.
__device__ __forceinline__ void load_values(uint32_t (&a)[4], uint32_t at) {
    uint32_t x[4];
    load_transposed(x, at);
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
