/* Parsing of Criteo-style click logs, and encoding of raw rows as model inputs. */

#include "kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define REPEAT8(byte) (0x0101010101010101ULL * (uint64_t)(byte))

/* Parses eight hexadecimal digits at once (SWAR); returns 0 if one is not a digit. Needs a little-endian machine. */
static inline int parse_hexadecimal8(const uint8_t *text, uint32_t *out) {
    uint64_t v;
    memcpy(&v, text, 8);
    const uint64_t high = REPEAT8(0x80);
    const uint64_t folded = v | REPEAT8(0x20);
    /* Bytes below 0x80 plus an addend below 0x80 never carry into the next byte. */
    const uint64_t low7 = v & ~high, folded7 = folded & ~high;
    const uint64_t digit = (low7 + REPEAT8(0x80 - '0')) & ~(low7 + REPEAT8(0x80 - '9' - 1)) & high;
    const uint64_t letter = (folded7 + REPEAT8(0x80 - 'a')) & ~(folded7 + REPEAT8(0x80 - 'f' - 1)) & high;
    if (((digit | letter) & ~v) != high) return 0;
    uint64_t n = (v & REPEAT8(0x0f)) + 9 * (letter >> 7);
    n = ((n << 4) | (n >> 8)) & 0x00FF00FF00FF00FFULL;
    n = ((n << 8) | (n >> 16)) & 0x0000FFFF0000FFFFULL;
    *out = (uint32_t)((n << 16) | (n >> 32));
    return 1;
}

/* Counts the fault of a line that did not parse, and stores its details. */
static void record_fault(const uint8_t *line, const uint8_t *line_end, const uint8_t *text, int kind, int column,
                         int expected_columns, int64_t *counts, rayrec_fault *faults, int64_t max_faults,
                         int64_t *num_faults) {
    if (kind != FAULT_LINE_TOO_LONG && kind != FAULT_EMPTY_LINE) {
        /* A wrong number of columns explains every other fault of the line. */
        int columns = 1;
        for (const uint8_t *p = line; p < line_end; p++) columns += *p == '\t';
        if (columns != expected_columns) {
            kind = columns < expected_columns ? FAULT_TOO_FEW_COLUMNS : FAULT_TOO_MANY_COLUMNS;
            column = -1;
        }
    }
    counts[kind]++;
    if (*num_faults < max_faults) {
        faults[*num_faults] = (rayrec_fault){.byte = line - text, .kind = kind, .column = column};
        ++*num_faults;
    }
}

/* Parses full lines of `text` (the last one may lack its newline) and returns the number of rows stored, or -1 if `out` has no
 * room. At least RAYREC_TEXT_PADDING readable bytes must follow the text. Rejected lines are counted in
 * fault_counts[FAULT_KINDS]; `faults` has details of the first max_faults. */
