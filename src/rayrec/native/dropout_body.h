/* Body of dropout.c for one kind of CPU (`each_cpu.h`). */
#include "lanes_body.h"

KERNEL int32_t NAMED(rayrec_drop_values)(const void *arguments, int64_t start, int64_t stop) {
    const rayrec_dropped_values *dropped = arguments;
    const rayrec_dropout dropout = dropped->dropout;
    for (int64_t block = start; block < stop; block++) {
        const uint32_t bits = bits_of_block(dropout.seed, block);
        const int64_t first = block * dropped->block_values, left = dropped->count - first;
        const int64_t count = left < dropped->block_values ? left : dropped->block_values;
        const float *values = dropped->values + first;
        float *out = dropped->out + first;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const NAMED(lanes) scaled = *(const NAMED(lanes) *)(values + i) * dropout.factor;
            const NAMED(whole_lanes) kept = NAMED(are_kept)(bits, i, dropout.threshold);
            *(NAMED(lanes) *)(out + i) = (NAMED(lanes))((NAMED(whole_lanes))scaled & kept);
        }
        if (i == count) continue;
        const NAMED(whole_lanes) kept = NAMED(are_kept)(bits, i, dropout.threshold);
        for (int64_t lane = 0; i + lane < count; lane++) out[i + lane] = kept[lane] ? values[i + lane] * dropout.factor : 0;
    }
    return 0;
}
