/* Category counts in open-addressing tables, and moments of integer columns. */

#include "kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { TILE = 256 }; /* rows counted together: their tokens, 26 KB, stay in the L1 cache for all columns */

/* A table may be two thirds full; beyond that, probes grow long. */
static inline int64_t room(const rayrec_counter *counter) { return counter->size / 3 * 2 - counter->used; }

/* Folds in the upper half, so that tokens that differ only there spread too. The high bits of a product are mixed best. */
static inline uint64_t spread(uint64_t token, uint64_t factor) { return (token ^ token >> 32) * factor; }

/* Independent of table positions, so that the tokens of one partition spread over a table. */
static inline uint64_t partition_hash(uint64_t token) {
    const uint64_t mixed = spread(token, 0xD6E8FEB86659FD93ULL);
    return spread(mixed, 0xA24BAED4963EE407ULL);
}

static inline uint64_t token_at(const void *tokens, int32_t token_bytes, int64_t i) {
    return token_bytes == 4 ? ((const uint32_t *)tokens)[i] : ((const uint64_t *)tokens)[i];
}

static inline void set_token(void *tokens, int32_t token_bytes, int64_t i, uint64_t token) {
    if (token_bytes == 4) ((uint32_t *)tokens)[i] = (uint32_t)token;
    else ((uint64_t *)tokens)[i] = token;
}

/* Adds up to TILE tokens, which must fit. `amounts` NULL: one each. `words` is that of the counter, a constant when inlined. */
static inline __attribute__((always_inline)) void add_tile(const uint64_t *tokens, const int64_t *amounts,
                                                           const int64_t *rows, int count, rayrec_counter *counter,
                                                           const int words) {
    uint64_t *const slots = counter->slots;
    const uint64_t mask = (uint64_t)counter->size - 1;
    const uint64_t factor = counter->factor;
    const int32_t shift = counter->shift;
    uint32_t positions[TILE]; /* a table has less than 2^32 slots */
    for (int i = 0; i < count; i++) {
        positions[i] = (uint32_t)(spread(tokens[i], factor) >> shift);
        __builtin_prefetch(slots + (uint64_t)positions[i] * words, 1);
    }
    int64_t used = counter->used;
    for (int i = 0; i < count; i++) {
        const uint64_t token = tokens[i];
        uint64_t position = positions[i];
        uint64_t *slot;
        while (slot = slots + position * words, slot[1] != 0 && slot[0] != token) position = (position + 1) & mask;
        if (slot[1] == 0) {
            slot[0] = token;
            used++;
            if (words == 3) slot[2] = (uint64_t)rows[i];
        } else if (words == 3 && rows[i] < (int64_t)slot[2]) {
            slot[2] = (uint64_t)rows[i];
        }
        slot[1] += amounts ? (uint64_t)amounts[i] : 1;
    }
    counter->used = used;
}

static void add(const uint64_t *tokens, const int64_t *amounts, const int64_t *rows, int count, rayrec_counter *counter) {
    if (counter->words == 3) add_tile(tokens, amounts, rows, count, counter, 3);
    else if (amounts) add_tile(tokens, amounts, NULL, count, counter, 2);
    else add_tile(tokens, NULL, NULL, count, counter, 2);
}

/* Counts the present tokens of the first `columns` columns in rows of `stride` tokens. Column c is absent if bit first_bit + c of
 * `missing` is set; absences[2 c] and [2 c + 1] are the number of such rows and the first one. Row r has number first_row + r.
 * Returns the rows done: fewer than `rows` if a table lacks room for TILE more tokens. Grow every such table and resume there. */
int64_t rayrec_count_rows(const void *tokens, int32_t token_bytes, const uint64_t *missing, int64_t rows, int64_t stride,
                          int32_t first_bit, int32_t columns, int64_t first_row, rayrec_counter *const *counters,
                          int64_t *absences) {
    uint64_t present[TILE];
    int64_t numbers[TILE];
    for (int64_t base = 0; base < rows; base += TILE) {
        const int count = (int)(rows - base < TILE ? rows - base : TILE);
        for (int c = 0; c < columns; c++)
            if (room(counters[c]) < TILE) return base;
        for (int c = 0; c < columns; c++) {
            const int bit = first_bit + c;
            const int with_rows = counters[c]->words == 3;
            int n = 0;
            for (int i = 0; i < count; i++) {
                present[n] = token_at(tokens, token_bytes, (base + i) * stride + c);
                if (with_rows) numbers[n] = first_row + base + i;
                n += !(missing[base + i] >> bit & 1);
            }
            if (n < count) {
                int first = 0;
                while (!(missing[base + first] >> bit & 1)) first++;
                absences[2 * c] += count - n;
                if (first_row + base + first < absences[2 * c + 1]) absences[2 * c + 1] = first_row + base + first;
            }
            add(present, NULL, numbers, n, counters[c]);
        }
    }
    return rows;
}