int64_t rayrec_parse(const uint8_t *text, int64_t length, const rayrec_layout *layout, const rayrec_raw_rows *out,
                     int64_t *fault_counts, rayrec_fault *faults, int64_t max_faults, int64_t *num_faults) {
    const int num_dense = layout->num_dense, num_sparse = layout->num_sparse, has_label = layout->has_label;
    const int expected_columns = has_label + num_dense + num_sparse;
    const uint8_t *const end = text + length;
    const uint8_t *line = text;
    int64_t row = 0;
    *num_faults = 0;
    while (line < end) {
        if (row >= out->capacity) return -1;
        const uint8_t *p = line;
        int64_t *integers = out->integers + row * num_dense;
        uint32_t *tokens = out->tokens + row * num_sparse;
        uint64_t missing = 0;
        int kind = -1, column = 0;

        if (*p == '\n' || (*p == '\r' && p + 1 < end && p[1] == '\n')) {
            kind = FAULT_EMPTY_LINE;
            column = -1;
            goto refused;
        }
        if (has_label) {
            if ((uint8_t)(*p - '0') > 1 || p + 1 >= end || p[1] != '\t') {
                kind = FAULT_LABEL;
                goto refused;
            }
            out->labels[row] = (float)(*p - '0');
            p += 2;
            column = 1;
        }
        for (int d = 0; d < num_dense; d++, column++) {
            const int last = num_sparse == 0 && d == num_dense - 1;
            const int negative = *p == '-';
            const uint8_t *digits = p + negative;
            const uint8_t *q = digits;
            uint64_t value = 0;
            /* The padding has no digits, so this stops inside readable memory. */
            for (uint8_t c; (c = (uint8_t)(*q - '0')) <= 9; q++) value = value * 10 + c;
            const int closed = q < end && *q == '\t';
            const int ended = last && (q >= end || *q == '\n' || (*q == '\r' && q + 1 < end && q[1] == '\n'));
            if (!(closed && !last) && !ended) {
                kind = FAULT_NOT_AN_INTEGER;
                goto refused;
            }
            if (q == digits) {
                if (negative) {
                    kind = FAULT_NOT_AN_INTEGER;
                    goto refused;
                }
                missing |= 1ULL << d;
                integers[d] = 0;
            } else {
                if (q - digits > 18) { /* 18 digits always fit 63 bits */
                    kind = FAULT_NOT_AN_INTEGER;
                    goto refused;
                }
                integers[d] = negative ? -(int64_t)value : (int64_t)value;
            }
            p = q + !last;
        }
        for (int s = 0; s < num_sparse; s++, column++) {
            const int last = s == num_sparse - 1;
            const uint8_t first = p < end ? *p : '\n';
            if (!last && first == '\t') {
                missing |= 1ULL << (num_dense + s);
                tokens[s] = 0;
                p++;
                continue;
            }
            if (last && (first == '\n' || (first == '\r' && p + 1 < end && p[1] == '\n'))) {
                missing |= 1ULL << (num_dense + s);
                tokens[s] = 0;
                continue;
            }
            if (end - p < 8 || !parse_hexadecimal8(p, &tokens[s])) {
                kind = FAULT_NOT_HEXADECIMAL;
                goto refused;
            }
            p += 8;
            if (!last) {
                if (p >= end || *p != '\t') {
                    kind = FAULT_NOT_HEXADECIMAL;
                    goto refused;
                }
                p++;
            }
        }
        if (p < end) {
            if (*p == '\r' && p + 1 < end && p[1] == '\n') p++;
            if (*p != '\n') {
                kind = *p == '\t' ? FAULT_TOO_MANY_COLUMNS : (num_sparse ? FAULT_NOT_HEXADECIMAL : FAULT_NOT_AN_INTEGER);
                column = expected_columns - 1;
                goto refused;
            }
            p++;
        }
        if (p - line > layout->max_line_bytes) {
            kind = FAULT_LINE_TOO_LONG;
            column = -1;
            goto refused;
        }
        out->missing[row] = missing;
        row++;
        line = p;
        continue;

    refused:;
        const uint8_t *newline = memchr(line, '\n', (size_t)(end - line));
        const uint8_t *line_end = newline ? newline : end;
        if (line_end - line > layout->max_line_bytes) {
            kind = FAULT_LINE_TOO_LONG;
            column = -1;
        }
        record_fault(line, line_end, text, kind, column, expected_columns, fault_counts, faults, max_faults, num_faults);
        line = newline ? newline + 1 : end;
    }
    return row;
}

/* Returns the start of the last, possibly unfinished, line: the position after the last newline, 0 without one. */
int64_t rayrec_last_line_start(const uint8_t *text, int64_t length) {
    while (length > 0 && text[length - 1] != '\n') length--;
    return length;
}

static inline float transform(int64_t value, const rayrec_dense_column *column) {
    double transformed;
    if (column->kind == DENSE_SIGNED_LOG) {
        const double magnitude = log1p(fabs((double)value)); /* -INT64_MIN is not an int64 */
        transformed = value < 0 ? -magnitude : magnitude;
    } else {
        if (value < column->lowest) value = column->lowest;
        transformed = column->kind == DENSE_LOG ? log((double)value + column->shift) : (double)value;
    }
    float input = (float)((transformed - column->mean - column->mean_low) * column->scale);
    if (column->bounded) {
        if (!(input >= column->lower)) input = column->lower; /* NaN, the logarithm of a negative number, too */
        if (input > column->upper) input = column->upper;
    }
    return input;
}

void rayrec_transform_dense(const int64_t *values, int64_t count, const rayrec_dense_column *column, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = transform(values[i], column);
}

/* Converts an integer to a category: floor(ln(x)^2) for x > 2, else x (the rule of FuxiCTR's Criteo_x4), plus 2^31, so that
 * tokens sort like the signed numbers. */
static inline uint32_t bucket(int64_t x) {
    int32_t found;
    if (x > 2) {
        const double logarithm = log((double)x);
        found = (int32_t)floor(logarithm * logarithm);
    } else {
        found = (int32_t)(x < INT32_MIN ? INT32_MIN : x);
    }
    return (uint32_t)found ^ 0x80000000U;
}

