/* Body of list_attention.c for one kind of CPU (`each_cpu.h`).
 *
 * A head of a list is computed alone, QUERIES queries at a time. Its matrices are copied first: rows become a
 * multiple of a register, with zeros behind the end, so that products need no special case at an edge.
 *
 *     forward     scores = query x keys^T, to base 2;  weights = 2^(scores - log_sum);  out = dropped(weights) x values
 *     backward    the weights again, from the saved log_sum, and
 *                 values'  = dropped(weights)^T x out'               (a ' marks a gradient)
 *                 weights' = dropped(out' x values^T)
 *                 scores'  = weights * (weights' - sum of weights * weights')
 *                 query'   = scores' x keys;   keys' = scores'^T x query */
#include "lanes_body.h"

#define PAIR (2 * LANES)
#define QUERIES (LANES == 16 ? 8 : 4) /* times two registers of sums: AVX-512 has 32 registers, others 16 */

/* Sets out (QUERIES, columns) to the product of left (QUERIES, inner) and right (inner, columns). `columns` is a multiple of LANES. */
PART_OF_IT KERNEL void NAMED(multiply)(const float *restrict left, int64_t left_stride, int64_t inner, const float *restrict right,
                                int64_t right_stride, int64_t columns, float *restrict out, int64_t out_stride) {
    int64_t j = 0;
    for (; j + PAIR <= columns; j += PAIR) {
        NAMED(lanes) low[QUERIES] = {0}, high[QUERIES] = {0};
        for (int64_t k = 0; k < inner; k++) {
            const float *row = right + k * right_stride + j;
            const NAMED(lanes) of_low = *(const NAMED(lanes) *)row, of_high = *(const NAMED(lanes) *)(row + LANES);
            for (int b = 0; b < QUERIES; b++) {
                const float factor = left[b * left_stride + k];
                low[b] += factor * of_low;
                high[b] += factor * of_high;
            }
        }
        for (int b = 0; b < QUERIES; b++) {
            *(NAMED(lanes) *)(out + b * out_stride + j) = low[b];
            *(NAMED(lanes) *)(out + b * out_stride + j + LANES) = high[b];
        }
    }
    if (j == columns) return;
    NAMED(lanes) last[QUERIES] = {0};
    for (int64_t k = 0; k < inner; k++) {
        const NAMED(lanes) of_last = *(const NAMED(lanes) *)(right + k * right_stride + j);
        for (int b = 0; b < QUERIES; b++) last[b] += left[b * left_stride + k] * of_last;
    }
    for (int b = 0; b < QUERIES; b++) *(NAMED(lanes) *)(out + b * out_stride + j) = last[b];
}

/* Adds the product of left^T (rows, QUERIES) and right (QUERIES, columns) to sums. `columns` is a multiple of LANES. */
PART_OF_IT KERNEL void NAMED(add_product)(const float *restrict left, int64_t left_stride, int64_t rows, const float *restrict right,
                                   int64_t columns, float *restrict sums) {
    int64_t j = 0;
    for (; j + PAIR <= columns; j += PAIR) {
        NAMED(lanes) low[QUERIES], high[QUERIES];
        for (int b = 0; b < QUERIES; b++) {
            low[b] = *(const NAMED(lanes) *)(right + b * columns + j);
            high[b] = *(const NAMED(lanes) *)(right + b * columns + j + LANES);
        }
        for (int64_t k = 0; k < rows; k++) {
            NAMED(lanes) *of_low = (NAMED(lanes) *)(sums + k * columns + j), *of_high = of_low + 1;
            NAMED(lanes) sum_low = *of_low, sum_high = *of_high;
            for (int b = 0; b < QUERIES; b++) {
                const float factor = left[b * left_stride + k];
                sum_low += factor * low[b];
                sum_high += factor * high[b];
            }
            *of_low = sum_low;
            *of_high = sum_high;
        }
    }
    if (j == columns) return;
    NAMED(lanes) last[QUERIES];
    for (int b = 0; b < QUERIES; b++) last[b] = *(const NAMED(lanes) *)(right + b * columns + j);
    for (int64_t k = 0; k < rows; k++) {
        NAMED(lanes) *of_last = (NAMED(lanes) *)(sums + k * columns + j), sum = *of_last;
        for (int b = 0; b < QUERIES; b++) sum += left[b * left_stride + k] * last[b];
        *of_last = sum;
    }
}

/* Copies `rows` rows of `width` values times a factor, to rows of `columns`, which are zeros behind the values. */
PART_OF_IT KERNEL void NAMED(copy_rows)(const float *from, int64_t stride, int64_t rows, int64_t width, float factor, float *restrict to,
                                 int64_t columns) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i++) to[row * columns + i] = from[row * stride + i] * factor;
}

