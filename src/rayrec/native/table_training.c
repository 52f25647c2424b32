/* Training of embedding tables with Adam: gradients of the looked-up rows, and row updates. */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows prefetched ahead of use. */
enum { AHEAD = 8 };

static inline uint64_t slot_of(int64_t id, uint64_t mask) {
    return ((uint64_t)id * 0x9E3779B97F4A7C15ULL >> 29) & mask;
}

static int32_t gather(rayrec_gathered_table *table) {
    const rayrec_looked_up *lookup = table->lookup;
    const int64_t bags = lookup->bags, dim = table->dim, stride = lookup->stride;
    const int64_t *all_offsets = lookup->offsets + table->first_feature * bags;
    const int64_t lookups = all_offsets[table->num_features * bags] - all_offsets[0];
    uint64_t mask = 1;
    while (mask < 2 * (uint64_t)lookups) mask *= 2;
    int32_t *restrict slots = calloc(mask, sizeof *slots);
    if (!slots) return 1;
    mask--;
    int64_t *restrict distinct = table->distinct;
    int64_t found = 0;
    for (int64_t feature = 0; feature < table->num_features; feature++) {
        const int64_t *offsets = all_offsets + feature * bags;
        const float *of_feature = lookup->gradient + (lookup->pooled ? table->column + feature * dim : 0);
        for (int64_t bag = 0; bag < bags; bag++) {
            if (lookup->pooled && bag + AHEAD < bags) __builtin_prefetch(of_feature + (bag + AHEAD) * stride);
            for (int64_t place = offsets[bag]; place < offsets[bag + 1]; place++) {
                const int64_t id = lookup->ids[place];
                const float weight = lookup->weights ? lookup->weights[place] : 1.0f;
                const float *gradient = of_feature + (lookup->pooled ? bag : place) * stride;
                uint64_t slot = slot_of(id, mask);
                while (slots[slot] && distinct[slots[slot] - 1] != id) slot = (slot + 1) & mask;
                const int first = !slots[slot];
                if (first) {
                    distinct[found] = id;
                    slots[slot] = (int32_t)++found;
                }
                float *restrict sum = table->sums + (slots[slot] - 1) * dim;
                if (first) for (int64_t d = 0; d < dim; d++) sum[d] = weight * gradient[d];
                else for (int64_t d = 0; d < dim; d++) sum[d] += weight * gradient[d];
            }
        }
    }
    table->found = found;
    free(slots);
    return 0;
}

int32_t rayrec_gather_row_gradients(const void *arguments, int64_t start, int64_t stop) {
    rayrec_gathered_table *tables = (rayrec_gathered_table *)arguments;
    int32_t failed = 0;
    for (int64_t number = start; number < stop; number++) failed |= gather(tables + number);
    return failed;
}

/* Moments of untouched rows shrink to subnormal numbers, which a CPU computes a hundred times more slowly, and never reach 0.
 * Below this limit they cannot change a weight. */
static inline float flushed(float value) { return fabsf(value) < 1e-36f ? 0.0f : value; }

static inline void update(float *restrict weight, float *restrict mean, float *restrict square, float gradient,
                          const rayrec_adam *rule) {
    const float total = gradient + rule->l2 * *weight;
    *mean = flushed(*mean + rule->mean_rate * (total - *mean));
    *square = flushed(rule->square_keep * *square + rule->square_rate * total * total);
    *weight = rule->keep * *weight - rule->step_size * *mean / (sqrtf(*square) * rule->root_scale + rule->eps);
}

static void update_rows(const rayrec_adam_rows *part) {
    const int64_t dim = part->dim;
    for (int64_t number = part->start; number < part->stop; number++) {
        if (number + AHEAD < part->stop) {
            const int64_t ahead = part->ids[number + AHEAD] * dim;
            for (int64_t d = 0; d < dim; d += 16) {
                __builtin_prefetch(part->weights + ahead + d, 1);
                __builtin_prefetch(part->mean + ahead + d, 1);
                __builtin_prefetch(part->square + ahead + d, 1);
            }
        }
        const float *gradient = part->gradients + number * dim;
        if (part->only_nonzero) {
            int any = 0;
            for (int64_t d = 0; d < dim; d++) any |= gradient[d] != 0.0f;
            if (!any) continue;
        }
        const int64_t row = part->ids[number] * dim;
        float *restrict weights = part->weights + row, *restrict means = part->mean + row;
        float *restrict squares = part->square + row;
        for (int64_t d = 0; d < dim; d++)
            update(weights + d, means + d, squares + d, part->rule->scale * gradient[d], part->rule);
    }
}

static void update_unmarked(const rayrec_adam_rows *part) {
    const int64_t dim = part->dim;
    for (int64_t row = part->start; row < part->stop;) {
        const uint8_t *marked = memchr(part->marks + row, 1, (size_t)(part->stop - row));
        const int64_t end = marked ? marked - part->marks : part->stop, values = (end - row) * dim;
        float *restrict weights = part->weights + row * dim, *restrict means = part->mean + row * dim;
        float *restrict squares = part->square + row * dim;
        for (int64_t d = 0; d < values; d++) update(weights + d, means + d, squares + d, 0.0f, part->rule);
        row = end + 1;
    }
}

int32_t rayrec_update_by_adam(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_adam_rows *parts = arguments;
    for (int64_t number = start; number < stop; number++) {
        if (parts[number].ids) update_rows(parts + number);
        else update_unmarked(parts + number);
    }
    return 0;
}