/* Writes the categories of integers into the first `columns` of each row of `out`. */
void rayrec_bucket_integers(const int64_t *integers, int64_t rows, uint32_t *out, int64_t columns, int64_t out_columns) {
    enum { SMALL = 2048 };
    uint32_t small[SMALL];
    for (int64_t x = 0; x < SMALL; x++) small[x] = bucket(x);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t d = 0; d < columns; d++) {
            const int64_t x = integers[row * columns + d];
            out[row * out_columns + d] = (uint64_t)x < SMALL ? small[x] : bucket(x);
        }
    }
}

/* Precomputed results of small integers, nearly all values: a load instead of 10-20 ns. */
enum { SMALL_FROM = -16, SMALL_COUNT = 2048 };

enum { TILE = 256, AHEAD = 16 }; /* rows encoded together: their tokens, 26 KB, stay in the L1 cache */

/* murmur3_x86_32 (Appleby) of four little-endian bytes with seed 0, plus the constant of cuDF's row hash. */
static inline uint32_t murmur3(uint32_t token) {
    uint32_t k = token * 0xcc9e2d51U;
    k = k << 15 | k >> 17;
    uint32_t h = k * 0x1b873593U;
    h = h << 13 | h >> 19;
    h = h * 5 + 0xe6546b64U;
    h ^= 4;
    h ^= h >> 16;
    h *= 0x85ebca6bU;
    h ^= h >> 13;
    h *= 0xc2b2ae35U;
    h ^= h >> 16;
    return h + 0x9e3779b9U;
}

static inline int64_t hashed_id(uint32_t token, const rayrec_sparse_column *column) {
    const uint32_t short_hash = column->hash & HASH_MURMUR3 ? murmur3(token) : token;
    const uint64_t hash = column->hash & HASH_MIX ? rayrec_mix(short_hash) : short_hash;
    return column->base + (int64_t)(hash % column->modulo);
}

/* Looks up the ids of one column's tokens in a tile; ids of absent ones are arbitrary. */
static inline void ids_of_tile(uint32_t *tokens, int count, const rayrec_sparse_column *column, int32_t *ids) {
    if (column->slots) {
        const uint32_t modulo = column->token_modulo;
        if (modulo)
            for (int i = 0; i < count; i++) tokens[i] %= modulo;
        rayrec_look_up(tokens, sizeof *tokens, count, column->slots, column->num_slots, (int32_t)column->unknown_id, ids);
    } else {
        for (int i = 0; i < count; i++) ids[i] = (int32_t)hashed_id(tokens[i], column);
    }
}

/* Writes the ids, of `id_bytes` 4 or 8, of one column's tokens in a tile; absent ones get the missing id. */
static inline void write_ids(uint32_t *tokens, const uint8_t *absent, int count, const rayrec_sparse_column *column,
                             int64_t id_bytes, void *out) {
    int32_t narrow[TILE];
    if (id_bytes == 4) {
        int32_t *ids = out;
        ids_of_tile(tokens, count, column, ids);
        for (int i = 0; i < count; i++)
            if (absent[i]) ids[i] = (int32_t)column->missing_id;
        return;
    }
    int64_t *ids = out;
    if (column->slots) {
        ids_of_tile(tokens, count, column, narrow);
        for (int i = 0; i < count; i++) ids[i] = narrow[i];
    } else {
        for (int i = 0; i < count; i++) ids[i] = hashed_id(tokens[i], column);
    }
    for (int i = 0; i < count; i++)
        if (absent[i]) ids[i] = column->missing_id;
}

/* Writes the ids of a tile of integers as categories; 0, which the parser also stores for a missing one, is absent. `small` are the
 * ids of 0 to SMALL_COUNT - 1, NULL if not computed. */
static inline void write_bucket_ids(const int64_t *const *integers, int count, const rayrec_sparse_column *column,
                                    const int32_t *small, int64_t id_bytes, void *out) {
    uint32_t tokens[TILE];
    uint8_t absent[TILE];
    if (small && id_bytes == 4) {
        int32_t *ids = out;
        for (int i = 0; i < count; i++) {
            const int64_t x = *integers[i];
            if ((uint64_t)x < SMALL_COUNT) {
                ids[i] = small[x];
                continue;
            }
            tokens[0] = bucket(x);
            ids_of_tile(tokens, 1, column, ids + i);
        }
        return;
    }
    for (int i = 0; i < count; i++) {
        tokens[i] = bucket(*integers[i]);
        absent[i] = *integers[i] == 0;
    }
    write_ids(tokens, absent, count, column, id_bytes, out);
}

