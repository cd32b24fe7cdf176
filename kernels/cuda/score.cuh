// Part of one_scale.cuh: the products of the next page are issued at once, before the softmax.

// The scores' warpgroup.
__device__ __forceinline__ void score(char* shared, uint32_t base, const Barriers& bar, const Arguments& a, int pages,
                                      int begin, int end, int length, int tile, int pairs, long first, int warp,
                                      int lane) {
    const int q4 = lane % 4, r0 = 16 * warp + lane / 4;
    uint32_t rotated[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int row = 16 * warp + lane % 16;
        load_matrices(rotated[k], base + AT_P + row * 128 + (((2 * k + lane / 16) ^ (row & 7)) << 4));
    }
    __syncwarp();
    const float* row_scale = reinterpret_cast<const float*>(shared + AT_ROW_SCALE);
    const float factor[2] = {row_scale[r0], row_scale[r0 + 8]};
    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    float s[32], t[32];
    Ring<STAGES> next;
    // Products of page p with the queries, not waited for; of a page that is not there nothing is made.
    const auto products = [&](int p) {
        if (p < pages) {
            barrier_wait(bar.rope_full + 8 * (p % 2), p / 2 & 1);
            barrier_wait(bar.full + 8 * next.at, next.phase);
        }
        const uint32_t rd = descriptor(base + AT_R + p % 2 * TILE);
        const uint32_t qd = descriptor(base + AT_Q), kd = descriptor(base + AT_V + next.at * V_STAGE);
        mma_fence();
        mma_bf16_registers<false>(s, rotated[0], rd);
#pragma unroll
        for (int k = 1; k < 4; ++k) mma_bf16_registers<true>(s, rotated[k], rd + 2 * k);
        mma_fp8<false>(t, qd, kd);
#pragma unroll
        for (int k = 1; k < 4 * TILES; ++k) {
            const int on = k / 4 * (TILE / 16) + 2 * (k % 4);
            mma_fp8<true>(t, qd + on, kd + on);
        }
        mma_commit();
        next.next();
    };
    products(0);
    Ring<STAGES> ring;
    for (int p = 0; p < pages; ++p, ring.next()) {
        const int first_token = begin + p * PAGE, half = p % 2;
        mma_wait<0>();
        hold(s);
        hold(t);
        if (lane == 0) barrier_arrive(bar.rope_empty + 8 * half);
        barrier_wait(bar.ready + 8 * ring.at, ring.phase);
        float x[32];
        const float4* scales = reinterpret_cast<const float4*>(shared + AT_SCALES) + ring.at * PAGE + q4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 y = scales[4 * j];
            const float scale[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int e = 0; e < 8; ++e) x[8 * j + e] = fmaf(scale[e / 4 * 2 + e % 2], t[8 * j + e], s[8 * j + e]);
        }
        hold(x);
        products(p + 1);

        if (first_token + PAGE > end - (a.rows - 1)) {
            int limit[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                limit[i] = min(end, length - (a.rows - 1 - min(tile + r0 + 8 * i, pairs - 1) / a.heads));
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (first_token + 8 * (i / 4) + 2 * q4 + i % 2 >= limit[i % 4 / 2]) x[i] = -INFINITY;
        }
        float high[2] = {-INFINITY, -INFINITY}, alpha[2] = {1.0f, 1.0f}, from[2];
#pragma unroll
        for (int i = 0; i < 32; ++i) high[i % 4 / 2] = fmaxf(high[i % 4 / 2], x[i]);
        bool changed = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 1));
            high[i] = factor[i] * fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 2));
            if (high[i] > peak[i] + 2.0f) {
                alpha[i] = exp2_fast(peak[i] - high[i]);
                peak[i] = high[i];
                total[i] *= alpha[i];
                changed = true;
            }
            from[i] = peak[i] == -INFINITY ? 0.0f : peak[i];
        }
        changed = __any_sync(0xffffffff, changed);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            x[i] = exp2_fast(fmaf(x[i], factor[i % 4 / 2], -from[i % 4 / 2]));
            total[i % 4 / 2] += x[i];
        }
        if (p >= 2) barrier_wait(bar.taken + 8 * half, (p / 2 - 1) & 1);
        const uint2* normed = reinterpret_cast<const uint2*>(shared + AT_NORMED) + ring.at * 16 + q4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 w = normed[4 * j];
            const __half2 w0 = *reinterpret_cast<const __half2*>(&w.x), w1 = *reinterpret_cast<const __half2*>(&w.y);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = r0 + 8 * i;
                const __half2 low = __floats2half2_rn(x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
                const __half2 top = __floats2half2_rn(x[8 * j + 4 + 2 * i], x[8 * j + 5 + 2 * i]);
                char* to = shared + AT_P + row * 128 + (((4 * half + j) ^ (row & 7)) << 4);
                *reinterpret_cast<uint32_t*>(to + 4 * q4) = pack_fp8(__hmul2(low, w0), __hmul2(top, w1));
            }
        }
        if (q4 == 0) {
            float* to = reinterpret_cast<float*>(shared + AT_ALPHA) + half * PAIRS + r0;
            to[0] = alpha[0];
            to[8] = alpha[1];
        }
        if (lane == 0) reinterpret_cast<int*>(shared + AT_CHANGED)[half * 4 + warp] = changed;
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.weights + 8 * half);
    }
    mma_wait<0>();
    // When the others are through with the last factors, those of the end: one over the sums.
    if (pages > 0) barrier_wait(bar.taken + 8 * ((pages - 1) % 2), (pages - 1) / 2 & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 2);
        const int r = r0 + 8 * i;
        if (q4 == 0) {
            reinterpret_cast<float*>(shared + AT_ALPHA)[r] = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
            if (a.splits > 1 && tile + r < pairs)
                a.sums[static_cast<long>(blockIdx.z) * a.number + first + r] =
                    total[i] > 0.0f ? log2f(total[i]) + peak[i] : -INFINITY;
        }
    }
    meet(2, 384);
}
