// Attention over paged FP8 latents in absorbed form, one scale a token: all products on Hopper's FP8 tensor
// cores, scores and outputs by different warpgroups.
//
// A block takes 64 (row, head) pairs of one sequence and walks a split of its tokens, a page at a time:
//   warpgroup 0  fetches pages with the bulk copy engine and prepares scales;
//   warpgroup 1  scores S[pair, token] = scale[token] * (q . k) + the rotated part in bfloat16, and weights
//                P * scale[token] / reference in FP8, into shared memory. The products of the next page run
//                while this page's weights are made;
//   2 and 3      output O^T[value, pair] += V^T P^T for 256 values each.
// P lies in shared memory as a B operand, so that scales of the values cost nothing in the product; the
// reference is about the largest scale so far. wgmma takes FP8 operands with the summed index contiguous
// only, and the latents have it not; so V^T is the A operand in registers. A transposed ldmatrix gives a
// thread two values of two tokens in a register, two byte permutations put four tokens of one value
// together. The order of the tokens that comes out is arbitrary within 16 (`position`), and it is the
// order in which a thread holds its scores: P needs no shuffle.
// Softmax on the run (arXiv:1805.02867); the maximum is raised only when a score exceeds it by more than a
// factor of four.

#pragma once

#include "hopper.cuh"

namespace {
namespace one {

constexpr int STAGES = 5;
constexpr int AT_V = 0;
constexpr int AT_R = AT_V + STAGES * V_STAGE;
constexpr int AT_Q = AT_R + 2 * TILE;
constexpr int AT_P = AT_Q + TILES * TILE;           // two pages side by side; at first the rotated queries
constexpr int AT_SCALES = AT_P + TILE;              // as fetched; then [position] float
constexpr int AT_NORMED = AT_SCALES + STAGES * PAGE * 16;  // [position] half, over the reference
constexpr int AT_ALPHA = AT_NORMED + STAGES * PAGE * 2;    // two pages
constexpr int AT_ROW_SCALE = AT_ALPHA + 2 * PAIRS * 4;
constexpr int AT_STEP = AT_ROW_SCALE + PAIRS * 4;   // for each stage the reference and by how much it shrank sums
constexpr int AT_CHANGED = AT_STEP + STAGES * 8;    // two pages, four warps
constexpr int AT_BARRIERS = AT_CHANGED + 40;
constexpr int BYTES_IN_ALL = AT_BARRIERS + (3 * STAGES + 8) * 8;
static_assert(BYTES_IN_ALL <= 232448 && AT_BARRIERS % 8 == 0 && AT_CHANGED % 8 == 0);

template <int N>
struct Ring {
    int at = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++at == N) {
            at = 0;
            phase ^= 1;
        }
    }
};

struct Barriers {
    uint32_t full, empty, ready, rope_full, rope_empty, weights, taken;
    __device__ explicit Barriers(uint32_t at)
        : full(at), empty(at + 8 * STAGES), ready(at + 16 * STAGES), rope_full(at + 24 * STAGES),
          rope_empty(rope_full + 16), weights(rope_full + 32), taken(rope_full + 48) {}
};

