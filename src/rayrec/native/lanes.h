/* What vector functions of all CPUs share (`lanes_body.h`). */
#ifndef RAYREC_LANES_H
#define RAYREC_LANES_H

#include "kernels.h"
#include "vectors.h"

static const int32_t rayrec_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Random bits of a block of dropout. */
PART_OF_IT uint32_t bits_of_block(uint64_t seed, int64_t block) {
    return (uint32_t)rayrec_mix(seed + (uint64_t)block * 0x9E3779B97F4A7C15ULL);
}

#endif
