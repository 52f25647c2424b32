/* Body of relu.c for one kind of CPU (`each_cpu.h`). */

/* Rows and columns at an edge, fewer than TILE of either. */
PART_OF_IT void NAMED(of_edge)(const rayrec_relu *relu, int64_t row, int64_t rows, int64_t column, int64_t columns, float *sums) {
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t c = column; c < column + columns; c++) {
            float *gradient = relu->gradient + r * relu->columns + c;
            const int is_off = relu->output && relu->output[r * relu->columns + c] <= 0; /* NaN passes the gradient, like torch */
            if (is_off) *gradient = 0;
            relu->turned[c * relu->rows + r] = *gradient;
            sums[c] += *gradient;
        }
}

PART_OF_IT void NAMED(of_tile)(const rayrec_relu *relu, int64_t row, int64_t column, float *sums) {
    const int64_t width = relu->columns;
    float *gradient = relu->gradient + row * width + column, *turned = relu->turned + column * relu->rows + row;
    for (int c = 0; c < TILE; c += LANES) {
        NAMED(lanes) sum = *(const NAMED(lanes) *)(sums + column + c);
        for (int r = 0; r < TILE; r++) {
            NAMED(lanes) *given = (NAMED(lanes) *)(gradient + r * width + c);
            if (relu->output) {
                const NAMED(lanes) value = *(const NAMED(lanes) *)(relu->output + (row + r) * width + column + c);
                *given = (NAMED(lanes))((NAMED(whole_lanes))*given & ~(NAMED(whole_lanes))(value <= 0));
            }
            sum += *given;
        }
        *(NAMED(lanes) *)(sums + column + c) = sum;
    }
    for (int c = 0; c < TILE; c += QUAD)
        for (int r = 0; r < TILE; r += QUAD)
            transpose_tile(gradient + r * width + c, width, turned + c * relu->rows + r, relu->rows);
}

KERNEL int32_t NAMED(rayrec_relu_backward)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_relu *relu = arguments;
    const int64_t width = relu->columns;
    for (int64_t block = start; block < stop; block++) {
        const int64_t first = block * relu->block_rows, behind = first + relu->block_rows;
        const int64_t end = behind < relu->rows ? behind : relu->rows;
        float *sums = relu->sums + block * width;
        int64_t column = 0;
        for (; column + TILE <= width; column += TILE) {
            int64_t row = first;
            for (; row + TILE <= end; row += TILE) NAMED(of_tile)(relu, row, column, sums);
            NAMED(of_edge)(relu, row, end - row, column, TILE, sums);
        }
        NAMED(of_edge)(relu, first, end - first, column, width - column, sums);
    }
    return 0;
}
