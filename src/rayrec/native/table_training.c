/* Training of embedding tables by Adam: the gradient of each row that a batch looked up, and the update of rows. */
#include "kernels.h"

#include <math.h>
#include <string.h>

/* Rows that are fetched ahead of use. */
enum { AHEAD = 8 };

static inline uint64_t slot_of(int64_t id, uint64_t mask) {
    return ((uint64_t)id * 0x9E3779B97F4A7C15ULL >> 29) & mask;
}

/* The distinct ids of `num_features` features of one table, in the order in which they first occur, and the sum of each one's
 * gradients, added in the order of the lookups. `slots` (mask + 1, a power of two above the number of lookups) is room, all 0.
 * `distinct` (lookups) and `sums` (lookups, dim) have room for every lookup. Returns the number of distinct ids. */
int64_t rayrec_sum_row_gradients(const rayrec_looked_up *lookup, int64_t first_feature, int64_t num_features,
                                 int64_t column, int64_t dim, int32_t *restrict slots, int64_t mask,
                                 int64_t *restrict distinct, float *restrict sums) {
    int64_t found = 0;
    const int64_t bags = lookup->bags;
    for (int64_t feature = 0; feature < num_features; feature++) {
        const int64_t *offsets = lookup->offsets + (first_feature + feature) * bags;
        for (int64_t bag = 0; bag < bags; bag++) {
            for (int64_t place = offsets[bag]; place < offsets[bag + 1]; place++) {
                const int64_t id = lookup->ids[place];
                const float weight = lookup->weights ? lookup->weights[place] : 1.0f;
                const float *gradient = lookup->pooled ? lookup->gradient + bag * lookup->stride + column + feature * dim
                                                       : lookup->gradient + place * lookup->stride;
                uint64_t slot = slot_of(id, (uint64_t)mask);
                while (slots[slot] && distinct[slots[slot] - 1] != id) slot = (slot + 1) & (uint64_t)mask;
                if (!slots[slot]) {
                    distinct[found] = id;
                    slots[slot] = (int32_t)++found;
                    float *sum = sums + (found - 1) * dim;
                    for (int64_t d = 0; d < dim; d++) sum[d] = weight * gradient[d];
                } else {
                    float *sum = sums + (slots[slot] - 1) * dim;
                    for (int64_t d = 0; d < dim; d++) sum[d] += weight * gradient[d];
                }
            }
        }
    }
    return found;
}

/* Moments of rows that no batch touches shrink until they are subnormal, which a CPU computes a hundred times more slowly, and
 * stop short of 0. Below this they cannot move a weight. */
static inline float flushed(float value) { return fabsf(value) < 1e-36f ? 0.0f : value; }

static inline void update(float *restrict weight, float *restrict mean, float *restrict square, float gradient,
                          const rayrec_adam *rule) {
    const float total = gradient + rule->l2 * *weight;
    *mean = flushed(*mean + rule->mean_rate * (total - *mean));
    *square = flushed(rule->square_keep * *square + rule->square_rate * total * total);
    *weight = rule->keep * *weight - rule->step_size * *mean / (sqrtf(*square) * rule->root_scale + rule->eps);
}

/* The update of rows ids[start] to ids[stop - 1] by their gradients (.., dim); with `only_nonzero` those whose gradient is 0 stay
 * unchanged. */
void rayrec_adam_rows(const rayrec_adam_table *table, const rayrec_adam *rule, const int64_t *ids,
                      const float *gradients, int64_t start, int64_t stop, int32_t only_nonzero) {
    const int64_t dim = table->dim;
    for (int64_t number = start; number < stop; number++) {
        if (number + AHEAD < stop) {
            const int64_t ahead = ids[number + AHEAD] * dim;
            for (int64_t d = 0; d < dim; d += 16) {
                __builtin_prefetch(table->weights + ahead + d, 1);
                __builtin_prefetch(table->mean + ahead + d, 1);
                __builtin_prefetch(table->square + ahead + d, 1);
            }
        }
        const float *gradient = gradients + number * dim;
        if (only_nonzero) {
            int any = 0;
            for (int64_t d = 0; d < dim; d++) any |= gradient[d] != 0.0f;
            if (!any) continue;
        }
        float *restrict weights = table->weights + ids[number] * dim;
        float *restrict means = table->mean + ids[number] * dim;
        float *restrict squares = table->square + ids[number] * dim;
        for (int64_t d = 0; d < dim; d++)
            update(weights + d, means + d, squares + d, rule->scale * gradient[d], rule);
    }
}

/* The update of rows start to stop - 1 that `marks` (rows) leaves 0: their gradient is 0. */
void rayrec_adam_others(const rayrec_adam_table *table, const rayrec_adam *rule, const uint8_t *marks, int64_t start,
                        int64_t stop) {
    const int64_t dim = table->dim;
    for (int64_t row = start; row < stop;) {
        const uint8_t *marked = memchr(marks + row, 1, (size_t)(stop - row));
        const int64_t end = marked ? marked - marks : stop;
        float *restrict weights = table->weights + row * dim;
        float *restrict means = table->mean + row * dim;
        float *restrict squares = table->square + row * dim;
        const int64_t values = (end - row) * dim;
        for (int64_t d = 0; d < values; d++) update(weights + d, means + d, squares + d, 0.0f, rule);
        row = end + 1;
    }
}
