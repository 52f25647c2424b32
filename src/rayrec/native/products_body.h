/* Body of products.c for one kind of CPU (`each_cpu.h`).
 *
 * Values of all rows are columns, row after row; TILE columns at a time are computed, whatever row they are of:
 *
 *     forward     out[i] = bias[i] + sum of weight[p, i] * product[p], AT_ONCE outputs at a time
 *     backward    product'[p] = sum of weight[p, i] * out'[i], AT_ONCE pairs at a time (a ' marks a gradient), which is added, times
 *                 the other vector, to the gradients of both;   weight'[p, i] += sum over columns of product[p] * out'[i] */

#define TILE (2 * LANES)
#define AT_ONCE (LANES == 16 ? 8 : 4) /* sums of a tile in registers: AVX-512 has 32 of them, others 16 */

/* Copies columns [column, column + TILE) of (rows, vectors, dim) values to (vectors, TILE), up to column `end`. */
PART_OF_IT KERNEL void NAMED(read_columns)(const float *values, int64_t vectors, int64_t dim, int64_t column, int64_t end,
                                           float *restrict tile) {
    const int64_t count = end - column < TILE ? end - column : TILE;
    for (int64_t place = 0, part; place < count; place += part) {
        const int64_t row = (column + place) / dim, d = (column + place) % dim;
        part = dim - d < count - place ? dim - d : count - place;
        const float *from = values + row * vectors * dim + d;
        for (int64_t v = 0; v < vectors; v++)
            for (int64_t i = 0; i < part; i++) tile[v * TILE + place + i] = from[v * dim + i];
    }
    for (int64_t v = 0; v < vectors && count < TILE; v++) memset(tile + v * TILE + count, 0, (size_t)(TILE - count) * sizeof *tile);
}

/* Copies them back. */
PART_OF_IT KERNEL void NAMED(write_columns)(const float *restrict tile, int64_t vectors, int64_t dim, int64_t column, int64_t end,
                                            float *values) {
    const int64_t count = end - column < TILE ? end - column : TILE;
    for (int64_t place = 0, part; place < count; place += part) {
        const int64_t row = (column + place) / dim, d = (column + place) % dim;
        part = dim - d < count - place ? dim - d : count - place;
        float *to = values + row * vectors * dim + d;
        for (int64_t v = 0; v < vectors; v++)
            for (int64_t i = 0; i < part; i++) to[v * dim + i] = tile[v * TILE + place + i];
    }
}

KERNEL int32_t NAMED(rayrec_sum_products)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_products *products = arguments;
    const int64_t width = products->width, dim = products->dim;
    float *room = malloc((size_t)((products->firsts + products->seconds + width) * TILE) * sizeof *room);
    if (!room) return 1;
    float *first = room, *second = first + products->firsts * TILE, *out = second + products->seconds * TILE;
    for (int64_t block = start; block < stop; block++) {
        const int64_t next_row = (block + 1) * products->block_rows;
        const int64_t end = (next_row < products->rows ? next_row : products->rows) * dim;
        for (int64_t column = block * products->block_rows * dim; column < end; column += TILE) {
            NAMED(read_columns)(products->first, products->firsts, dim, column, end, first);
            NAMED(read_columns)(products->second, products->seconds, dim, column, end, second);
            for (int64_t i = 0; i < width; i += AT_ONCE) {
                NAMED(lanes) low[AT_ONCE], high[AT_ONCE];
                for (int b = 0; b < AT_ONCE; b++) low[b] = high[b] = (NAMED(lanes)){0} + products->bias[i + b];
                const float *weight = products->weight + i;
                for (int64_t p = 0; p < products->count; p++, weight += width) {
                    const NAMED(lanes) *of_first = (const NAMED(lanes) *)(first + products->pairs[p].first * TILE);
                    const NAMED(lanes) *of_second = (const NAMED(lanes) *)(second + products->pairs[p].second * TILE);
                    const NAMED(lanes) low_product = of_first[0] * of_second[0], high_product = of_first[1] * of_second[1];
                    for (int b = 0; b < AT_ONCE; b++) {
                        low[b] += weight[b] * low_product;
                        high[b] += weight[b] * high_product;
                    }
                }
                for (int b = 0; b < AT_ONCE; b++) {
                    NAMED(lanes) *of_out = (NAMED(lanes) *)(out + (i + b) * TILE);
                    of_out[0] = low[b];
                    of_out[1] = high[b];
                }
            }
            NAMED(write_columns)(out, products->outputs, dim, column, end, products->out);
        }
    }
    free(room);
    return 0;
}

