/* Functions of formulas over texts and lists of texts (data/features/functions.py). Text i is data[offsets[i], offsets[i + 1]).
 *
 * Arrays belong to the caller. Kernels allocate nothing and keep no pointer. */

#include "kernels.h"

#include <string.h>

typedef struct {
    const int64_t *offsets;
    const uint8_t *data;
} column;

static inline int64_t size_of(const column *texts, int64_t i) { return texts->offsets[i + 1] - texts->offsets[i]; }

static inline int are_equal(const column *left, int64_t i, const column *right, int64_t j) {
    const int64_t size = size_of(left, i);
    return size == size_of(right, j) && !memcmp(left->data + left->offsets[i], right->data + right->offsets[j], (size_t)size);
}

/* Mixes eight bytes at a time. Equal texts have equal hashes; others are compared, so that the hash need not be a good one. */
static inline uint64_t hash_of(const column *texts, int64_t i) {
    const uint8_t *p = texts->data + texts->offsets[i];
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

/* Writes how many items of each row's list equal the row's text. */
void rayrec_count_equal(const int64_t *item_offsets, const uint8_t *item_data, const int64_t *starts, const int64_t *lengths,
                        const int64_t *offsets, const uint8_t *data, int64_t rows, double *out) {
    const column items = {item_offsets, item_data}, texts = {offsets, data};
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = 0;
        for (int64_t i = starts[row]; i < starts[row] + lengths[row]; i++) count += are_equal(&items, i, &texts, row);
        out[row] = (double)count;
    }
}

enum { SEEN = 1 << 30 }; /* more than a list has items */

/* Writes how many different items the left and the right list of each row share. `slots` has at least twice as many as any right
 * list has items, rounded up to a power of two, and at least 2. */
void rayrec_count_common(const int64_t *left_offsets, const uint8_t *left_data, const int64_t *left_starts,
                         const int64_t *left_lengths, const int64_t *right_offsets, const uint8_t *right_data,
                         const int64_t *right_starts, const int64_t *right_lengths, int64_t rows, uint32_t *slots, double *out) {
    const column left = {left_offsets, left_data}, right = {right_offsets, right_data};
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = right_starts[row], length = right_lengths[row];
        int64_t count = 0;
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
