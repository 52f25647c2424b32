/* Sums of decision trees over rows. */
#include "kernels.h"

enum { ROWS_AT_ONCE = 64 };

/* Children have larger numbers than their node, which BoostedTrees checks, so that each descent ends at a leaf. One tree stays in
 * the cache for ROWS_AT_ONCE rows. Each row adds up its trees in their order, whatever the threads. */
int32_t rayrec_sum_trees(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_trees *trees = arguments;
    const int64_t splits = trees->splits;
    for (int64_t first = start; first < stop; first += ROWS_AT_ONCE) {
        const int64_t end = stop - first < ROWS_AT_ONCE ? stop : first + ROWS_AT_ONCE;
        for (int64_t row = first; row < end; row++) trees->sums[row] = 0.0;
        for (int64_t tree = 0; tree < trees->count; tree++) {
            const int32_t *column = trees->column + tree * splits;
            const float *threshold = trees->threshold + tree * splits;
            const int32_t *left = trees->left + tree * splits;
            const int32_t *right = trees->right + tree * splits;
            const double *value = trees->value + tree * (splits + 1);
            for (int64_t row = first; row < end; row++) {
                const float *values = trees->values + row * trees->columns;
                int64_t node = trees->roots[tree];
                while (node < splits) node = values[column[node]] <= threshold[node] ? left[node] : right[node];
                trees->sums[row] += value[node - splits];
            }
        }
    }
    return 0;
}