KERNEL int32_t NAMED(rayrec_sum_products_backward)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_products *products = arguments;
    const int64_t width = products->width, dim = products->dim, vectors = products->firsts + products->seconds;
    float *room = calloc((size_t)((2 * vectors + 2 * width + AT_ONCE) * TILE), sizeof *room);
    if (!room) return 1;
    float *first = room, *second = first + products->firsts * TILE, *slopes = first + vectors * TILE;
    float *first_slopes = slopes, *second_slopes = first_slopes + products->firsts * TILE;
    float *given = slopes + vectors * TILE, *turned = given + width * TILE, *product = turned + width * TILE;
    for (int64_t block = start; block < stop; block++) {
        const int64_t next_row = (block + 1) * products->block_rows;
        const int64_t end = (next_row < products->rows ? next_row : products->rows) * dim;
        float *sums = products->weight_gradient + block * products->count * width;
        for (int64_t column = block * products->block_rows * dim; column < end; column += TILE) {
            NAMED(read_columns)(products->first, products->firsts, dim, column, end, first);
            NAMED(read_columns)(products->second, products->seconds, dim, column, end, second);
            NAMED(read_columns)(products->out, products->outputs, dim, column, end, given);
            for (int64_t i = 0; i < width; i += QUAD)
                for (int64_t c = 0; c < TILE; c += QUAD) transpose_tile(given + i * TILE + c, TILE, turned + c * width + i, width);
            memset(slopes, 0, (size_t)(vectors * TILE) * sizeof *slopes);
            for (int64_t p = 0; p < products->count; p += AT_ONCE) {
                const float *weight = products->weight + p * width;
                NAMED(lanes) low[AT_ONCE] = {0}, high[AT_ONCE] = {0};
                for (int64_t i = 0; i < products->outputs; i++) {
                    const NAMED(lanes) *of_given = (const NAMED(lanes) *)(given + i * TILE);
                    const NAMED(lanes) low_given = of_given[0], high_given = of_given[1];
                    for (int b = 0; b < AT_ONCE; b++) {
                        const float factor = weight[b * width + i];
                        low[b] += factor * low_given;
                        high[b] += factor * high_given;
                    }
                }
                for (int b = 0; b < AT_ONCE; b++) {
                    const int64_t at_first = products->pairs[p + b].first * TILE, at_second = products->pairs[p + b].second * TILE;
                    const NAMED(lanes) *of_first = (const NAMED(lanes) *)(first + at_first);
                    const NAMED(lanes) *of_second = (const NAMED(lanes) *)(second + at_second);
                    NAMED(lanes) *for_first = (NAMED(lanes) *)(first_slopes + at_first);
                    NAMED(lanes) *for_second = (NAMED(lanes) *)(second_slopes + at_second);
                    NAMED(lanes) *of_product = (NAMED(lanes) *)(product + b * TILE);
                    of_product[0] = of_first[0] * of_second[0];
                    of_product[1] = of_first[1] * of_second[1];
                    for_first[0] += low[b] * of_second[0];
                    for_first[1] += high[b] * of_second[1];
                    for_second[0] += low[b] * of_first[0];
                    for_second[1] += high[b] * of_first[1];
                }
                for (int64_t i = 0; i < width; i += LANES) {
                    float *of_pairs = sums + p * width + i;
                    NAMED(lanes) sum[AT_ONCE];
                    for (int b = 0; b < AT_ONCE; b++) sum[b] = *(const NAMED(lanes) *)(of_pairs + b * width);
                    for (int64_t c = 0; c < TILE; c++) {
                        const NAMED(lanes) of_column = *(const NAMED(lanes) *)(turned + c * width + i);
                        for (int b = 0; b < AT_ONCE; b++) sum[b] += product[b * TILE + c] * of_column;
                    }
                    for (int b = 0; b < AT_ONCE; b++) *(NAMED(lanes) *)(of_pairs + b * width) = sum[b];
                }
            }
            NAMED(write_columns)(first_slopes, products->firsts, dim, column, end, products->first_gradient);
            NAMED(write_columns)(second_slopes, products->seconds, dim, column, end, products->second_gradient);
        }
    }
    free(room);
    return 0;
}
#undef TILE
#undef AT_ONCE