/* Encodes raw rows order[0..rows) into dense_out float32 (rows, num_dense), ids_out int32 or int64 (`id_bytes` 4 or 8) with
 * column s at ids_out + s * ids_stride. With `bucketed`, integers are categories (see `bucket`), the first num_dense sparse columns;
 * dense_columns and dense_out are then unused. */
void rayrec_encode(const rayrec_raw_rows *raw, const rayrec_layout *layout, const int64_t *order, int64_t rows, int32_t bucketed,
                   const rayrec_dense_column *dense_columns, const rayrec_sparse_column *sparse_columns,
                   float *dense_out, void *ids_out, int64_t id_bytes, int64_t ids_stride) {
    const int num_dense = layout->num_dense, num_sparse = layout->num_sparse;
    const int num_floats = bucketed ? 0 : num_dense, num_buckets = bucketed ? num_dense : 0;
    union {
        float values[RAYREC_MAX_COLUMNS][SMALL_COUNT];
        int32_t ids[RAYREC_MAX_COLUMNS][SMALL_COUNT];
    } small;
    const int use_small = rows > SMALL_COUNT;
    if (use_small) {
        for (int d = 0; d < num_floats; d++)
            for (int i = 0; i < SMALL_COUNT; i++) small.values[d][i] = transform(SMALL_FROM + i, &dense_columns[d]);
        uint32_t buckets[SMALL_COUNT], tokens[SMALL_COUNT];
        for (int x = 0; x < SMALL_COUNT && num_buckets; x++) buckets[x] = bucket(x);
        for (int d = 0; d < num_buckets; d++) {
            memcpy(tokens, buckets, sizeof tokens);
            ids_of_tile(tokens, SMALL_COUNT, &sparse_columns[d], small.ids[d]);
            small.ids[d][0] = (int32_t)sparse_columns[d].missing_id;
        }
    }
    uint32_t tokens[TILE];
    uint8_t absent[TILE];
    const int64_t *integers_of[TILE];
    for (int64_t base = 0; base < rows; base += TILE) {
        const int count = (int)(rows - base < TILE ? rows - base : TILE);
        for (int i = 0; i < count; i++) {
            /* Rows are in random order: prefetch all cache lines of a later row. */
            if (base + i + AHEAD < rows) {
                const int64_t next = order[base + i + AHEAD];
                for (int d = 0; d < num_dense; d += 8) __builtin_prefetch(raw->integers + next * num_dense + d);
                for (int s = 0; s < num_sparse; s += 16) __builtin_prefetch(raw->tokens + next * num_sparse + s);
                __builtin_prefetch(raw->missing + next);
            }
            const int64_t row = order[base + i];
            const int64_t *integers = raw->integers + row * num_dense;
            const uint64_t missing = raw->missing[row];
            float *out = dense_out + (base + i) * num_floats;
            for (int d = 0; d < num_floats; d++) {
                const uint64_t small_index = (uint64_t)integers[d] - (uint64_t)(int64_t)SMALL_FROM;
                if (missing >> d & 1) out[d] = dense_columns[d].missing_value;
                else if (use_small && small_index < SMALL_COUNT) out[d] = small.values[d][small_index];
                else out[d] = transform(integers[d], &dense_columns[d]);
            }
            integers_of[i] = integers;
        }
        uint8_t *out = (uint8_t *)ids_out + base * id_bytes;
        for (int d = 0; d < num_buckets; d++, out += ids_stride * id_bytes) {
            write_bucket_ids(integers_of, count, &sparse_columns[d], use_small ? small.ids[d] : NULL, id_bytes, out);
            for (int i = 0; i < count; i++) integers_of[i]++;
        }
        for (int s = 0; s < num_sparse; s++, out += ids_stride * id_bytes) {
            for (int i = 0; i < count; i++) {
                const int64_t row = order[base + i];
                tokens[i] = raw->tokens[row * num_sparse + s];
                absent[i] = (uint8_t)(raw->missing[row] >> (num_dense + s) & 1);
            }
            write_ids(tokens, absent, count, &sparse_columns[num_buckets + s], id_bytes, out);
        }
    }
}
