/* Key index of a side table, which finds the rows of keys (data/features/side_table.py). Plain arrays:
 *
 *   keys     uint64 (num_keys)      64-bit token of each key, all different. Without times, key k is that of row k
 *   slots    uint32 (num_slots)     open addressing with linear probing: k + 1, 0 if free. A power of two, at least 2 * num_keys
 *
 * In a table with times, a key has a run of rows:
 *
 *   starts   int64 (num_keys + 1)   the run of key k is the positions starts[k] to starts[k + 1] - 1
 *   times    int64 (num_rows)       time of each position, rising within a run
 *   rows     int64 (num_rows)       row of each position
 *
 * A slot of 4 bytes and a key of 8 take at most 24 bytes a key, half of slots with keys inside. Their two cache misses overlap with
 * those of other lookups.
 *
 * Arrays belong to the caller, who keeps them mapped until the kernel returns: those of lookups are read-only views of a file that
 * processes share. Kernels allocate nothing and keep no pointer. The file may be damaged, so that lookups check every number and
 * end after num_slots probes; they may then find a wrong row, but read nothing outside the arrays. */

#include "kernels.h"

enum { AHEAD = 64, NEAR = 16 }; /* lookups whose cache misses overlap */

/* Folds in the upper half, so that keys that differ only there spread too. The high bits of a product are mixed best. */
static inline uint64_t slot_of(uint64_t key, int bits) { return (key ^ key >> 32) * 0x9E3779B97F4A7C15ULL >> (64 - bits); }

/* Fills `slots` (zeroed, at least 2) with the numbers of keys. Returns the number of keys that an earlier one equals, and writes
 * the numbers of the first such pair, the earlier one first, to `pair`. */
int64_t rayrec_build_key_slots(const uint64_t *keys, int64_t num_keys, uint32_t *slots, int64_t num_slots, int64_t *pair) {
    const uint64_t mask = (uint64_t)num_slots - 1;
    const int bits = __builtin_ctzll((uint64_t)num_slots);
    int64_t repeated = 0;
    for (int64_t k = 0; k < num_keys; k++) {
        if (k + AHEAD < num_keys) __builtin_prefetch(&slots[slot_of(keys[k + AHEAD], bits)], 1);
        uint64_t slot = slot_of(keys[k], bits);
        while (slots[slot] && keys[slots[slot] - 1] != keys[k]) slot = (slot + 1) & mask;
        if (!slots[slot]) slots[slot] = (uint32_t)k + 1u;
        else if (!repeated++) pair[0] = slots[slot] - 1, pair[1] = k;
    }
    return repeated;
}

/* Writes the number of each token's key to `out`, -1 if it is absent, or if missing[i] is set (`missing` may be NULL). */
void rayrec_find_keys(const uint64_t *tokens, const uint8_t *missing, int64_t count, const uint64_t *keys, int64_t num_keys,
                      const uint32_t *slots, int64_t num_slots, int64_t *out) {
    const uint64_t mask = (uint64_t)num_slots - 1;
    const int bits = __builtin_ctzll((uint64_t)num_slots);
    uint64_t first[AHEAD];
    for (int64_t base = 0; base < count; base += AHEAD) {
        const int n = (int)(count - base < AHEAD ? count - base : AHEAD);
        for (int i = 0; i < n; i++) {
            first[i] = slot_of(tokens[base + i], bits);
            __builtin_prefetch(&slots[first[i]]);
        }
        for (int i = 0; i < n; i++) {
            const uint32_t number = slots[first[i]];
            if (number && number <= num_keys) __builtin_prefetch(&keys[number - 1]);
        }
        for (int i = 0; i < n; i++) {
            const uint64_t token = tokens[base + i];
            int64_t found = -1;
            if (!missing || !missing[base + i]) {
                uint64_t slot = first[i];
                for (int64_t probes = 0; probes < num_slots && slots[slot] && slots[slot] <= num_keys; probes++) {
                    if (keys[slots[slot] - 1] == token) {
                        found = slots[slot] - 1;
                        break;
                    }
                    slot = (slot + 1) & mask;
                }
            }
            out[base + i] = found;
        }
    }
}

/* Replaces the number of each key in `found` by the newest row of its run whose time is at most at[i]. -1 stays, and replaces a key
 * without such a row. */
void rayrec_newest_rows(const int64_t *at, int64_t count, const int64_t *starts, const int64_t *times, const int64_t *rows,
                        int64_t num_rows, int64_t *found) {
    for (int64_t i = 0; i < count; i++) {
        if (i + NEAR < count && found[i + NEAR] >= 0) {
            const int64_t next = starts[found[i + NEAR]];
            if (next >= 0 && next < num_rows) __builtin_prefetch(&times[next]), __builtin_prefetch(&rows[next]);
        }
        if (i + 2 * NEAR < count && found[i + 2 * NEAR] >= 0) __builtin_prefetch(&starts[found[i + 2 * NEAR]]);
        if (found[i] < 0) continue;
        const int64_t start = starts[found[i]], end = starts[found[i] + 1];
        int64_t low = start, high = end;
        found[i] = -1;
        if (start < 0 || end > num_rows) continue;
        while (low < high) { /* positions before `low` are not after at[i], those from `high` on are */
            const int64_t middle = low + (high - low) / 2;
            if (times[middle] <= at[i]) low = middle + 1;
            else high = middle;
        }
        if (low > start) found[i] = rows[low - 1];
    }
}