// One warp: every page's scales by position, their reference, zeros where no token is. A page is ready when all of
// it has come and this is done: waiting for one barrier that has been passed costs the scores 40 to 60 cycles.
__device__ __forceinline__ void prepare(char* shared, const Barriers& bar, int pages, int left, int lane) {
    Ring<STAGES> ring;
    float reference = 0.0f;
    for (int p = 0; p < pages; ++p, left -= PAGE, ring.next()) {
        float* scales = reinterpret_cast<float*>(shared + AT_SCALES) + ring.at * PAGE * 4;
        __half* normed = reinterpret_cast<__half*>(shared + AT_NORMED) + ring.at * PAGE;
        barrier_wait(bar.full + 8 * ring.at, ring.phase);
        barrier_wait(bar.rope_full + 8 * (p % 2), p / 2 & 1);
        if (left < PAGE)
            for (int token = left; token < PAGE; ++token)
                *reinterpret_cast<uint4*>(shared + AT_V + ring.at * V_STAGE + (lane / 8) * TILE + token * 128 +
                                          lane % 8 * 16) = make_uint4(0, 0, 0, 0);
        const float x = lane < left ? scales[4 * lane] : 0.0f;
        const float y = lane + 32 < left ? scales[4 * (lane + 32)] : 0.0f;
        const float top = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(fmaxf(x, y))));
        float shrink = 1.0f;
        if (top > 1.75f * reference) {
            shrink = reference / top;
            reference = top;
        }
        const float into = reference > 0.0f ? ROOM / reference : 0.0f;
        __syncwarp();
        const int at = position(lane);
        scales[at] = x;
        scales[at + 32] = y;
        normed[at] = __float2half(x * into);
        normed[at + 32] = __float2half(y * into);
        if (lane == 0) reinterpret_cast<float2*>(shared + AT_STEP)[ring.at] = make_float2(reference, shrink);
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.ready + 8 * ring.at);
    }
}

__device__ __forceinline__ void produce(const CUtensorMap& values, const CUtensorMap& scales, const Arguments& a,
                                        uint32_t base, const Barriers& bar, const int* table, int pages, int warp) {
    if (warp == 0) {
        Ring<STAGES> ring;
        for (int p = 0; p < pages; ++p, ring.next()) {
            if (p >= STAGES) barrier_wait(bar.empty + 8 * ring.at, ring.phase ^ 1);
            const int row = static_cast<int>(table[p] * a.page_rows);
            const uint32_t done = bar.full + 8 * ring.at;
            barrier_expect(done, V_STAGE + PAGE * 16);
            fetch(base + AT_SCALES + ring.at * PAGE * 16, &scales, RANK, row, done);
            for (int g = 0; g < TILES; ++g)
                fetch(base + AT_V + ring.at * V_STAGE + g * TILE, &values, g * 128, row, done);
        }
    } else {
        Ring<2> ring;
        for (int p = 0; p < pages; ++p, ring.next()) {
            if (p >= 2) barrier_wait(bar.rope_empty + 8 * ring.at, ring.phase ^ 1);
            const int row = static_cast<int>(table[p] * a.page_rows);
            barrier_expect(bar.rope_full + 8 * ring.at, TILE);
            fetch(base + AT_R + ring.at * TILE, &values, RANK + 16, row, bar.rope_full + 8 * ring.at);
        }
    }
}

#include "score.cuh"

// A warpgroup of the outputs, values 256 * part on.
__device__ __forceinline__ void add_values(char* shared, uint32_t base, const Barriers& bar, const Arguments& a,
                                           int pages, int left, long first, int part, int warp, int lane) {
    const int q4 = lane % 4;
    float acc[4][32];
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 32; ++i) acc[b][i] = 0.0f;
    Ring<STAGES> ring;
    const float2* step = reinterpret_cast<const float2*>(shared + AT_STEP);
    float reference = 0.0f;
    for (int p = 0; p < pages; ++p, ring.next()) {
        const int half = p % 2;
        barrier_wait(bar.ready + 8 * ring.at, ring.phase);
        barrier_wait(bar.weights + 8 * half, p / 2 & 1);
        const float shrink = step[ring.at].y;
        reference = step[ring.at].x;
        const int2* changed = reinterpret_cast<const int2*>(shared + AT_CHANGED) + 2 * half;
        const int2 some = changed[0], others = changed[1];
        if (shrink != 1.0f || (some.x | some.y | others.x | others.y)) {
            const float* factors = reinterpret_cast<const float*>(shared + AT_ALPHA) + half * PAIRS + 2 * q4;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 alpha = *reinterpret_cast<const float2*>(factors + 8 * j);
                const float even = alpha.x * shrink, odd = alpha.y * shrink;
#pragma unroll
                for (int b = 0; b < 4; ++b)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[b][4 * j + e] *= e % 2 ? odd : even;
            }
        }
        const uint32_t pd = descriptor(base + AT_P) + 4 * half;
        const uint32_t at = base + AT_V + ring.at * V_STAGE + 2 * part * TILE + lane * 128;
        uint32_t v[2][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 32 tokens and two blocks of 64 values, a tile of V
            if (i >= 2) mma_wait<1>();
            const int k = i / 2, c = i % 2;
#pragma unroll
            for (int b = 0; b < 2; ++b)
                load_values(v[c][b], at + c * TILE + k * 32 * 128 + (((4 * b + warp) ^ (lane & 7)) << 4));
            mma_fence();
#pragma unroll
            for (int b = 0; b < 2; ++b) mma_fp8_registers(acc[2 * c + b], v[c][b], pd + 2 * k);
            mma_commit();
        }
        mma_wait<0>();