/* Adds contiguous tokens with their amounts (NULL: one each) and, if the counter keeps first rows, their rows plus `shift_rows`.
 * Returns the number done: fewer than `count` if the table lacks room for TILE more. */
int64_t rayrec_count_values(const void *tokens, int32_t token_bytes, const int64_t *amounts, const int64_t *rows,
                            int64_t shift_rows, int64_t count, rayrec_counter *counter) {
    uint64_t values[TILE];
    int64_t numbers[TILE];
    for (int64_t base = 0; base < count; base += TILE) {
        const int n = (int)(count - base < TILE ? count - base : TILE);
        if (room(counter) < TILE) return base;
        for (int i = 0; i < n; i++) values[i] = token_at(tokens, token_bytes, base + i);
        if (counter->words == 3)
            for (int i = 0; i < n; i++) numbers[i] = rows[base + i] + shift_rows;
        add(values, amounts ? amounts + base : NULL, numbers, n, counter);
    }
    return count;
}

/* Moves all tokens into a larger, empty table. */
void rayrec_count_move(const rayrec_counter *from, rayrec_counter *to) {
    const int words = from->words;
    const uint64_t mask = (uint64_t)to->size - 1;
    for (int64_t i = 0; i < from->size; i++) {
        const uint64_t *slot = from->slots + i * words;
        if (slot[1] == 0) continue;
        uint64_t position = spread(slot[0], to->factor) >> to->shift;
        while (to->slots[position * words + 1] != 0) position = (position + 1) & mask;
        memcpy(to->slots + position * words, slot, (size_t)words * sizeof(uint64_t));
    }
    to->used = from->used;
}

/* Writes the tokens counted at least min_count times, with counts and first rows (each may be NULL), ordered by partition:
 * partition p of 2^partition_bits is at [offsets[p], offsets[p + 1]). Returns their number; with `tokens` NULL, only counts. */
int64_t rayrec_count_items(const rayrec_counter *counter, int64_t min_count, int32_t token_bytes, int32_t partition_bits,
                           int64_t *offsets, void *tokens, int64_t *counts, int64_t *rows) {
    const int words = counter->words;
    const int64_t partitions = (int64_t)1 << partition_bits;
    const uint64_t *const slots = counter->slots;
    memset(offsets, 0, (size_t)(partitions + 1) * sizeof *offsets);
    for (int64_t i = 0; i < counter->size; i++) {
        const uint64_t *slot = slots + i * words;
        if (slot[1] == 0 || (int64_t)slot[1] < min_count) continue;
        offsets[(partition_bits ? (int64_t)(partition_hash(slot[0]) >> (64 - partition_bits)) : 0) + 1]++;
    }
    for (int64_t p = 0; p < partitions; p++) offsets[p + 1] += offsets[p];
    const int64_t total = offsets[partitions];
    if (!tokens) return total;
    for (int64_t i = 0; i < counter->size; i++) {
        const uint64_t *slot = slots + i * words;
        if (slot[1] == 0 || (int64_t)slot[1] < min_count) continue;
        const int64_t p = partition_bits ? (int64_t)(partition_hash(slot[0]) >> (64 - partition_bits)) : 0;
        const int64_t place = offsets[p]++;
        set_token(tokens, token_bytes, place, slot[0]);
        if (counts) counts[place] = (int64_t)slot[1];
        if (rows) rows[place] = (int64_t)slot[2];
    }
    for (int64_t p = partitions; p > 0; p--) offsets[p] = offsets[p - 1];
    offsets[0] = 0;
    return total;
}

