/* Functions of formulas over numbers, texts and lists of texts (data/features/functions.py). Text i is data[offsets[i], offsets[i + 1]).
 * Where `offsets` may be NULL, the column has integers instead: integer i is ((const int64_t *)data)[i], aligned.
 *
 * Arrays belong to the caller. Kernels allocate nothing and keep no pointer. */

#include "kernels.h"

#include <string.h>

typedef struct {
    const int64_t *offsets; /* NULL for integers */
    const void *data;
} column;

static inline int64_t integer(const column *integers, int64_t i) { return ((const int64_t *)integers->data)[i]; }

static inline const uint8_t *text_at(const column *texts, int64_t i) {
    return (const uint8_t *)texts->data + texts->offsets[i];
}

static inline int64_t size_of(const column *texts, int64_t i) { return texts->offsets[i + 1] - texts->offsets[i]; }

/* Both columns are texts, or both integers. */
static inline int are_equal(const column *left, int64_t i, const column *right, int64_t j) {
    if (!left->offsets) return integer(left, i) == integer(right, j);
    const int64_t size = size_of(left, i);
    return size == size_of(right, j) && !memcmp(text_at(left, i), text_at(right, j), (size_t)size);
}

/* Mixes eight bytes at a time. Equal values have equal hashes; others are compared, so that the hash need not be a good one. */
static inline uint64_t hash_of(const column *texts, int64_t i) {
    if (!texts->offsets) {
        const uint64_t product = (uint64_t)integer(texts, i) * 0x9E3779B97F4A7C15ULL;
        return product ^ product >> 32;
    }
    const uint8_t *p = text_at(texts, i);
    int64_t size = size_of(texts, i);
    uint64_t hash = (uint64_t)size, word;
    for (; size >= 8; size -= 8, p += 8) {
        memcpy(&word, p, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 32;
    }
    word = 0;
    for (int64_t k = 0; k < size; k++) word = word << 8 | p[k];
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
    return hash ^ hash >> 32;
}

/* Returns the bytes of the character at `p`, and whether it is one of `separators`, one byte for each code point below 2^16. */
static inline int64_t character(const uint8_t *p, const uint8_t *end, const uint8_t *separators, int *is_separator) {
    const uint32_t first = *p;
    if (first < 0x80) {
        *is_separator = separators[first];
        return 1;
    }
    if (first < 0xE0 && end - p >= 2) {
        *is_separator = separators[(first & 0x1F) << 6 | (p[1] & 0x3F)];
        return 2;
    }
    if (first < 0xF0 && end - p >= 3) {
        *is_separator = separators[(first & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F)];
        return 3;
    }
    *is_separator = 0;
    return end - p < 4 ? end - p : 4;
}

/* Writes the runs of other characters than separators: their number in each text, the ends of their bytes, and the bytes. Room for
 * (bytes + count) / 2 runs is enough. Texts are valid UTF-8. Returns the number of runs. */
int64_t rayrec_text_runs(const int64_t *offsets, const uint8_t *data, int64_t count, const uint8_t *separators, int64_t *lengths,
                         int64_t *ends, uint8_t *runs_data) {
    uint8_t *out = runs_data;
    int64_t runs = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i], *const end = data + offsets[i + 1];
        const int64_t before = runs;
        int inside = 0;
        while (p < end) {
            int is_separator;
            const int64_t size = character(p, end, separators, &is_separator);
            if (is_separator) {
                if (inside) ends[runs++] = out - runs_data;
            } else {
                for (int64_t k = 0; k < size; k++) *out++ = p[k];
            }
            inside = !is_separator;
            p += size;
        }
        if (inside) ends[runs++] = out - runs_data;
        lengths[i] = runs - before;
    }
    return runs;
}

/* Writes how many items of each row's list equal the row's value. All are texts, or with NULL offsets integers. */
void rayrec_count_equal(const int64_t *item_offsets, const void *item_data, const int64_t *starts, const int64_t *lengths,
                        const int64_t *offsets, const void *data, int64_t rows, double *out) {
    const column items = {item_offsets, item_data}, texts = {offsets, data};
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = 0;
        for (int64_t i = starts[row]; i < starts[row] + lengths[row]; i++) count += are_equal(&items, i, &texts, row);
        out[row] = (double)count;
    }
}

enum {
    SEEN = 1 << 30, /* more than a list has items */
    SHORT = 16, /* items of a list that is searched from its start */
};

/* Returns how many different items the two lists share, of which the right one is SHORT. */
static inline int64_t count_short(const column *left, int64_t left_start, int64_t left_length, const column *right, int64_t start,
                                  int64_t length) {
    uint32_t seen = 0;
    for (int64_t i = left_start; i < left_start + left_length; i++) {
        int64_t j = 0;
        while (j < length && !are_equal(right, start + j, left, i)) j++;
        if (j < length) seen |= 1u << j; /* of equal items always the first */
    }
    return __builtin_popcount(seen);
}

