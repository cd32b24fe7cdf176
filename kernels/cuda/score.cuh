// Part of one_scale.cuh: the products of the next page are issued one by one between the steps of the softmax.

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
    constexpr int PRODUCTS = 4 + 4 * TILES;  // instructions of a page's scores
    float s[32], t[32];
    // A page's products with the queries, PRODUCTS one after the other, none waited for. An instruction is
    // taken only when the one before has begun, so other work stands between them. Of a page that is not
    // there nothing is made.
    Ring<STAGES> next;
    uint32_t rd, qd = descriptor(base + AT_Q), kd;
    const auto begin_products = [&](int p) {
        if (p < pages) barrier_wait(bar.ready + 8 * next.at, next.phase);
        rd = descriptor(base + AT_R + p % 2 * TILE);
        kd = descriptor(base + AT_V + next.at * V_STAGE);
        next.next();
        mma_fence();
    };
    const auto product = [&](int i) {
        const int k = i - 4, on = k / 4 * (TILE / 16) + 2 * (k % 4);
        if (i == 0)
            mma_bf16_registers<false>(s, rotated[0], rd);
        else if (i < 4)
            mma_bf16_registers<true>(s, rotated[i], rd + 2 * i);
        else if (i == 4)
            mma_fp8<false>(t, qd, kd);
        else
            mma_fp8<true>(t, qd + on, kd + on);
    };
    begin_products(0);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) product(i);
    mma_commit();
    Ring<STAGES> ring;
    for (int p = 0; p < pages; ++p, ring.next()) {
        const int first_token = begin + p * PAGE, half = p % 2;
        if (p >= 2) barrier_wait(bar.taken + 8 * half, (p / 2 - 1) & 1);
        mma_wait<0>();
        hold(s);
        hold(t);
        if (lane == 0) barrier_arrive(bar.rope_empty + 8 * half);
        float x[32];
        const float4* scales = reinterpret_cast<const float4*>(shared + AT_SCALES) + ring.at * PAGE + q4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 y = scales[4 * j];
            const float scale[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int e = 0; e < 8; ++e) x[8 * j + e] = fmaf(scale[e / 4 * 2 + e % 2], t[8 * j + e], s[8 * j + e]);
        }
        if (first_token + PAGE > end - (a.rows - 1)) {
            int limit[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                limit[i] = min(end, length - (a.rows - 1 - min(tile + r0 + 8 * i, pairs - 1) / a.heads));
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (first_token + 8 * (i / 4) + 2 * q4 + i % 2 >= limit[i % 4 / 2]) x[i] = -INFINITY;
        }
        hold(x);
        begin_products(p + 1);

        float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            product(i);
            float& even = top[i % 2];
            float& odd = top[2 + i % 2];
            even = fmaxf(even, fmaxf(x[4 * i], x[4 * i + 1]));
            odd = fmaxf(odd, fmaxf(x[4 * i + 2], x[4 * i + 3]));
            hold(even);
            hold(odd);
        }
        float high[2] = {fmaxf(top[0], top[1]), fmaxf(top[2], top[3])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[0] = fmaxf(high[0], __shfl_xor_sync(0xffffffff, high[0], 1 + i));
            high[1] = fmaxf(high[1], __shfl_xor_sync(0xffffffff, high[1], 1 + i));
            product(8 + i);
        }
        float alpha[2], from[2];
        bool raised = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] *= factor[i];
            const bool now = high[i] > peak[i] + 2.0f;
            alpha[i] = now ? exp2_fast(peak[i] - high[i]) : 1.0f;
            peak[i] = now ? high[i] : peak[i];
            total[i] *= alpha[i];
            from[i] = peak[i] == -INFINITY ? 0.0f : -peak[i];
            raised |= now;
        }
        const bool changed = __any_sync(0xffffffff, raised);
        if (q4 == 0) {
            float* to = reinterpret_cast<float*>(shared + AT_ALPHA) + half * PAIRS + r0;
            to[0] = alpha[0];
            to[8] = alpha[1];
        }
        if (lane == 0) reinterpret_cast<int*>(shared + AT_CHANGED)[half * 4 + warp] = changed;
        product(10);
        product(11);
        uint32_t words[4][2];  // stored together at the end: a load does not wait behind a store
        const uint2* normed = reinterpret_cast<const uint2*>(shared + AT_NORMED) + ring.at * 16 + q4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 w = normed[4 * j];
            const __half2 w0 = *reinterpret_cast<const __half2*>(&w.x), w1 = *reinterpret_cast<const __half2*>(&w.y);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                product(12 + 2 * j + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& y = x[8 * j + 4 * i + e];
                    y = exp2_fast(fmaf(y, factor[e / 2], from[e / 2]));
                    total[e / 2] += y;
                    hold(y);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const __half2 low = __floats2half2_rn(x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
                const __half2 high_half = __floats2half2_rn(x[8 * j + 4 + 2 * i], x[8 * j + 5 + 2 * i]);
                words[j][i] = pack_fp8(__hmul2(low, w0), __hmul2(high_half, w1));
            }
        }
        mma_commit();
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = r0 + 8 * i;
                char* to = shared + AT_P + row * 128 + (((4 * half + j) ^ (row & 7)) << 4);
                store_word(shared_address(to) + 4 * q4, words[j][i]);
            }
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
