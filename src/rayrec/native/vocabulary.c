/* Open-addressing tables that map categories to ids. A slot is one word (token << 32 | id + 1) for 32-bit tokens, two (token, id + 1)
 * for 64-bit tokens; 0 if free. */

#include "kernels.h"

#include <stddef.h>

#define INLINE static inline __attribute__((always_inline)) /* `wide` is a constant when inlined */

INLINE uint64_t token_at(const void *tokens, int64_t i, const int wide) {
    return wide ? ((const uint64_t *)tokens)[i] : ((const uint32_t *)tokens)[i];
}

/* Folds in the upper half, so that tokens that differ only there spread too. The high bits of a product are mixed best. */
INLINE uint64_t position_of(uint64_t token, int bits, const int wide) {
    return wide ? (token ^ token >> 32) * 0x9E3779B97F4A7C15ULL >> (64 - bits)
                : (uint64_t)((uint32_t)token * 2654435769U >> (32 - bits));
}

/* Returns id + 1, 0 if the slot is free. */
INLINE uint32_t id_of(const uint64_t *slot, const int wide) { return (uint32_t)slot[wide]; }

INLINE uint64_t token_of(const uint64_t *slot, const int wide) { return wide ? *slot : *slot >> 32; }

INLINE int32_t build(const void *tokens, const int32_t *ids, int64_t count, uint64_t *out, int64_t slots, const int wide) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int bits = __builtin_ctzll((uint64_t)slots);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t token = token_at(tokens, i, wide), id = (uint32_t)ids[i] + 1u;
        uint64_t position = position_of(token, bits, wide), *slot;
        for (; slot = out + (position << wide), id_of(slot, wide) != 0; position = (position + 1) & mask)
            if (token_of(slot, wide) == token) return -1;
        if (wide) slot[0] = token, slot[1] = id;
        else *slot = token << 32 | id;
    }
    return 0;
}

/* Fills `table` (zeroed, a power of two of slots, above count) so that token i, of `token_bytes` 4 or 8, has id ids[i]. Returns 0,
 * or -1 for a repeated token. */
int32_t rayrec_build_slots(const void *tokens, int32_t token_bytes, const int32_t *ids, int64_t count, uint64_t *table,
                           int64_t slots) {
    return token_bytes == 8 ? build(tokens, ids, count, table, slots, 1) : build(tokens, ids, count, table, slots, 0);
}

enum { AHEAD = 64 };

INLINE void look_up(const void *tokens, int64_t count, const uint64_t *table, int64_t slots, int32_t unknown_id, int32_t *out,
                    const int wide) {
    const uint64_t mask = (uint64_t)slots - 1;
    const int bits = __builtin_ctzll((uint64_t)slots);
    uint64_t positions[AHEAD];
    for (int64_t base = 0; base < count; base += AHEAD) {
        const int n = (int)(count - base < AHEAD ? count - base : AHEAD);
        for (int i = 0; i < n; i++) {
            positions[i] = position_of(token_at(tokens, base + i, wide), bits, wide);
            __builtin_prefetch(&table[positions[i] << wide]);
        }
        for (int i = 0; i < n; i++) {
            const uint64_t token = token_at(tokens, base + i, wide), *slot;
            int32_t found = unknown_id;
            for (uint64_t position = positions[i]; slot = table + (position << wide), id_of(slot, wide) != 0;
                 position = (position + 1) & mask) {
                if (token_of(slot, wide) == token) {
                    found = (int32_t)(id_of(slot, wide) - 1u);
                    break;
                }
            }
            out[base + i] = found;
        }
    }
}

/* Looks up the ids of tokens of `token_bytes` 4 or 8 in a table of rayrec_build_slots; unknown_id if absent. */
void rayrec_look_up(const void *tokens, int32_t token_bytes, int64_t count, const uint64_t *table, int64_t slots,
                    int32_t unknown_id, int32_t *out) {
    if (token_bytes == 8) look_up(tokens, count, table, slots, unknown_id, out, 1);
    else look_up(tokens, count, table, slots, unknown_id, out, 0);
}
