// Attention over paged FP8 latents in absorbed form, all products on Hopper's FP8 tensor cores.
//
// A block takes 64 (row, head) pairs of one sequence and walks a split of its tokens, 128 a step: two
// consumer warpgroups, and a third whose warps fetch pages with the bulk copy engine and prepare scales.
//   scores   S[pair, token] = sum over groups g of scale[token, g] * (q_g . k_g), plus the rotated part
//            in bfloat16. Warpgroup w does the page w of the step.
//   weights  P_g = P * scale[token, g] / reference[g] in FP8, one matrix for each group of 128 values, in
//            shared memory as B operands. So the scales of the values cost nothing in the product. The
//            reference is about the largest scale so far.
//   output   O^T[value, pair] += V^T P_g^T. wgmma takes FP8 operands with the summed index contiguous
//            only, and the latents have it not; so V^T is the A operand in registers. A transposed
//            ldmatrix gives a thread two values of two tokens in a register, two byte permutations put
//            four tokens of one value together. The order of the tokens that comes out is arbitrary
//            within 16 (`position`), and it is the order in which a thread holds its scores: P needs no
//            shuffle.
//            Warpgroup w holds the values 256 w to 256 w + 255.
// Softmax on the run (arXiv:1805.02867); the maximum is raised only when a score exceeds it by more than
// a factor of four.

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int PAGE = 64, PAIRS = 64, TILES = 4, RANK = 512, ROPE = 64, BYTES = 656;
constexpr int STAGES = 4;
constexpr int TILE = 64 * 128;  // bytes of 64 rows of 128
constexpr int V_STAGE = TILES * TILE;
constexpr float ROOM = 64.0f;  // P up to 4, scales up to 1.75 of the reference: 448 at most

// Places in shared memory, G scales a token being used.
template <int G>
struct Layout {
    static constexpr int ROPES = G == 1 ? 4 : 2;
    static constexpr int V = 0;
    static constexpr int R = V + STAGES * V_STAGE;
    static constexpr int Q = R + ROPES * TILE;
    static constexpr int P = Q + (TILES + 1) * TILE;
    static constexpr int SCALES = P + G * TILE;                // as fetched; then [group][position] float
    static constexpr int NORMED = SCALES + STAGES * PAGE * 16;  // [group][position] half, over the reference
    static constexpr int SMALL = NORMED + STAGES * PAGE * 8;
    // Row maxima, alpha, row scale; for two steps the references and by how much they shrank the old sums.
    static constexpr int BARRIERS = SMALL + (4 * PAIRS + 2 * 2 * 4) * 4;
    static constexpr int BYTES_IN_ALL = BARRIERS + (3 * STAGES + 2 * ROPES) * 8;
};
static_assert(Layout<1>::BYTES_IN_ALL <= 232448 && Layout<4>::BYTES_IN_ALL <= 232448);

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