#pragma unroll
        for (int b = 0; b < 4; ++b) hold(acc[b]);
        if (lane == 0) {
            barrier_arrive(bar.taken + 8 * half);
            barrier_arrive(bar.empty + 8 * ring.at);
        }
    }
    meet(2, 384);
    const float* inverses = reinterpret_cast<const float*>(shared + AT_ALPHA);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int r = 8 * j + 2 * q4 + e;
            if (r >= left) continue;
            const float scale = inverses[r] * reference * (1.0f / ROOM);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int d = 256 * part + 64 * b + 16 * warp + 2 * (lane / 4);
                const float x = acc[b][4 * j + e] * scale, y = acc[b][4 * j + 2 + e] * scale;
                if (a.splits > 1)
                    *reinterpret_cast<float2*>(
                        a.partial + (static_cast<long>(blockIdx.z) * a.number + first + r) * RANK + d) =
                        make_float2(x, y);
                else
                    *reinterpret_cast<__nv_bfloat162*>(a.out + (first + r) * RANK + d) = __floats2bfloat162_rn(x, y);
            }
        }
}

__global__ void __launch_bounds__(512, 1)
decode(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap scales, const Arguments a) {
    extern __shared__ __align__(1024) char shared[];
    const int tid = threadIdx.x, group = __shfl_sync(0xffffffff, tid / 128, 0), lane = tid % 32;
    const int warp = __shfl_sync(0xffffffff, tid % 128 / 32, 0);
    const int length = a.lengths[blockIdx.y];
    const int begin = blockIdx.z * a.split;
    if (blockIdx.z > 0 && begin >= length) return;
    const int end = min(begin + a.split, length);
    const int pages = max(0, (end - begin + PAGE - 1) / PAGE);
    const int pairs = a.rows * a.heads, tile = blockIdx.x * PAIRS;
    const long first = static_cast<long>(blockIdx.y) * pairs + tile;
    const uint32_t base = shared_address(shared);
    const Barriers bar(base + AT_BARRIERS);
    if (tid == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(bar.full + 8 * i, 1);
            barrier_init(bar.empty + 8 * i, 8);
            barrier_init(bar.ready + 8 * i, 1);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(bar.rope_full + 8 * i, 1);
            barrier_init(bar.rope_empty + 8 * i, 4);
            barrier_init(bar.weights + 8 * i, 4);
            barrier_init(bar.taken + 8 * i, 8);
        }
        barriers_ready();
    }
    __syncthreads();
    if (group == 0) {
        give_registers<24>();
        const int* table = a.page_table + static_cast<long>(blockIdx.y) * a.table_stride + begin / PAGE;
        if (warp < 2) {
            if (lane == 0) produce(values, scales, a, base, bar, table, pages, warp);
        } else if (warp == 2) {
            prepare(shared, bar, pages, length - begin, lane);
        }
    } else if (group == 1) {
        take_registers<136>();
        meet(1, 384);
        score(shared, base, bar, a, pages, begin, end, length, tile, pairs, first, warp, lane);
    } else {
        take_registers<176>();
        float* row_scale = reinterpret_cast<float*>(shared + AT_ROW_SCALE);
        load_query(a, shared + AT_Q, row_scale, tid - 256, first, pairs - tile);
        proxy_fence();
        meet(1, 384);
        add_values(shared, base, bar, a, pages, pairs - tile, first, group - 2, warp, lane);
    }
}

}  // namespace one
}  // namespace
