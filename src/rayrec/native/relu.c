/* The backward pass of a ReLU, with what the layer before it needs of its result. */
#include "kernels.h"
#include "vectors.h"

/* Rows and columns from the first that are given, fewer than LANES of either. */
PART_OF_IT void of_edge(const rayrec_relu *relu, int64_t row, int64_t rows, int64_t column, int64_t columns, float *sums) {
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t c = column; c < column + columns; c++) {
            float *gradient = relu->gradient + r * relu->columns + c;
            if (relu->output[r * relu->columns + c] <= 0) *gradient = 0; /* NaN lets it pass, as in torch */
            relu->turned[c * relu->rows + r] = *gradient;
            sums[c] += *gradient;
        }
}

PART_OF_IT void of_tile(const rayrec_relu *relu, int64_t row, int64_t column, float *sums) {
    const int64_t width = relu->columns;
    float *gradient = relu->gradient + row * width + column, *turned = relu->turned + column * relu->rows + row;
    const float *output = relu->output + row * width + column;
    lanes sum = *(const lanes *)(sums + column);
    for (int r = 0; r < LANES; r++) {
        const lanes value = *(const lanes *)(output + r * width), given = *(const lanes *)(gradient + r * width);
        const lanes kept = (lanes)((whole_lanes)given & ~(whole_lanes)(value <= 0));
        *(lanes *)(gradient + r * width) = kept;
        sum += kept;
    }
    *(lanes *)(sums + column) = sum;
    for (int c = 0; c < LANES; c += QUAD) /* the cache lines of four columns at a time, each written whole */
        for (int r = 0; r < LANES; r += QUAD)
            transpose_tile(gradient + r * width + c, width, turned + c * relu->rows + r, relu->rows);
}

VECTORIZED int32_t rayrec_relu_backward(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_relu *relu = arguments;
    const int64_t width = relu->columns;
    for (int64_t block = start; block < stop; block++) {
        const int64_t first = block * RELU_BLOCK, end = first + RELU_BLOCK < relu->rows ? first + RELU_BLOCK : relu->rows;
        float *sums = relu->sums + block * width;
        int64_t column = 0;
        for (; column + LANES <= width; column += LANES) {
            int64_t row = first;
            for (; row + LANES <= end; row += LANES) of_tile(relu, row, column, sums);
            of_edge(relu, row, end - row, column, LANES, sums);
        }
        of_edge(relu, first, end - first, column, width - column, sums);
    }
    return 0;
}