/* Copies rows (rows, width) to (width, columns). */
PART_OF_IT KERNEL void NAMED(turn_rows)(const float *from, int64_t stride, int64_t rows, int64_t width, float *restrict to, int64_t columns) {
    const int64_t whole_rows = rows / QUAD * QUAD, whole_width = width / QUAD * QUAD;
    for (int64_t row = 0; row < whole_rows; row += QUAD)
        for (int64_t i = 0; i < whole_width; i += QUAD)
            transpose_tile(from + row * stride + i, stride, to + i * columns + row, columns);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row < whole_rows ? whole_width : 0; i < width; i++) to[i * columns + row] = from[row * stride + i];
}

/* Turns scores into weights, with zeros from `count` to `columns`, and returns the logarithm of their sum. */
PART_OF_IT KERNEL float NAMED(softmax)(float *restrict scores, int64_t count, int64_t columns) {
    const NAMED(lanes) lowest = (NAMED(lanes)){0} - FLT_MAX;
    NAMED(lanes) large = lowest;
    for (int64_t j = 0; j < columns; j += LANES) {
        const NAMED(whole_lanes) is_earlier = NAMED(numbers)() < (int32_t)(count - j);
        const NAMED(lanes) score = *(const NAMED(lanes) *)(scores + j);
        const NAMED(lanes) counted =
            (NAMED(lanes))(((NAMED(whole_lanes))score & is_earlier) | ((NAMED(whole_lanes))lowest & ~is_earlier));
        *(NAMED(lanes) *)(scores + j) = counted;
        large = NAMED(larger)(counted, large);
    }
    const float largest = NAMED(largest_of)(large);
    NAMED(lanes) sum = {0};
    for (int64_t j = 0; j < columns; j += LANES) {
        const NAMED(lanes) power = NAMED(power_of_two)(*(const NAMED(lanes) *)(scores + j) - largest);
        *(NAMED(lanes) *)(scores + j) = power;
        sum += power;
    }
    const float total = NAMED(sum_of)(sum), scale = 1 / total;
    for (int64_t j = 0; j < columns; j += LANES) *(NAMED(lanes) *)(scores + j) *= scale;
    return largest + log2f(total);
}

/* Drops weights of one query. */
PART_OF_IT KERNEL void NAMED(drop)(float *restrict weights, int64_t columns, uint32_t bits, const rayrec_dropout *dropout) {
    for (int64_t j = 0; j < columns; j += LANES) {
        const NAMED(lanes) scaled = *(const NAMED(lanes) *)(weights + j) * dropout->factor;
        const NAMED(whole_lanes) kept = NAMED(are_kept)(bits, j, dropout->threshold);
        *(NAMED(lanes) *)(weights + j) = (NAMED(lanes))((NAMED(whole_lanes))scaled & kept);
    }
}

KERNEL int32_t NAMED(rayrec_attend_lists)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_list_attention *attention = arguments;
    const int64_t heads = attention->heads, width = attention->width, wide = up_to_multiple(width, LANES);
    const float scale = LOG2_E * attention->scale;
    for (int64_t item = start; item < stop; item++) {
        const int64_t head = item % heads, first = attention->starts[item / heads];
        const int64_t count = attention->starts[item / heads + 1] - first, columns = up_to_multiple(count, LANES);
        const int64_t of_query = first * attention->query_stride + head * width;
        const int64_t of_memory = first * attention->memory_stride + head * width;
        float *room = calloc((size_t)(width * columns + count * wide + QUERIES * (columns + 2 * wide)), sizeof *room);
        if (!room) return 1;
        float *keys = room, *values = keys + width * columns, *query = values + count * wide;
        float *weights = query + QUERIES * wide, *out = weights + QUERIES * columns;
        NAMED(turn_rows)(attention->key + of_memory, attention->memory_stride, count, width, keys, columns);
        NAMED(copy_rows)(attention->value + of_memory, attention->memory_stride, count, width, 1, values, wide);
        for (int64_t i = 0; i < count; i += QUERIES) {
            const int64_t queries = count - i < QUERIES ? count - i : QUERIES, reach = attention->causal ? i + queries : count;
            const int64_t limit = up_to_multiple(reach, LANES);
            const float *of_block = attention->query + of_query + i * attention->query_stride;
            NAMED(copy_rows)(of_block, attention->query_stride, queries, width, scale, query, wide);
            NAMED(multiply)(query, wide, width, keys, columns, limit, weights, columns);
            for (int64_t b = 0; b < queries; b++) {
                const int64_t row = (first + i + b) * heads + head;
                attention->log_sums[row] = NAMED(softmax)(weights + b * columns, attention->causal ? i + b + 1 : count, limit);
                if (attention->dropout.threshold)
                    NAMED(drop)(weights + b * columns, limit, bits_of_block(attention->dropout.seed, row), &attention->dropout);
            }
            NAMED(multiply)(weights, columns, reach, values, wide, wide, out, wide);
            for (int64_t b = 0; b < queries; b++)
                NAMED(copy_rows)(out + b * wide, wide, 1, width, 1, attention->out + ((first + i + b) * heads + head) * width, width);
        }
        free(room);
    }
    return 0;
}