// One warp, a step's pages p0 and p0 + 1: their scales by position, references, zeros where no token is.
template <int G>
__device__ __forceinline__ void prepare(char* shared, uint32_t full, uint32_t ready, int p0, int pages, int begin,
                                        int length, int lane, float (&reference)[G]) {
    using At = Layout<G>;
    float most[G];
#pragma unroll
    for (int g = 0; g < G; ++g) most[g] = 0.0f;
    const int count = min(2, pages - p0);
    for (int i = 0; i < count; ++i) {
        const int p = p0 + i, stage = p % STAGES, left = length - begin - p * PAGE;
        const float* scales = reinterpret_cast<const float*>(shared + At::SCALES) + stage * PAGE * 4;
        barrier_wait(full + 8 * stage, (p / STAGES) & 1);
        if (left < PAGE) {
            for (int token = left + lane; token < PAGE; token += 32)
                reinterpret_cast<uint4*>(shared + At::SCALES)[stage * PAGE + token] = make_uint4(0, 0, 0, 0);
            for (int token = left; token < PAGE; ++token)
                *reinterpret_cast<uint4*>(shared + At::V + stage * V_STAGE + (lane / 8) * TILE + token * 128 +
                                          lane % 8 * 16) = make_uint4(0, 0, 0, 0);
            __syncwarp();
        }
#pragma unroll
        for (int g = 0; g < G; ++g)
            most[g] = fmaxf(most[g], fmaxf(scales[4 * lane + g], scales[4 * (lane + 32) + g]));
    }
    float* step = reinterpret_cast<float*>(shared + At::SMALL) + 4 * PAIRS + p0 / 2 % 2 * 8;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float top = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(most[g])));
        float shrink = 1.0f;
        if (top > 1.75f * reference[g]) {
            shrink = reference[g] / top;
            reference[g] = top;
        }
        if (lane == 0) {
#pragma unroll
            for (int i = g; i < (G == 1 ? 4 : g + 1); ++i) {
                step[i] = reference[g];
                step[4 + i] = shrink;
            }
        }
        most[g] = reference[g] > 0.0f ? ROOM / reference[g] : 0.0f;
    }
    for (int i = 0; i < count; ++i) {
        const int stage = (p0 + i) % STAGES;
        float* scales = reinterpret_cast<float*>(shared + At::SCALES) + stage * PAGE * 4;
        __half* normed = reinterpret_cast<__half*>(shared + At::NORMED) + stage * PAGE * 4;
        float x[2][G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            x[0][g] = scales[4 * lane + g];
            x[1][g] = scales[4 * (lane + 32) + g];
        }
        __syncwarp();
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = g * PAGE + position(lane) + 32 * h;
                scales[at] = x[h][g];
                normed[at] = __float2half(x[h][g] * most[g]);
            }
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(ready + 8 * (p0 % STAGES));
        if (count > 1) barrier_arrive(ready + 8 * ((p0 + 1) % STAGES));
    }
}

