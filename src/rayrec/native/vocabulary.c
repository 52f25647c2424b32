/* Builds and reads the open-addressing tables that map categories to ids. */

#include "kernels.h"

#include <stddef.h>

/* Fills `out` (slots entries, zeroed, a power of two above count) so that token i has id ids[i].
 * Returns 0, or -1 where a token comes twice. */
int32_t rayrec_build_slots(const uint32_t *tokens, const int32_t *ids, int64_t count, uint64_t *out, int64_t slots) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int shift = 32 - __builtin_ctzll((uint64_t)slots);
    for (int64_t i = 0; i < count; i++) {
        uint64_t position = (uint32_t)(tokens[i] * 2654435769U) >> shift;
        while (out[position] != 0) {
            if ((uint32_t)(out[position] >> 32) == tokens[i]) return -1;
            position = (position + 1) & mask;
        }
        out[position] = (uint64_t)tokens[i] << 32 | ((uint32_t)ids[i] + 1u);
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
            int32_t id = (int32_t)column->unknown_id;
            while ((slot = column->slots[position]) != 0) {
                if ((uint32_t)(slot >> 32) == tokens[base + i]) {
                    id = (int32_t)((uint32_t)slot - 1u);
                    break;
                }
                position = (position + 1) & column->mask;
            }
            out[base + i] = id;
        }
    }
}
