// MLA decode over 656-byte FP8 latents: what Python calls.

#include "one_scale.cuh"

// 0, or a CUDA error. `rows_total` 656-byte rows from `pages` on; page i begins at row i * page_rows.
extern "C" int pdmesh_mla_decode_fp8(const void* query, void* out, void* partial, void* sums, void* pages,
                                     long rows_total, long page_rows, const int* page_table, int table_stride,
                                     const int* lengths, int sequences, int rows, int heads, int split, int splits,
                                     float scale_log2, void* stream) {
    static Encode encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        if (error != cudaSuccess) return error;
        if (found == nullptr) return cudaErrorNotSupported;
        const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const cudaError_t set = cudaFuncSetAttribute(one::decode, most, one::BYTES_IN_ALL);
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
    one::decode<<<grid, 512, one::BYTES_IN_ALL, static_cast<cudaStream_t>(stream)>>>(values, scales, a);
    return cudaGetLastError();
}
