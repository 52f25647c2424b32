/* Rows of preprocessed files: packs encoded columns and gathers them in any order. */
#include "kernels.h"

#include <string.h>

enum { TILE = 128 };
enum { SMALL_FROM = -16, SMALL_COUNT = 2048 }; /* precomputed transforms, see click_log.c */

/* Returns the run that contains row `row`: the last one that starts at or before it. */
static inline int64_t run_of(const int64_t *starts, int64_t runs, int64_t row) {
    int64_t base = 0;
    while (runs > 1) {
        const int64_t half = runs >> 1;
        base = starts[base + half] <= row ? base + half : base;
        runs -= half;
    }
    return base;
}

/* Computes the addresses of rows order[from..to) and prefetches the rows. */
static inline void locate(const rayrec_runs *runs, int64_t row_bytes, const int64_t *order, int64_t from, int64_t to,
                          const uint8_t **out) {
    for (int64_t i = from; i < to; i++) {
        const int64_t run = run_of(runs->starts, runs->count, order[i]);
        const uint8_t *row = runs->rows[run] + (order[i] - runs->starts[run]) * row_bytes;
        out[i - from] = row;
        for (int64_t byte = 0; byte < row_bytes && byte < 512; byte += 64) __builtin_prefetch(row + byte);
    }
}

/* Copies ranges of bytes to `out`, one after the other. */
void rayrec_join_ranges(const uint8_t *const *starts, const int64_t *bytes, int64_t ranges, uint8_t *out) {
    for (int64_t i = 0; i < ranges; i++) {
        memcpy(out, starts[i], (size_t)bytes[i]);
        out += bytes[i];
    }
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Gathers rows order[0..rows) of row-major matrices: unchanged, or transposed (items of 4 or 8 bytes), with column c at
 * out + c * rows * item_bytes. */
void rayrec_gather_rows(const rayrec_runs *runs, const int64_t *order, int64_t rows, int64_t columns, int64_t item_bytes,
                        int32_t transposed, void *out) {
    const int64_t row_bytes = columns * item_bytes;
    const uint8_t *places[2][TILE];
    locate(runs, row_bytes, order, 0, smaller(TILE, rows), places[0]);
    for (int64_t base = 0, turn = 0; base < rows; base += TILE, turn ^= 1) {
        const int64_t count = smaller(TILE, rows - base), next = base + count;
        const uint8_t *const *here = places[turn];
        locate(runs, row_bytes, order, next, smaller(next + TILE, rows), places[turn ^ 1]);
        if (!transposed) {
            uint8_t *to = (uint8_t *)out + base * row_bytes;
            for (int64_t i = 0; i < count; i++) memcpy(to + i * row_bytes, here[i], (size_t)row_bytes);
        } else if (item_bytes == 4) {
            for (int64_t c = 0; c < columns; c++) {
                uint32_t *to = (uint32_t *)out + c * rows + base;
                for (int64_t i = 0; i < count; i++) memcpy(to + i, here[i] + c * 4, 4);
            }
        } else {
            for (int64_t c = 0; c < columns; c++) {
                uint64_t *to = (uint64_t *)out + c * rows + base;
                for (int64_t i = 0; i < count; i++) memcpy(to + i, here[i] + c * 8, 8);
            }
        }
    }
}

/* Unpacks rows order[0..rows) of int32 (label, num_dense integers, num_sparse ids) into dense float32 (rows, num_dense), ids int32
 * (num_sparse, rows) and labels float32 (rows). */
void rayrec_unpack_rows(const rayrec_runs *runs, const int64_t *order, int64_t rows, int32_t num_dense, int32_t num_sparse,
                        const rayrec_dense_column *columns, float *dense, int32_t *ids, float *labels) {
    const int64_t row_bytes = 4 * (1 + (int64_t)num_dense + num_sparse);
    float small[RAYREC_MAX_COLUMNS][SMALL_COUNT];
    const int use_small = rows > SMALL_COUNT;
    if (use_small) {
        int64_t values[SMALL_COUNT];
        for (int i = 0; i < SMALL_COUNT; i++) values[i] = SMALL_FROM + i;
        for (int d = 0; d < num_dense; d++) rayrec_transform_dense(values, SMALL_COUNT, &columns[d], small[d]);
    }
    const uint8_t *places[2][TILE];
    locate(runs, row_bytes, order, 0, smaller(TILE, rows), places[0]);
    for (int64_t base = 0, turn = 0; base < rows; base += TILE, turn ^= 1) {
        const int64_t count = smaller(TILE, rows - base), next = base + count;
        const int32_t *const *here = (const int32_t *const *)places[turn];
        locate(runs, row_bytes, order, next, smaller(next + TILE, rows), places[turn ^ 1]);
        for (int64_t i = 0; i < count; i++) {
            const int32_t *row = here[i];
            float *out = dense + (base + i) * num_dense;
            labels[base + i] = (float)row[0];
            for (int d = 0; d < num_dense; d++) {
                const int64_t value = row[1 + d];
                const uint64_t small_index = (uint64_t)(value - SMALL_FROM);
                if (use_small && small_index < SMALL_COUNT) out[d] = small[d][small_index];
                else rayrec_transform_dense(&value, 1, &columns[d], &out[d]);
            }
        }
        for (int s = 0; s < num_sparse; s++) {
            int32_t *out = ids + s * rows + base;
            for (int64_t i = 0; i < count; i++) out[i] = here[i][1 + num_dense + s];
        }
    }
}

/* Packs rows of int32 (label, integers raised to `lowest`, ids) from integers int64 (rows, num_dense), ids of `id_bytes` 4 or 8
 * (num_sparse, rows) and labels float32 (rows), NULL for -1. Returns -1, or row * (1 + num_dense + num_sparse) + column of the
 * first number beyond int32. */
int64_t rayrec_pack_rows(const int64_t *integers, const int64_t *lowest, const void *ids, int64_t id_bytes,
                         const float *labels, int64_t rows, int32_t num_dense, int32_t num_sparse, int32_t *out) {
    const int64_t width = 1 + (int64_t)num_dense + num_sparse;
    int64_t first_wrong = INT64_MAX;
    for (int64_t base = 0; base < rows; base += TILE) {
        const int64_t count = smaller(TILE, rows - base);
        for (int64_t i = 0; i < count; i++) {
            int32_t *row = out + (base + i) * width;
            row[0] = labels ? (int32_t)labels[base + i] : -1;
            for (int d = 0; d < num_dense; d++) {
                int64_t value = integers[(base + i) * num_dense + d];
                if (value < lowest[d]) value = lowest[d];
                row[1 + d] = (int32_t)value;
                if (row[1 + d] != value) first_wrong = smaller(first_wrong, (base + i) * width + 1 + d);
            }
        }
        for (int s = 0; s < num_sparse; s++) {
            const int64_t column = 1 + num_dense + s;
            int32_t *to = out + base * width + column;
            if (id_bytes == 4) {
                const int32_t *from = (const int32_t *)ids + s * rows + base;
                for (int64_t i = 0; i < count; i++) to[i * width] = from[i];
                continue;
            }
            const int64_t *from = (const int64_t *)ids + s * rows + base;
            for (int64_t i = 0; i < count; i++) {
                to[i * width] = (int32_t)from[i];
                if (to[i * width] != from[i]) first_wrong = smaller(first_wrong, (base + i) * width + column);
            }
        }
    }
    return first_wrong == INT64_MAX ? -1 : first_wrong;
}
