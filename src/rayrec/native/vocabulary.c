/* Counts categories and builds the open-addressing tables that map them to ids. */

#include "kernels.h"

#include <stddef.h>

/* Adds `amount` to a token's count. Free slots have count 0. Returns whether the token is new. */
static inline int add_count(uint32_t token, int64_t amount, uint32_t *keys, int64_t *counts, uint64_t mask) {
    /* The high bits of the product are the well-mixed ones. */
    uint64_t position = ((uint64_t)token * 0x9E3779B97F4A7C15ULL >> 32) & mask;
    while (counts[position] != 0) {
        if (keys[position] == token) {
            counts[position] += amount;
            return 0;
        }
        position = (position + 1) & mask;
    }
    keys[position] = token;
    counts[position] = amount;
    return 1;
}

/* Counts the present tokens of one column (`stride` tokens apart; absent where `bit` of missing is set) into a table
 * that already holds `used` tokens. Returns the new number of tokens, or -(rows done) - 1 when the table is two thirds
 * full: grow it and go on from there. `slots` is a power of two. */
int64_t rayrec_count_column(const uint32_t *tokens, const uint64_t *missing, int64_t rows, int64_t stride, int32_t bit,
                            uint32_t *keys, int64_t *counts, int64_t slots, int64_t used) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int64_t limit = slots / 3 * 2;
    for (int64_t row = 0; row < rows; row++) {
        if (missing[row] >> bit & 1) continue;
        if (used >= limit) return -row - 1;
        used += add_count(tokens[row * stride], 1, keys, counts, mask);
    }
    return used;
}

/* The same for tokens that come with amounts, one after the other. */
int64_t rayrec_count_merge(const uint32_t *tokens, const int64_t *amounts, int64_t count, uint32_t *keys,
                           int64_t *counts, int64_t slots, int64_t used) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int64_t limit = slots / 3 * 2;
    for (int64_t i = 0; i < count; i++) {
        if (used >= limit) return -i - 1;
        used += add_count(tokens[i], amounts[i], keys, counts, mask);
    }
    return used;
}

/* Fills `out` (slots entries, zeroed, a power of two above count) so that token i has id first_id + i.
 * Returns 0, or -1 where a token comes twice. */
int32_t rayrec_build_slots(const uint32_t *tokens, int64_t count, int32_t first_id, uint64_t *out, int64_t slots) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int shift = 32 - __builtin_ctzll((uint64_t)slots);
    for (int64_t i = 0; i < count; i++) {
        uint64_t position = (uint32_t)(tokens[i] * 2654435769U) >> shift;
        while (out[position] != 0) {
            if ((uint32_t)(out[position] >> 32) == tokens[i]) return -1;
            position = (position + 1) & mask;
        }
        out[position] = (uint64_t)tokens[i] << 32 | (uint32_t)(first_id + i + 1);
    }
    return 0;
}

enum { AHEAD = 64 };

/* Ids of present tokens of one vocabulary column. */
void rayrec_look_up(const uint32_t *tokens, int64_t count, const rayrec_sparse_column *column, int32_t *out) {
    uint64_t positions[AHEAD];
    for (int64_t base = 0; base < count; base += AHEAD) {
        const int n = (int)(count - base < AHEAD ? count - base : AHEAD);
        for (int i = 0; i < n; i++) {
            positions[i] = (uint32_t)(tokens[base + i] * 2654435769U) >> column->shift;
            __builtin_prefetch(&column->slots[positions[i]]);
        }
        for (int i = 0; i < n; i++) {
            uint64_t position = positions[i], slot;
            int32_t id = column->unknown_id;
            while ((slot = column->slots[position]) != 0) {
                if ((uint32_t)(slot >> 32) == tokens[base + i]) {
                    id = (int32_t)(uint32_t)slot - 1;
                    break;
                }
                position = (position + 1) & column->mask;
            }
            out[base + i] = id;
        }
    }
}