template <int G>
__global__ void __launch_bounds__(384, 1)
decode(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap scales, const Arguments a) {
    using At = Layout<G>;
    extern __shared__ __align__(1024) char shared[];
    const int tid = threadIdx.x, group = tid / 128, lane = tid % 32, warp = tid % 128 / 32;
    const int sequence = blockIdx.y, piece = blockIdx.z;
    const int length = a.lengths[sequence];
    const int begin = piece * a.split;
    if (a.splits > 1 && piece > 0 && begin >= length) return;
    const int end = min(begin + a.split, length);
    const int pages = max(0, (end - begin + PAGE - 1) / PAGE);
    const int pairs = a.rows * a.heads;
    const int tile = blockIdx.x * PAIRS;
    const uint32_t base = shared_address(shared);
    const uint32_t full = base + At::BARRIERS, empty = full + 8 * STAGES;
    const uint32_t ready = empty + 8 * STAGES, rope_full = ready + 8 * STAGES, rope_empty = rope_full + 8 * At::ROPES;
    if (tid == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
            barrier_init(ready + 8 * i, 1);
        }
        for (int i = 0; i < At::ROPES; ++i) {
            barrier_init(rope_full + 8 * i, 1);
            barrier_init(rope_empty + 8 * i, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int* table = a.page_table + static_cast<long>(sequence) * a.table_stride + begin / PAGE;
        if (warp == 0 && lane == 0) {
            for (int p = 0; p < pages; ++p) {
                const int stage = p % STAGES;
                if (p >= STAGES) barrier_wait(empty + 8 * stage, (p / STAGES - 1) & 1);
                const int row = static_cast<int>(table[p] * a.page_rows);
                const uint32_t done = full + 8 * stage;
                barrier_expect(done, V_STAGE + PAGE * 16);
                fetch(base + At::SCALES + stage * PAGE * 16, &scales, RANK, row, done);
                for (int g = 0; g < TILES; ++g)
                    fetch(base + At::V + stage * V_STAGE + g * TILE, &values, g * 128, row, done);
            }
        } else if (warp == 1 && lane == 0) {
            for (int p = 0; p < pages; ++p) {
                const int slot = p % At::ROPES;
                if (p >= At::ROPES) barrier_wait(rope_empty + 8 * slot, (p / At::ROPES - 1) & 1);
                const int row = static_cast<int>(table[p] * a.page_rows);
                barrier_expect(rope_full + 8 * slot, TILE);
                fetch(base + At::R + slot * TILE, &values, RANK + 16, row, rope_full + 8 * slot);
            }
        } else if (warp == 2) {
            float reference[G];
#pragma unroll
            for (int g = 0; g < G; ++g) reference[g] = 0.0f;
            for (int p0 = 0; p0 < pages; p0 += 2)
                prepare<G>(shared, full, ready, p0, pages, begin, length, lane, reference);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

    float* row_max = reinterpret_cast<float*>(shared + At::SMALL);
    float* row_alpha = row_max + 2 * PAIRS;
    float* row_scale = row_alpha + PAIRS;
    const float* step_scales = row_scale + PAIRS;
    const int q4 = lane % 4, r0 = 16 * warp + lane / 4;
    const long first = static_cast<long>(sequence) * pairs + tile;
    load_query(a, shared + At::Q, row_scale, tid, first, pairs - tile);
    proxy_fence();
    meet(1, 256);

    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    float acc[4][32];
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 32; ++i) acc[b][i] = 0.0f;

    // Products of page p with the queries, not waited for: rotated part to s, the others to t.
    float s[32], t[32];
    const auto rotated = [&](int p) {
        const int slot = p % At::ROPES;
        const uint32_t qd = descriptor(base + At::Q + TILES * TILE), kd = descriptor(base + At::R + slot * TILE);
        mma_fence();
        mma_bf16<false>(s, qd, kd);
#pragma unroll
        for (int k = 1; k < 4; ++k) mma_bf16<true>(s, qd + 2 * k, kd + 2 * k);
    };
    const auto latent = [&](int p, int first_tile, int tiles) {
        const uint32_t qd = descriptor(base + At::Q + first_tile * TILE);
        const uint32_t kd = descriptor(base + At::V + p % STAGES * V_STAGE + first_tile * TILE);
        mma_fp8<false>(t, qd, kd);
#pragma unroll
        for (int k = 1; k < 4 * tiles; ++k) {
            const int on = k / 4 * (TILE / 16) + 2 * (k % 4);
            mma_fp8<true>(t, qd + on, kd + on);
        }
        mma_commit();
    };
    // What is not there is multiplied too, so that no product is conditional; nothing is made of it.
    const auto all_products = [&](int p) {
        if (p < pages) {
            barrier_wait(rope_full + 8 * (p % At::ROPES), (p / At::ROPES) & 1);
            barrier_wait(full + 8 * (p % STAGES), (p / STAGES) & 1);
        }
        rotated(p);
        latent(p, 0, TILES);
    };
    if constexpr (G == 1) all_products(group);

    for (int p0 = 0; p0 < pages; p0 += 2) {
        const int p = p0 + group;
        const bool mine = p < pages;
        const int stage = p % STAGES;
        const int first_token = begin + p * PAGE;
        const bool whole = first_token + PAGE <= end - (a.rows - 1);
        float high[2] = {-INFINITY, -INFINITY};
        const float factor[2] = {row_scale[r0], row_scale[r0 + 8]};
        const float4* scales_at = reinterpret_cast<const float4*>(shared + At::SCALES) + stage * PAGE + q4;
        if constexpr (G == 1) {
            mma_wait<0>();
            hold(s);
            hold(t);
        }
        if (mine) {
            barrier_wait(ready + 8 * stage, (p / STAGES) & 1);
            if constexpr (G == 1) {
                if (lane == 0) barrier_arrive(rope_empty + 8 * (p % At::ROPES));
            } else {
                barrier_wait(rope_full + 8 * (p % At::ROPES), (p / At::ROPES) & 1);
                rotated(p);
                mma_commit();
            }
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if constexpr (G > 1) {
                    mma_fence();
                    latent(p, g, 1);
                    mma_wait<0>();
                    if (g == 0) {
                        hold(s);
                        if (lane == 0) barrier_arrive(rope_empty + 8 * (p % At::ROPES));
                    }
                    hold(t);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 x = scales_at[g * 16 + 4 * j];
                    const float scale[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int e = 0; e < 8; ++e) s[8 * j + e] += scale[e / 4 * 2 + e % 2] * t[8 * j + e];
                }
            }
            if (!whole) {
                int limit[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    limit[i] = min(end, length - (a.rows - 1 - min(tile + r0 + 8 * i, pairs - 1) / a.heads));
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    if (first_token + 8 * (i / 4) + 2 * q4 + i % 2 >= limit[i % 4 / 2]) s[i] = -INFINITY;
            }
#pragma unroll
            for (int i = 0; i < 32; ++i) high[i % 4 / 2] = fmaxf(high[i % 4 / 2], s[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 1));
            high[i] = factor[i] * fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 2));
            if (q4 == 0) row_max[group * PAIRS + r0 + 8 * i] = high[i];
        }
        meet(1, 256);

        barrier_wait(ready + 8 * (p0 % STAGES), (p0 / STAGES) & 1);
        const float* step = step_scales + p0 / 2 % 2 * 8 + 2 * group;
        const float2 shrunk = *reinterpret_cast<const float2*>(step + 4);
        bool changed = shrunk.x != 1.0f || shrunk.y != 1.0f;
        float from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float most = fmaxf(high[i], row_max[(1 - group) * PAIRS + r0 + 8 * i]);
            float alpha = 1.0f;
            if (most > peak[i] + 2.0f) {
                alpha = exp2_fast(peak[i] - most);
                peak[i] = most;
                total[i] *= alpha;
                changed = true;
            }
            if (group == 0 && q4 == 0) row_alpha[r0 + 8 * i] = alpha;
            from[i] = peak[i] == -INFINITY ? 0.0f : peak[i];
        }
        if (mine) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                s[i] = exp2_fast(fmaf(s[i], factor[i % 4 / 2], -from[i % 4 / 2]));
                total[i % 4 / 2] += s[i];
            }
            const uint2* at = reinterpret_cast<const uint2*>(shared + At::NORMED) + stage * PAGE + q4;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                __half2 x[2][2];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i % 2][i / 2] = __floats2half2_rn(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
#pragma unroll
                for (int g = 0; g < G; ++g) {
                    const uint2 w = at[g * 16 + 4 * j];
                    const __half2 w0 = *reinterpret_cast<const __half2*>(&w.x);
                    const __half2 w1 = *reinterpret_cast<const __half2*>(&w.y);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = r0 + 8 * i;
                        char* to = shared + At::P + g * TILE + row * 128 + (((4 * group + j) ^ (row & 7)) << 4);
                        *reinterpret_cast<uint32_t*>(to + 4 * q4) =
                            pack_fp8(__hmul2(x[i][0], w0), __hmul2(x[i][1], w1));
                    }
                }
            }
        }
        proxy_fence();
        const bool any = meet_any(4, 256, changed);

        if (any) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 alpha = *reinterpret_cast<const float2*>(row_alpha + 8 * j + 2 * q4);
