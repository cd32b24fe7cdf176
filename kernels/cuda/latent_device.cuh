// Instructions that the kernel over 656-byte latents names, one function each: PTX of Hopper's barriers,
// copies and products. A test has others in this file's place (tests/cuda_on_cpu).

#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

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
// The upper half of a matrix descriptor (hopper.cuh).
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
template <bool ADD>
__device__ __forceinline__ void mma_bf16_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%36, " DESCRIPTOR_HIGH
                 "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGS32
                 ", {%32, %33, %34, %35}, b, %37, 1, 1, 0;\n}"
                 : ACC32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
// Four matrices of eight rows of 16 bytes; lanes 8 i to 8 i + 7 name the rows of the i-th.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void store_word(uint32_t at, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
}
template <int MOST>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST));
}

}  // namespace