/* Writes how many different items the left and the right list of each row share. Both have texts, or with NULL offsets integers.
 * `slots` has at least twice as many as any right list has items, rounded up to a power of two, and at least 2. */
void rayrec_count_common(const int64_t *left_offsets, const void *left_data, const int64_t *left_starts,
                         const int64_t *left_lengths, const int64_t *right_offsets, const void *right_data,
                         const int64_t *right_starts, const int64_t *right_lengths, int64_t rows, uint32_t *slots, double *out) {
    const column left = {left_offsets, left_data}, right = {right_offsets, right_data};
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = right_starts[row], length = right_lengths[row];
        int64_t count = 0;
        if (length <= SHORT) {
            out[row] = (double)count_short(&left, left_starts[row], left_lengths[row], &right, start, length);
            continue;
        }
        uint64_t size = 2;
        while (size < 2 * (uint64_t)length) size *= 2;
        if (length && left_lengths[row]) memset(slots, 0, size * sizeof *slots);
        for (int64_t i = 0; i < length && left_lengths[row]; i++) {
            uint64_t slot = hash_of(&right, start + i) & (size - 1);
            while (slots[slot] && !are_equal(&right, start + slots[slot] - 1, &right, start + i)) slot = (slot + 1) & (size - 1);
            if (!slots[slot]) slots[slot] = (uint32_t)i + 1;
        }
        for (int64_t i = left_starts[row]; length && i < left_starts[row] + left_lengths[row]; i++) {
            uint64_t slot = hash_of(&left, i) & (size - 1);
            while (slots[slot] && !are_equal(&right, start + (slots[slot] & ~(uint32_t)SEEN) - 1, &left, i))
                slot = (slot + 1) & (size - 1);
            if (slots[slot] && !(slots[slot] & SEEN)) {
                slots[slot] |= SEEN;
                count++;
            }
        }
        out[row] = (double)count;
    }
}

/* Writes an integer's digits, at most WIDEST bytes, and returns their end. */
enum { WIDEST = 20 };

static inline uint8_t *put_integer(uint8_t *p, int64_t value) {
    static const uint64_t powers[] = { /* of 10; 0 has a digit too */
        0, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000, 10000000000, 100000000000, 1000000000000,
        10000000000000, 100000000000000, 1000000000000000, 10000000000000000, 100000000000000000, 1000000000000000000,
        10000000000000000000ULL,
    };
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    if (value < 0) *p++ = '-';
    const int about = (64 - __builtin_clzll(rest | 1)) * 1233 >> 12; /* bits times the logarithm of 2: the digits, or one less */
    uint8_t *const end = p + about + (rest >= powers[about]), *q = end;
    for (; rest >= 100; rest /= 100) {
        const uint64_t two = rest % 100;
        *--q = (uint8_t)('0' + two % 10);
        *--q = (uint8_t)('0' + two / 10);
    }
    *--q = (uint8_t)('0' + rest % 10);
    if (rest >= 10) *--q = (uint8_t)('0' + rest / 10);
    return end;
}

/* Writes the values of each row, joined by `mark`: their bytes to `out`, and where row i ends to ends[i + 1]. Each column has texts,
 * or with NULL offsets integers; the third one may be absent, with NULL data. `out` has room for all texts, WIDEST bytes for each
 * integer, and the marks. */
void rayrec_join_texts(const int64_t *offsets0, const void *data0, const int64_t *offsets1, const void *data1,
                       const int64_t *offsets2, const void *data2, int64_t mark, int64_t rows, int64_t *ends, uint8_t *out) {
    const column columns[] = {{offsets0, data0}, {offsets1, data1}, {offsets2, data2}};
    const int count = data2 ? 3 : 2;
    uint8_t *p = out;
    ends[0] = 0;
    for (int64_t row = 0; row < rows; row++) {
        for (int k = 0; k < count; k++) {
            const column *texts = &columns[k];
            if (k) *p++ = (uint8_t)mark;
            if (texts->offsets) {
                const int64_t size = size_of(texts, row);
                memcpy(p, text_at(texts, row), (size_t)size);
                p += size;
            } else p = put_integer(p, integer(texts, row));
        }
        ends[row + 1] = p - out;
    }
}

/* Writes how many of the rising edges are at or below each value, 0 for NaN. The search has no branch that depends on the value,
 * since half of them would be mispredicted. */
void rayrec_bucketize(const double *values, int64_t count, const double *edges, int64_t num_edges, int64_t *out) {
    for (int64_t i = 0; i < count; i++) {
        const double value = values[i];
        const double *first = edges;
        for (int64_t left = num_edges; left > 0;) { /* the answer is from first - edges to first - edges + left */
            const int64_t half = (left + 1) / 2;
            first += (first[half - 1] <= value) * half;
            left -= half;
        }
        out[i] = first - edges;
    }
}
