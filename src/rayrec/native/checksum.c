/* 64-bit checksum at memory speed, to detect changes, not attacks. */

#include <string.h>

#include "kernels.h"

enum { LANES = 8, STRIPE = LANES * 8 };

static const uint64_t PRIME = 0x9E3779B185EBCA87ull; /* odd, so that multiplication is invertible */

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

/* Each step is invertible in the lane and in the word: two texts that differ in one word always differ after it. Lanes are
 * independent, so that the processor computes all of them at once. */
static void add_stripe(uint64_t *lanes, const uint8_t *data) {
    for (int i = 0; i < LANES; i++) {
        uint64_t word;
        memcpy(&word, data + 8 * i, 8);
        lanes[i] = rotate((lanes[i] ^ word) * PRIME, 29);
    }
}

int64_t rayrec_checksum(const uint8_t *data, int64_t length) {
    uint64_t lanes[LANES];
    for (int i = 0; i < LANES; i++)
        lanes[i] = PRIME * (uint64_t)(2 * i + 1);
    int64_t done = 0;
    for (; done + STRIPE <= length; done += STRIPE)
        add_stripe(lanes, data + done);
    uint8_t last[STRIPE] = {0};
    if (length > done)
        memcpy(last, data + done, (size_t)(length - done));
    add_stripe(lanes, last);
    uint64_t sum = (uint64_t)length * PRIME;
    for (int i = 0; i < LANES; i++) {
        sum = rotate((sum ^ lanes[i]) * PRIME, 31);
        sum ^= sum >> 29;
    }
    return (int64_t)(sum >> 1);
}