/* Moves the tokens of `partition`, one of 2^partition_bits, to the front. Returns their number. */
int64_t rayrec_select_partition(void *tokens, int32_t token_bytes, int64_t *counts, int64_t *rows, int64_t count,
                                int32_t partition_bits, int64_t partition) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t token = token_at(tokens, token_bytes, i);
        if ((int64_t)(partition_hash(token) >> (64 - partition_bits)) != partition) continue;
        set_token(tokens, token_bytes, kept, token);
        counts[kept] = counts[i];
        if (rows) rows[kept] = rows[i];
        kept++;
    }
    return kept;
}

/* sign(x) ln(1 + |x|), rounded to float32, in units of 1 / units. */
static inline int64_t fixed_log(int64_t value, double units) {
    const double magnitude = log1p(fabs((double)value));
    return (int64_t)rint((double)(float)(value < 0 ? -magnitude : magnitude) * units);
}

enum { SMALL_FROM = -16, SMALL_COUNT = 16384 };

int64_t rayrec_num_small_logs(void) { return SMALL_COUNT; }

/* Writes the logarithms of small integers for rayrec_dense_moments (rayrec_num_small_logs entries). */
void rayrec_small_logs(double units, int32_t *out) {
    for (int i = 0; i < SMALL_COUNT; i++) out[i] = (int32_t)fixed_log(SMALL_FROM + i, units);
}

/* Adds to moments int64 (columns, 4) over present values: their number, the sum of q = fixed_log(x), and the sums of q * q above
 * and below bit low_bits. Bit d of `missing` belongs to column d. */
void rayrec_dense_moments(const int64_t *integers, const uint64_t *missing, int64_t rows, int32_t columns, double units,
                          int32_t low_bits, const int32_t *small, int64_t *moments) {
    const int64_t low_mask = ((int64_t)1 << low_bits) - 1;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t *values = integers + row * columns;
        const uint64_t absent = missing[row];
        for (int d = 0; d < columns; d++) {
            const int64_t there = !(absent >> d & 1);
            const int64_t value = there ? values[d] : 0; /* 0 adds nothing to the sums */
            const uint64_t place = (uint64_t)(value - SMALL_FROM);
            const int64_t q = place < SMALL_COUNT ? small[place] : fixed_log(value, units);
            const int64_t square = q * q;
            moments[4 * d] += there;
            moments[4 * d + 1] += q;
            moments[4 * d + 2] += square >> low_bits;
            moments[4 * d + 3] += square & low_mask;
        }
    }
}

/* Adds finite numbers and their squares to bins uint64 (2048, 4), by exponent. A number is m * 2^(e - 1075) with the integer m and
 * e = max(exponent bits, 1). Bin e has the sum of m as a signed number of 128 bits and the sum of m * m as an unsigned one, each
 * with the lower half first: exact in any order, with room for 2^20 numbers. Lowers range[0] to the smallest number and raises
 * range[1] to the largest. Returns the number of infinities and NaN, which are not added. */
int64_t rayrec_exact_sums(const double *values, int64_t count, uint64_t *bins, double *range) {
    const uint64_t fraction_mask = ((uint64_t)1 << 52) - 1;
    int64_t not_finite = 0;
    double smallest = range[0], largest = range[1];
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        const uint64_t exponent = bits >> 52 & 2047;
        if (exponent == 2047) {
            not_finite++;
            continue;
        }
        const int64_t magnitude = (int64_t)((bits & fraction_mask) | (uint64_t)(exponent != 0) << 52);
        const int64_t m = bits >> 63 ? -magnitude : magnitude;
        uint64_t *bin = bins + 4 * (exponent ? exponent : 1);
        const unsigned __int128 sum = ((unsigned __int128)bin[1] << 64 | bin[0]) + (unsigned __int128)(__int128)m;
        bin[0] = (uint64_t)sum;
        bin[1] = (uint64_t)(sum >> 64);
        const unsigned __int128 squares =
            ((unsigned __int128)bin[3] << 64 | bin[2]) + (unsigned __int128)magnitude * (unsigned __int128)magnitude;
        bin[2] = (uint64_t)squares;
        bin[3] = (uint64_t)(squares >> 64);
        if (values[i] < smallest) smallest = values[i];
        if (values[i] > largest) largest = values[i];
    }
    range[0] = smallest;
    range[1] = largest;
    return not_finite;
}