/* Turns scores into weights, by the logarithm of their sum, and gradients of dropped weights into those of scores. */
PART_OF_IT KERNEL void NAMED(softmax_backward)(float *restrict scores, float *restrict slopes, int64_t count, int64_t columns, float log_sum,
                                        uint32_t bits, const rayrec_dropout *dropout) {
    NAMED(lanes) sum = {0};
    for (int64_t j = 0; j < columns; j += LANES) {
        NAMED(whole_lanes) counts = NAMED(numbers)() < (int32_t)(count - j);
        NAMED(lanes) *score = (NAMED(lanes) *)(scores + j), *slope = (NAMED(lanes) *)(slopes + j);
        *score = (NAMED(lanes))((NAMED(whole_lanes))NAMED(power_of_two)(*score - log_sum) & counts);
        if (dropout->threshold) counts &= NAMED(are_kept)(bits, j, dropout->threshold);
        *slope = (NAMED(lanes))((NAMED(whole_lanes))(*slope * dropout->factor) & counts);
        sum += *score * *slope;
    }
    const float total = NAMED(sum_of)(sum);
    for (int64_t j = 0; j < columns; j += LANES) {
        const NAMED(lanes) weight = *(const NAMED(lanes) *)(scores + j);
        *(NAMED(lanes) *)(slopes + j) = weight * (*(const NAMED(lanes) *)(slopes + j) - total);
    }
    if (dropout->threshold) NAMED(drop)(scores, columns, bits, dropout);
}

KERNEL int32_t NAMED(rayrec_attend_lists_backward)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_list_attention *attention = arguments;
    const int64_t heads = attention->heads, width = attention->width, wide = up_to_multiple(width, LANES);
    const float scale = LOG2_E * attention->scale;
    for (int64_t item = start; item < stop; item++) {
        const int64_t head = item % heads, first = attention->starts[item / heads];
        const int64_t count = attention->starts[item / heads + 1] - first, columns = up_to_multiple(count, LANES);
        const int64_t of_query = first * attention->query_stride + head * width;
        const int64_t of_memory = first * attention->memory_stride + head * width;
        float *room = calloc((size_t)(2 * width * columns + 3 * count * wide + QUERIES * (2 * columns + 3 * wide)), sizeof *room);
        if (!room) return 1;
        float *turned_keys = room, *turned_values = turned_keys + width * columns, *keys = turned_values + width * columns;
        float *for_keys = keys + count * wide, *for_values = for_keys + count * wide, *query = for_values + count * wide;
        float *given = query + QUERIES * wide, *for_query = given + QUERIES * wide;
        float *weights = for_query + QUERIES * wide, *slopes = weights + QUERIES * columns;
        NAMED(turn_rows)(attention->key + of_memory, attention->memory_stride, count, width, turned_keys, columns);
        NAMED(turn_rows)(attention->value + of_memory, attention->memory_stride, count, width, turned_values, columns);
        NAMED(copy_rows)(attention->key + of_memory, attention->memory_stride, count, width, 1, keys, wide);
        for (int64_t i = 0; i < count; i += QUERIES) {
            const int64_t queries = count - i < QUERIES ? count - i : QUERIES, reach = attention->causal ? i + queries : count;
            const int64_t limit = up_to_multiple(reach, LANES);
            const int64_t place = of_query + i * attention->query_stride, row = (first + i) * heads + head;
            NAMED(copy_rows)(attention->query + place, attention->query_stride, queries, width, scale, query, wide);
            NAMED(copy_rows)(attention->gradient + row * width, heads * width, queries, width, 1, given, wide);
            NAMED(multiply)(query, wide, width, turned_keys, columns, limit, weights, columns);
            NAMED(multiply)(given, wide, width, turned_values, columns, limit, slopes, columns);
            for (int64_t b = 0; b < QUERIES; b++) {
                float *of_weights = weights + b * columns, *of_slopes = slopes + b * columns;
                const int64_t own = row + b * heads;
                if (b < queries)
                    NAMED(softmax_backward)(of_weights, of_slopes, attention->causal ? i + b + 1 : count, limit,
                                            attention->log_sums[own], bits_of_block(attention->dropout.seed, own), &attention->dropout);
                else
                    for (int64_t j = 0; j < limit; j++) of_weights[j] = of_slopes[j] = 0;
            }
            NAMED(add_product)(weights, columns, reach, given, wide, for_values);
            NAMED(add_product)(slopes, columns, reach, query, wide, for_keys);
            NAMED(multiply)(slopes, columns, reach, keys, wide, wide, for_query, wide);
            for (int64_t b = 0; b < queries; b++)
                NAMED(copy_rows)(for_query + b * wide, wide, 1, width, scale / LOG2_E,
                                 attention->query_gradient + place + b * attention->query_stride, width);
        }
        for (int64_t k = 0; k < count; k++) {
            const int64_t place = of_memory + k * attention->memory_stride;
            NAMED(copy_rows)(for_keys + k * wide, wide, 1, width, 1 / LOG2_E, attention->key_gradient + place, width);
            NAMED(copy_rows)(for_values + k * wide, wide, 1, width, 1, attention->value_gradient + place, width);
        }
        free(room);
    }
    return 0;
}
#undef PAIR
#undef QUERIES