#pragma unroll
                for (int b = 0; b < 4; ++b)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        acc[b][4 * j + e] *= (b < 2 ? shrunk.x : shrunk.y) * (e % 2 ? alpha.y : alpha.x);
            }
        }
        const int steps = p0 + 1 < pages ? 4 : 2;
        uint32_t v[2][4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k < steps) {
                const int page = p0 + k / 2, from_stage = page % STAGES;
                if (k == 2) barrier_wait(ready + 8 * from_stage, (page / STAGES) & 1);
                if (k >= 2) mma_wait<1>();
                const int token = 32 * (k % 2) + lane;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const int g = 2 * group + b / 2, chunk = 4 * (b % 2) + warp;
                    load_values(v[k % 2][b], base + At::V + from_stage * V_STAGE + g * TILE + token * 128 +
                                                 ((chunk ^ (lane & 7)) << 4));
                }
                mma_fence();
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    mma_fp8_registers(acc[b], v[k % 2][b],
                                      descriptor(base + At::P + (G == 1 ? 0 : 2 * group + b / 2) * TILE) + 2 * k);
                mma_commit();
            }
        }
        if constexpr (G == 1) {
            mma_wait<1>();
            all_products(p + 2);
            mma_wait<1>();
        } else {
            mma_wait<0>();
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) hold(acc[b]);
        if (lane == 0) {
            barrier_arrive(empty + 8 * (p0 % STAGES));
            if (steps == 4) barrier_arrive(empty + 8 * ((p0 + 1) % STAGES));
        }
    }

    if constexpr (G == 1) mma_wait<0>();
    float2 reference = make_float2(0.0f, 0.0f);  // of this warpgroup's values
    if (pages > 0) reference = *reinterpret_cast<const float2*>(step_scales + (pages - 1) / 2 % 2 * 8 + 2 * group);

    // Sums of both warpgroups, then what a pair's accumulators are multiplied by.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 2);
        if (q4 == 0) row_max[group * PAIRS + r0 + 8 * i] = total[i];
    }
    meet(1, 256);
    const int left = pairs - tile;
    if (group == 0 && q4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = r0 + 8 * i;
            const float sum = row_max[r] + row_max[PAIRS + r];
            row_alpha[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (a.splits > 1 && r < left)
                a.sums[static_cast<long>(piece) * a.number + first + r] = sum > 0.0f ? log2f(sum) + peak[i] : -INFINITY;
        }
    }
    meet(1, 256);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int r = 8 * j + 2 * q4 + e;
            if (r >= left) continue;
            const float inverse = row_alpha[r] * (1.0f / ROOM);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int d = 256 * group + 64 * b + 16 * warp + 2 * (lane / 4);
                const float scale = inverse * (b < 2 ? reference.x : reference.y);
                const float x = acc[b][4 * j + e] * scale, y = acc[b][4 * j + 2 + e] * scale;
                if (a.splits > 1)
                    *reinterpret_cast<float2*>(a.partial + (static_cast<long>(piece) * a.number + first + r) * RANK + d) =
                        make_float2(x, y);
                else
                    *reinterpret_cast<__nv_bfloat162*>(a.out + (first + r) * RANK + d) = __floats2bfloat162_rn(x, y);
            }
        }
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

