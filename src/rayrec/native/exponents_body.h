/* Body of exponents.c for one kind of CPU (`each_cpu.h`). */
#include "lanes_body.h"

KERNEL int32_t NAMED(rayrec_exponents_of_rows)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_exponents *exponents = arguments;
    const int64_t columns = exponents->columns, full = columns / LANES * LANES;
    for (int64_t row = start; row < stop; row++) {
        float *scores = exponents->scores + row * columns;
        NAMED(lanes) large = (NAMED(lanes)){0} - FLT_MAX;
        for (int64_t i = 0; i < full; i += LANES)
            large = NAMED(larger)(*(const NAMED(lanes) *)(scores + i), large);
        float largest = NAMED(largest_of)(large);
        for (int64_t i = full; i < columns; i++) largest = scores[i] > largest ? scores[i] : largest;
        NAMED(lanes) sum = {0};
        for (int64_t i = 0; i < full; i += LANES) {
            NAMED(lanes) *score = (NAMED(lanes) *)(scores + i);
            sum += *score = NAMED(power_of_two)(*score - largest);
        }
        float total = NAMED(sum_of)(sum);
        for (int64_t i = full; i < columns; i++) {
            const NAMED(lanes) one = (NAMED(lanes)){0} + (scores[i] - largest);
            total += scores[i] = NAMED(power_of_two)(one)[0];
        }
        exponents->largest[row] = largest;
        exponents->sums[row] = total;
    }
    return 0;
}
