/* Lookup, dequantization and pooling of a batch's embedding rows in one call. */
#include "kernels.h"

#include <string.h>

/* Ids prefetched ahead of use: enough to hide memory latency, few enough for the core's line-fill buffers. */
enum { AHEAD = 12, BLOCK_ROWS = 64 };

static inline uint64_t id_at(const rayrec_lookup *lookup, int64_t place) {
    return lookup->id_bytes == 4 ? (uint64_t)(int64_t)((const int32_t *)lookup->ids)[place]
                                 : (uint64_t)((const int64_t *)lookup->ids)[place];
}

/* Converts finite IEEE half to single precision. Numbers below 2^-14 use an exact subtraction without subnormal single-precision
 * numbers, which would cost a hundred cycles. */
static inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t normal_bits = magnitude + ((uint32_t)(127 - 15) << 23);
    const uint32_t small_bits = magnitude + ((uint32_t)(127 - 14) << 23);
    float small;
    memcpy(&small, &small_bits, 4);
    small -= 0x1p-14f;
    uint32_t corrected;
    memcpy(&corrected, &small, 4);
    const uint32_t bits = sign | (magnitude < (uint32_t)1 << 23 ? corrected : normal_bits);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float half_at(const uint8_t *place) {
    uint16_t half;
    memcpy(&half, place, 2);
    return half_to_float(half);
}

/* `weighted` is a constant of each call, so rows without weights are not multiplied. */
#define WEIGHTED(value) (weighted ? weight * (value) : (value))

/* Separate loops for writing and adding, so that each vectorizes. */
#define EACH_VALUE(expression)                                                        \
    do {                                                                              \
        if (first) for (int64_t d = 0; d < dim; d++) out[d] = WEIGHTED(expression);   \
        else for (int64_t d = 0; d < dim; d++) out[d] += WEIGHTED(expression);        \
    } while (0)

static inline void take_values(const uint8_t *row, enum rayrec_table_kind kind, int64_t dim, int first,
                               int weighted, float weight, float *restrict out) {
    if (kind == TABLE_FP32) {
        const float *values = (const float *)(const void *)row;
        EACH_VALUE(values[d]);
    } else if (kind == TABLE_FP16) {
        const uint16_t *values = (const uint16_t *)(const void *)row;
        EACH_VALUE(half_to_float(values[d]));
    } else if (kind == TABLE_INT8) {
        float scale, offset;
        memcpy(&scale, row + dim, 4);
        memcpy(&offset, row + dim + 4, 4);
        EACH_VALUE((float)row[d] * scale + offset);
    } else {
        const float scale = half_at(row + dim / 2), offset = half_at(row + dim / 2 + 2);
        for (int64_t pair = 0; pair < dim / 2; pair++) {
            const float low = WEIGHTED((float)(row[pair] & 15) * scale + offset);
            const float high = WEIGHTED((float)(row[pair] >> 4) * scale + offset);
            out[2 * pair] = first ? low : out[2 * pair] + low;
            out[2 * pair + 1] = first ? high : out[2 * pair + 1] + high;
        }
    }
}

static inline void take_row(const uint8_t *row, enum rayrec_table_kind kind, int64_t dim, int first,
                            float *restrict out) {
    take_values(row, kind, dim, first, 0, 1.0f, out);
}

/* Lists with weights are rare, and the loops of the others must stay small. */
__attribute__((noinline))
static void take_weighted_row(const uint8_t *row, enum rayrec_table_kind kind, int64_t dim, int first, float weight,
                              float *restrict out) {
    take_values(row, kind, dim, first, 1, weight, out);
}

static inline int64_t pool_column(const rayrec_lookup *lookup, int64_t start, int64_t stop, int64_t rows,
                                  enum rayrec_table_kind kind, int64_t dim, int64_t stride, float *out) {
    const int64_t *offsets = lookup->offsets;
    const int64_t size = lookup->size, end = offsets ? offsets[rows] : rows * size;
    const uint64_t limit = (uint64_t)lookup->num_embeddings;
    for (int64_t row = start; row < stop; row++) {
        float *target = out + row * stride;
        const int64_t begin = offsets ? offsets[row] : row * size, past = offsets ? offsets[row + 1] : begin + size;
        if (begin == past) memset(target, 0, (size_t)dim * sizeof(float));
        for (int64_t place = begin; place < past; place++) {
            if (place + AHEAD < end) {
                const uint64_t ahead = id_at(lookup, place + AHEAD);
                if (ahead < limit) {
                    const uint8_t *line = lookup->table + ahead * (uint64_t)lookup->row_bytes;
                    __builtin_prefetch(line);
                    __builtin_prefetch(line + lookup->row_bytes - 1);
                }
            }
            const uint64_t id = id_at(lookup, place);
            if (id >= limit) return 0;
            const uint8_t *found = lookup->table + id * (uint64_t)lookup->row_bytes;
            if (lookup->weights) take_weighted_row(found, kind, dim, place == begin, lookup->weights[place], target);
            else take_row(found, kind, dim, place == begin, target);
        }
    }
    return 1;
}

static inline int64_t pool(const rayrec_lookup *lookups, int64_t columns, int64_t rows, int64_t dim,
                           enum rayrec_table_kind kind, float *out) {
    for (int64_t start = 0; start < rows; start += BLOCK_ROWS) { /* in blocks, so that output rows stay in cache */
        const int64_t stop = start + BLOCK_ROWS < rows ? start + BLOCK_ROWS : rows;
        for (int64_t column = 0; column < columns; column++)
            if (!pool_column(lookups + column, start, stop, rows, kind, dim, columns * dim, out + column * dim))
                return column;
    }
    return -1;
}

/* Writes the sum of each bag's rows of each table to out (rows, columns * dim). Returns -1, or the column of the first id beyond
 * its table; out is then incomplete. */
int64_t rayrec_pool_tables(const rayrec_lookup *lookups, int64_t columns, int64_t rows, int64_t dim, int32_t kind,
                           float *out) {
    switch (kind) { /* separate calls, each compiled for its kind */
    case TABLE_FP32: return pool(lookups, columns, rows, dim, TABLE_FP32, out);
    case TABLE_FP16: return pool(lookups, columns, rows, dim, TABLE_FP16, out);
    case TABLE_INT8: return pool(lookups, columns, rows, dim, TABLE_INT8, out);
    default: return pool(lookups, columns, rows, dim, TABLE_INT4, out);
    }
}