// 0, or a CUDA error. `rows_total` 656-byte rows from `pages` on; page i begins at row i * page_rows.
extern "C" int pdmesh_mla_decode_fp8(const void* query, void* out, void* partial, void* sums, void* pages,
                                     long rows_total, long page_rows, const int* page_table, int table_stride,
                                     const int* lengths, int sequences, int rows, int heads, int split, int splits,
                                     float scale_log2, int shared_scale, void* stream) {
    static Encode encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        if (error != cudaSuccess) return error;
        if (found == nullptr) return cudaErrorNotSupported;
        const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
        cudaError_t set = cudaFuncSetAttribute(decode<1>, most, Layout<1>::BYTES_IN_ALL);
        if (set == cudaSuccess) set = cudaFuncSetAttribute(decode<4>, most, Layout<4>::BYTES_IN_ALL);
        if (set != cudaSuccess) return set;
        encode = reinterpret_cast<Encode>(found);
    }
    CUtensorMap values, scales;
    if (!make_map(&values, encode, pages, rows_total, 128, CU_TENSOR_MAP_SWIZZLE_128B) ||
        !make_map(&scales, encode, pages, rows_total, 16, CU_TENSOR_MAP_SWIZZLE_NONE))
        return cudaErrorInvalidValue;
    Arguments a{};
    a.query = static_cast<const __nv_bfloat16*>(query);
    a.out = static_cast<__nv_bfloat16*>(out);
    a.partial = static_cast<float*>(partial);
    a.sums = static_cast<float*>(sums);
    a.page_table = page_table;
    a.lengths = lengths;
    a.page_rows = page_rows;
    a.table_stride = table_stride;
    a.rows = rows;
    a.heads = heads;
    a.split = split;
    a.splits = splits;
    a.number = sequences * rows * heads;
    a.scale_log2 = scale_log2;
    const dim3 grid((rows * heads + PAIRS - 1) / PAIRS, sequences, splits);
    const auto on = static_cast<cudaStream_t>(stream);
    if (shared_scale)
        decode<1><<<grid, 384, Layout<1>::BYTES_IN_ALL, on>>>(values, scales, a);
    else
        decode<4><<<grid, 384, Layout<4>::BYTES_IN_ALL, on>>>(values, scales, a);
    return cudaGetLastError();
}
