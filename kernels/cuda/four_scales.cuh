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

#pragma once

#include "hopper.cuh"

namespace {
namespace four {

constexpr int STAGES = 4;

constexpr int G = 4;  // scales of a token
constexpr int AT_V = 0;
constexpr int AT_R = AT_V + STAGES * V_STAGE;
constexpr int AT_Q = AT_R + 2 * TILE;
constexpr int AT_P = AT_Q + (TILES + 1) * TILE;
constexpr int AT_SCALES = AT_P + G * TILE;                 // as fetched; then [group][position] float
constexpr int AT_NORMED = AT_SCALES + STAGES * PAGE * 16;  // [group][position] half, over the reference
constexpr int AT_SMALL = AT_NORMED + STAGES * PAGE * 8;
// Row maxima, alpha, row scale; for two steps the references and by how much they shrank the old sums.
constexpr int AT_BARRIERS = AT_SMALL + (4 * PAIRS + 2 * 2 * G) * 4;
constexpr int BYTES_IN_ALL = AT_BARRIERS + (3 * STAGES + 4) * 8;
static_assert(BYTES_IN_ALL <= 232448);

// One warp, a step's pages p0 and p0 + 1: their scales by position, references, zeros where no token is.
__device__ __forceinline__ void prepare(char* shared, uint32_t full, uint32_t ready, int p0, int pages, int begin,
                                        int length, int lane, float (&reference)[G]) {
    float most[G];
#pragma unroll
    for (int g = 0; g < G; ++g) most[g] = 0.0f;
    const int count = min(2, pages - p0);
    for (int i = 0; i < count; ++i) {
        const int p = p0 + i, stage = p % STAGES, left = length - begin - p * PAGE;
        const float* scales = reinterpret_cast<const float*>(shared + AT_SCALES) + stage * PAGE * 4;
        barrier_wait(full + 8 * stage, (p / STAGES) & 1);
        if (left < PAGE) {
            for (int token = left + lane; token < PAGE; token += 32)
                reinterpret_cast<uint4*>(shared + AT_SCALES)[stage * PAGE + token] = make_uint4(0, 0, 0, 0);
            for (int token = left; token < PAGE; ++token)
                *reinterpret_cast<uint4*>(shared + AT_V + stage * V_STAGE + (lane / 8) * TILE + token * 128 +
                                          lane % 8 * 16) = make_uint4(0, 0, 0, 0);
            __syncwarp();
        }
#pragma unroll
        for (int g = 0; g < G; ++g)
            most[g] = fmaxf(most[g], fmaxf(scales[4 * lane + g], scales[4 * (lane + 32) + g]));
    }
    float* step = reinterpret_cast<float*>(shared + AT_SMALL) + 4 * PAIRS + p0 / 2 % 2 * 8;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float top = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(most[g])));
        float shrink = 1.0f;
        if (top > 1.75f * reference[g]) {
            shrink = reference[g] / top;
            reference[g] = top;
        }
        if (lane == 0) {
            step[g] = reference[g];
            step[G + g] = shrink;
        }
        most[g] = reference[g] > 0.0f ? ROOM / reference[g] : 0.0f;
    }
    for (int i = 0; i < count; ++i) {
        const int stage = (p0 + i) % STAGES;
        float* scales = reinterpret_cast<float*>(shared + AT_SCALES) + stage * PAGE * 4;
        __half* normed = reinterpret_cast<__half*>(shared + AT_NORMED) + stage * PAGE * 4;
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

__global__ void __launch_bounds__(384, 1)
decode(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap scales, const Arguments a) {
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
    const uint32_t full = base + AT_BARRIERS, empty = full + 8 * STAGES;
    const uint32_t ready = empty + 8 * STAGES, rope_full = ready + 8 * STAGES, rope_empty = rope_full + 8 * 2;
    if (tid == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
            barrier_init(ready + 8 * i, 1);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(rope_full + 8 * i, 1);
            barrier_init(rope_empty + 8 * i, 4);
        }
        barriers_ready();
    }
    __syncthreads();

    if (group == 2) {
        give_registers<24>();
        const int* table = a.page_table + static_cast<long>(sequence) * a.table_stride + begin / PAGE;
        if (warp == 0 && lane == 0) {
            for (int p = 0; p < pages; ++p) {
                const int stage = p % STAGES;
                if (p >= STAGES) barrier_wait(empty + 8 * stage, (p / STAGES - 1) & 1);
                const int row = static_cast<int>(table[p] * a.page_rows);
                const uint32_t done = full + 8 * stage;
                barrier_expect(done, V_STAGE + PAGE * 16);
                fetch(base + AT_SCALES + stage * PAGE * 16, &scales, RANK, row, done);
                for (int g = 0; g < TILES; ++g)
                    fetch(base + AT_V + stage * V_STAGE + g * TILE, &values, g * 128, row, done);
            }
        } else if (warp == 1 && lane == 0) {
            for (int p = 0; p < pages; ++p) {
                const int slot = p % 2;
                if (p >= 2) barrier_wait(rope_empty + 8 * slot, (p / 2 - 1) & 1);
                const int row = static_cast<int>(table[p] * a.page_rows);
                barrier_expect(rope_full + 8 * slot, TILE);
                fetch(base + AT_R + slot * TILE, &values, RANK + 16, row, rope_full + 8 * slot);
            }
        } else if (warp == 2) {
            float reference[G];
#pragma unroll
            for (int g = 0; g < G; ++g) reference[g] = 0.0f;
            for (int p0 = 0; p0 < pages; p0 += 2)
                prepare(shared, full, ready, p0, pages, begin, length, lane, reference);
        }
        return;
    }
    take_registers<240>();

    float* row_max = reinterpret_cast<float*>(shared + AT_SMALL);
    float* row_alpha = row_max + 2 * PAIRS;
    float* row_scale = row_alpha + PAIRS;
    const float* step_scales = row_scale + PAIRS;
    const int q4 = lane % 4, r0 = 16 * warp + lane / 4;
    const long first = static_cast<long>(sequence) * pairs + tile;
    load_query(a, shared + AT_Q, row_scale, tid, first, pairs - tile);
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
        const int slot = p % 2;
        const uint32_t qd = descriptor(base + AT_Q + TILES * TILE), kd = descriptor(base + AT_R + slot * TILE);
        mma_fence();
        mma_bf16<false>(s, qd, kd);
#pragma unroll
        for (int k = 1; k < 4; ++k) mma_bf16<true>(s, qd + 2 * k, kd + 2 * k);
    };
    const auto latent = [&](int p, int g) {
        const uint32_t qd = descriptor(base + AT_Q + g * TILE);
        const uint32_t kd = descriptor(base + AT_V + p % STAGES * V_STAGE + g * TILE);
        mma_fp8<false>(t, qd, kd);
#pragma unroll
        for (int k = 1; k < 4; ++k) mma_fp8<true>(t, qd + 2 * k, kd + 2 * k);
        mma_commit();
    };

    for (int p0 = 0; p0 < pages; p0 += 2) {
        const int p = p0 + group;
        const bool mine = p < pages;
        const int stage = p % STAGES;
        const int first_token = begin + p * PAGE;
        const bool whole = first_token + PAGE <= end - (a.rows - 1);
        float high[2] = {-INFINITY, -INFINITY};
        const float factor[2] = {row_scale[r0], row_scale[r0 + 8]};
        const float4* scales_at = reinterpret_cast<const float4*>(shared + AT_SCALES) + stage * PAGE + q4;
        if (mine) {
            barrier_wait(ready + 8 * stage, (p / STAGES) & 1);
            barrier_wait(rope_full + 8 * (p % 2), (p / 2) & 1);
            rotated(p);
            mma_commit();
#pragma unroll
            for (int g = 0; g < G; ++g) {
                mma_fence();
                latent(p, g);
                mma_wait<0>();
                if (g == 0) {
                    hold(s);
                    if (lane == 0) barrier_arrive(rope_empty + 8 * (p % 2));
                }
                hold(t);
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
            const uint2* at = reinterpret_cast<const uint2*>(shared + AT_NORMED) + stage * PAGE + q4;
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
                        char* to = shared + AT_P + g * TILE + row * 128 + (((4 * group + j) ^ (row & 7)) << 4);
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
                    load_values(v[k % 2][b], base + AT_V + from_stage * V_STAGE + g * TILE + token * 128 +
                                                 ((chunk ^ (lane & 7)) << 4));
                }
                mma_fence();
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    mma_fp8_registers(acc[b], v[k % 2][b],
                                      descriptor(base + AT_P + (2 * group + b / 2) * TILE) + 2 * k);
                mma_commit();
            }
        }
        mma_wait<0>();
#pragma unroll
        for (int b = 0; b < 4; ++b) hold(acc[b]);
        if (lane == 0) {
            barrier_arrive(empty + 8 * (p0 % STAGES));
            if (steps == 4) barrier_arrive(empty + 8 * ((p0 + 1) % STAGES));
        }
    }

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

}  // namespace four
}  // namespace
