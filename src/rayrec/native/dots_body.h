/* Body of dots.c for one kind of CPU (`each_cpu.h`). */

/* Like memcpy, whose call takes longer than copying a few values. */
PART_OF_IT void NAMED(copy)(const float *from, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(NAMED(lanes) *)(to + i) = *(const NAMED(lanes) *)(from + i);
    for (; i < count; i++) to[i] = from[i];
}

PART_OF_IT void NAMED(read_values)(const void *values, int32_t kind, int64_t first, int64_t count, float *restrict out) {
    if (kind == VALUES_FLOAT32) NAMED(copy)((const float *)values + first, count, out);
    else for (int64_t i = 0; i < count; i++) out[i] = widened(((const uint16_t *)values)[first + i]);
}

PART_OF_IT void NAMED(write_values)(const float *restrict values, int32_t kind, int64_t first, int64_t count, void *out) {
    if (kind == VALUES_FLOAT32) NAMED(copy)(values, count, (float *)out + first);
    else for (int64_t i = 0; i < count; i++) ((uint16_t *)out)[first + i] = rounded(values[i]);
}

/* Reads the vectors of a row as float32 (vectors, width): the dense one, then one per feature. */
PART_OF_IT void NAMED(read_vectors)(const rayrec_dots *dots, int64_t row, int64_t width, float *restrict vectors) {
    const int64_t dim = dots->dim, features = dots->vectors - 1;
    NAMED(read_values)(dots->dense, dots->dense_kind, row * dim, dim, vectors);
    for (int64_t feature = 0; feature < features; feature++) {
        float *restrict vector = vectors + (feature + 1) * width;
        NAMED(read_values)(dots->sparse, dots->sparse_kind, (row * features + dots->places[feature]) * dim, dim, vector);
        if (dots->dense_kind != VALUES_FLOAT32) /* products use one value type */
            for (int64_t d = 0; d < dim; d++) vector[d] = widened(rounded(vector[d]));
    }
}

KERNEL int32_t NAMED(rayrec_pairwise_dots)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_dots *dots = arguments;
    const int64_t count = dots->vectors, dim = dots->dim, size = dim + count * (count - 1) / 2;
    const int64_t rows = up_to_multiple(count, QUAD), width = up_to_multiple(dim, QUAD), columns = up_to_multiple(count, 2 * LANES);
    float *room = calloc((size_t)(rows * width + width * columns + QUAD * columns + size + 2 * LANES), sizeof *room);
    if (!room) return 1;
    float *restrict vectors = room, *restrict turned = vectors + rows * width, *restrict products = turned + width * columns;
    float *restrict result = products + QUAD * columns + LANES; /* copies of full lanes may exceed either end */
    for (int64_t row = start; row < stop; row++) {
        NAMED(read_vectors)(dots, row, width, vectors);
        for (int64_t i = 0; i < rows; i += QUAD)
            for (int64_t d = 0; d < width; d += QUAD)
                transpose_tile(vectors + i * width + d, width, turned + d * columns + i, columns);
        NAMED(copy)(vectors, dim, result);
        float *restrict next = result + dim;
        for (int64_t i = 0; i < count - 1; i += QUAD) {
            for (int64_t j = i / LANES * LANES; j < count; j += 2 * LANES) {
                NAMED(lanes) low[QUAD] = {0}, high[QUAD] = {0};
                const int both = j + LANES < count;
                for (int64_t d = 0; d < dim; d++) {
                    const float *others = turned + d * columns + j;
                    for (int b = 0; b < QUAD; b++) low[b] += vectors[(i + b) * width + d] * *(const NAMED(lanes) *)others;
                    if (both)
                        for (int b = 0; b < QUAD; b++)
                            high[b] += vectors[(i + b) * width + d] * *(const NAMED(lanes) *)(others + LANES);
                }
                for (int b = 0; b < QUAD; b++) {
                    *(NAMED(lanes) *)(products + b * columns + j) = low[b];
                    if (both) *(NAMED(lanes) *)(products + b * columns + j + LANES) = high[b];
                }
            }
            for (int64_t b = 0; b < QUAD && i + b < count - 1; b++) {
                const int64_t others = count - 1 - (i + b);
                const float *of_vector = products + b * columns + i + b + 1;
                for (int64_t k = 0; k < others; k += LANES) *(NAMED(lanes) *)(next + k) = *(const NAMED(lanes) *)(of_vector + k);
                next += others; /* the next vector's products overwrite the excess */
            }
        }
        NAMED(write_values)(result, dots->dense_kind, row * size, size, dots->out);
    }
    free(room);
    return 0;
}

KERNEL int32_t NAMED(rayrec_pairwise_dots_backward)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_dots *dots = arguments;
    const int64_t count = dots->vectors, features = count - 1, dim = dots->dim, size = dim + count * features / 2;
    const int64_t rows = up_to_multiple(count, QUAD), width = up_to_multiple(dim, LANES);
    float *room = calloc((size_t)(2 * rows * width + size + QUAD), sizeof *room);
    const float **of_pairs = malloc((size_t)rows * sizeof *of_pairs); /* of_pairs[i][j]: gradient of x_i . x_j, i < j */
    if (!room || !of_pairs) {
        free(room);
        free(of_pairs);
        return 1;
    }
    float *restrict vectors = room, *restrict sums = vectors + rows * width, *restrict given = sums + rows * width;
    const float *next = given + dim;
    for (int64_t i = 0; i < rows; i++) {
        of_pairs[i] = next - (i + 1);
        if (i < features) next += features - i;
    }
    for (int64_t row = start; row < stop; row++) {
        NAMED(read_vectors)(dots, row, width, vectors);
        NAMED(read_values)(dots->out, dots->dense_kind, row * size, size, given);
        /* x_i . x_j adds its gradient times the other vector to both. */
        for (int64_t i = 0; i < count; i += QUAD) {
            float near[QUAD][QUAD] = {0};
            for (int64_t b = 0; b < QUAD && i + b < count; b++)
                for (int64_t c = b + 1; c < QUAD && i + c < count; c++) near[b][c] = near[c][b] = of_pairs[i + b][i + c];
            for (int64_t d = 0; d < width; d += LANES) {
                const float *vector = vectors + d;
                NAMED(lanes) sum[QUAD] = {0};
                int64_t j = 0;
                for (; j < i; j++, vector += width)
                    for (int b = 0; b < QUAD; b++) sum[b] += of_pairs[j][i + b] * *(const NAMED(lanes) *)vector;
                for (; j < i + QUAD; j++, vector += width)
                    for (int b = 0; b < QUAD; b++) sum[b] += near[b][j - i] * *(const NAMED(lanes) *)vector;
                for (; j < count; j++, vector += width)
                    for (int b = 0; b < QUAD; b++) sum[b] += of_pairs[i + b][j] * *(const NAMED(lanes) *)vector;
                for (int b = 0; b < QUAD; b++) *(NAMED(lanes) *)(sums + (i + b) * width + d) = sum[b];
            }
        }
        for (int64_t d = 0; d < dim; d++) sums[d] += given[d];
        NAMED(write_values)(sums, dots->dense_kind, row * dim, dim, dots->dense_gradient);
        for (int64_t feature = 0; feature < features; feature++)
            NAMED(write_values)(sums + (feature + 1) * width, dots->sparse_kind, (row * features + dots->places[feature]) * dim, dim,
                         dots->sparse_gradient);
    }
    free(room);
    free(of_pairs);
    return 0;
}
