/* SIMD vectors, independent of the CPU's registers. */
#ifndef RAYREC_VECTORS_H
#define RAYREC_VECTORS_H

#include <stdint.h>

#define PART_OF_IT static inline __attribute__((always_inline))

enum { QUAD = 4 };
typedef float quad __attribute__((vector_size(QUAD * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t places_of_quad __attribute__((vector_size(QUAD * sizeof(int32_t))));

#if defined(__clang__)
#define INTERLEAVED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define INTERLEAVED(first, second, ...) __builtin_shuffle(first, second, (places_of_quad){__VA_ARGS__})
#endif

/* Transposes (4, 4) values from rows `stride` apart to rows `out_stride` apart. */
PART_OF_IT void transpose_tile(const float *restrict tile, int64_t stride, float *restrict out, int64_t out_stride) {
    const quad a = *(const quad *)tile, b = *(const quad *)(tile + stride);
    const quad c = *(const quad *)(tile + 2 * stride), d = *(const quad *)(tile + 3 * stride);
    const quad ac_low = INTERLEAVED(a, c, 0, 4, 1, 5), ac_high = INTERLEAVED(a, c, 2, 6, 3, 7);
    const quad bd_low = INTERLEAVED(b, d, 0, 4, 1, 5), bd_high = INTERLEAVED(b, d, 2, 6, 3, 7);
    *(quad *)out = INTERLEAVED(ac_low, bd_low, 0, 4, 1, 5);
    *(quad *)(out + out_stride) = INTERLEAVED(ac_low, bd_low, 2, 6, 3, 7);
    *(quad *)(out + 2 * out_stride) = INTERLEAVED(ac_high, bd_high, 0, 4, 1, 5);
    *(quad *)(out + 3 * out_stride) = INTERLEAVED(ac_high, bd_high, 2, 6, 3, 7);
}

#endif
