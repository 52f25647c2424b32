/* Dot products of all pairs of a row's vectors, and their gradients: DLRM's interaction. */
#include "kernels.h"
#include "vectors.h"

#include <stdlib.h>
#include <string.h>

static int64_t up_to_multiple(int64_t value, int64_t of) { return (value + of - 1) / of * of; }

PART_OF_IT float widened(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* Rounds to the nearest bfloat16, ties to even, like torch. */
PART_OF_IT uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest);
}

#define BODY "dots_body.h"
#include "each_cpu.h"
