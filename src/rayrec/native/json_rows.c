/* Splitting of the rows of a JSON request into the fields of columns. */

#include "kernels.h"

#include <stddef.h>
#include <string.h>

/* All functions return the first byte behind what they read. They return NULL for other text, and for NULL in place of `p`, so that
 * calls can be nested. Text is JSON only up to the bytes of strings, which need not be UTF-8. */

static inline const uint8_t *blanks(const uint8_t *p, const uint8_t *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

static inline const uint8_t *mark(const uint8_t *p, const uint8_t *end, uint8_t expected) {
    if (!p) return NULL;
    p = blanks(p, end);
    return p < end && *p == expected ? p + 1 : NULL;
}

/* The rest of a string without escapes, from its opening quote on. */
static inline const uint8_t *string(const uint8_t *p, const uint8_t *end) {
    while (p < end && *p != '"' && *p != '\\' && *p >= ' ') p++;
    return p < end && *p == '"' ? p + 1 : NULL;
}

static inline const uint8_t *digits(const uint8_t *p, const uint8_t *end) {
    const uint8_t *const first = p;
    while (p < end && (uint8_t)(*p - '0') <= 9) p++;
    return p > first ? p : NULL;
}

/* A number. An integer has at most 18 digits, so that it is one everywhere, and is not -0. A decimal number is short enough to be
 * far from infinity. */
static const uint8_t *number(const uint8_t *p, const uint8_t *end, uint8_t *kind) {
    enum { MAX_DIGITS = 18, MAX_LETTERS = 32, MAX_EXPONENT_DIGITS = 2 };
    const int negative = *p == '-';
    const uint8_t *const start = p, *const first = p + negative;
    p = digits(first, end);
    if (!p || (*first == '0' && p > first + 1)) return NULL;
    const int is_zero = *first == '0', is_long = p - first > MAX_DIGITS;
    *kind = JSON_INTEGER;
    if (p < end && *p == '.') {
        *kind = JSON_DECIMAL;
        p = digits(p + 1, end);
        if (!p) return NULL;
    }
    if (p < end && (*p | 0x20) == 'e') {
        *kind = JSON_DECIMAL;
        p++;
        p += p < end && (*p == '-' || *p == '+');
        const uint8_t *const exponent = p;
        p = digits(p, end);
        if (!p || p - exponent > MAX_EXPONENT_DIGITS) return NULL;
    }
    if (*kind == JSON_DECIMAL) return p - start > MAX_LETTERS ? NULL : p;
    return is_long || (is_zero && negative) ? NULL : p;
}

static inline const uint8_t *word(const uint8_t *p, const uint8_t *end, const char *expected, int64_t length) {
    return end - p >= length && !memcmp(p, expected, (size_t)length) ? p + length : NULL;
}

/* A value that is no list or object. Its field is the text of a string without quotes, or of a number; true and false become 1 and 0 in
 * the text; null is empty. */
static const uint8_t *value(const uint8_t *p, const uint8_t *end, uint8_t *text, rayrec_field *field, uint8_t *kind) {
    p = blanks(p, end);
    if (p >= end) return NULL;
    const uint8_t *start = p, *stop;
    if (*p == '"') {
        *kind = JSON_STRING;
        start++;
        p = string(start, end);
        if (!p) return NULL;
        stop = p - 1;
    } else if (*p == 'n') {
        *kind = JSON_NULL;
        p = word(p, end, "null", 4);
        stop = start;
    } else if (*p == 't' || *p == 'f') {
        const int is_true = *p == 't';
        *kind = JSON_BOOLEAN;
        p = is_true ? word(p, end, "true", 4) : word(p, end, "false", 5);
        if (p) text[start - text] = is_true ? '1' : '0';
        stop = start + 1;
    } else {
        p = stop = number(p, end, kind);
    }
    if (p) *field = (rayrec_field){(uint32_t)(start - text), (uint32_t)(stop - start)};
    return p;
}

/* Index of the name [start, stop), or -1. Rows mostly have the same order: follows[i] is the name that came after name i - 1 last, and
 * follows[0] the first one. Rows that leave out names have one of the next. */
static inline int32_t name_at(const uint8_t *start, const uint8_t *stop, const uint8_t *names, const int64_t *offsets, int32_t count,
                              int32_t *followed) {
    const int64_t length = stop - start;
    for (int32_t i = 0, name = *followed; i < count; i++, name = name + 1 < count ? name + 1 : 0) {
        if (offsets[name + 1] - offsets[name] == length && !memcmp(names + offsets[name], start, (size_t)length)) {
            *followed = name;
            return name;
        }
    }
    return -1;
}

/* Splits a JSON request {"rows": [{name: value, ...}, ...]} into fields[r * num_names + n] and kinds[r * num_names + n] (rayrec_json_kind)
 * of row r and name n. Name n is names[offsets[n], offsets[n + 1]), and there is one; `follows` is room for num_names + 1
 * values.
 *
 * Returns the number of rows, or -1 for any other text: what is not JSON, has no or more than `capacity` rows, or an unknown or repeated
 * name, a list, an object, an escape in a string, or a longer number. It may be a request all the same; its caller parses it in another
 * way. In strings, any byte from 32 on is accepted. The text has less than 2^31 bytes. */
int64_t rayrec_split_json(uint8_t *text, int64_t length, const uint8_t *names, const int64_t *offsets, int32_t num_names,
                          int32_t *follows, int64_t capacity, rayrec_field *fields, uint8_t *kinds) {
    const uint8_t *const end = text + length;
    const uint8_t *p = mark(mark(text, end, '{'), end, '"');
    p = p ? word(p, end, "rows\"", 5) : NULL;
    p = mark(mark(p, end, ':'), end, '[');
    for (int32_t i = 0; i <= num_names; i++) follows[i] = i < num_names ? i : 0;
    int64_t row = 0;
    do {
        p = mark(p, end, '{');
        if (!p || row == capacity) return -1;
        rayrec_field *const row_fields = fields + row * num_names;
        uint8_t *const row_kinds = kinds + row * num_names;
        memset(row_fields, 0, (size_t)num_names * sizeof *row_fields);
        memset(row_kinds, JSON_ABSENT, (size_t)num_names);
        row++;
        const uint8_t *const closed = mark(p, end, '}');
        if (closed) { /* without a value */
            p = closed;
            continue;
        }
        int32_t last = -1;
        do {
            const uint8_t *const start = mark(p, end, '"');
            p = start ? string(start, end) : NULL;
            if (!p) return -1;
            last = name_at(start, p - 1, names, offsets, num_names, &follows[last + 1]);
            if (last < 0 || row_kinds[last] != JSON_ABSENT) return -1;
            p = mark(p, end, ':');
            p = p ? value(p, end, text, &row_fields[last], &row_kinds[last]) : NULL;
            if (!p) return -1;
            p = blanks(p, end);
        } while (p < end && *p++ == ',');
        if (p[-1] != '}') return -1;
    } while ((p = blanks(p, end)) < end && *p++ == ',');
    if (p[-1] != ']') return -1;
    p = mark(p, end, '}');
    return p && blanks(p, end) == end ? row : -1;
}

/* Concatenates the `columns` fields of each row, as lines with a label of 0: "0\tfield\t...\n". Returns the size. */
int64_t rayrec_join_fields(const uint8_t *text, const rayrec_field *fields, int64_t rows, int32_t columns, uint8_t *out) {
    uint8_t *to = out;
    for (int64_t row = 0; row < rows; row++) {
        *to++ = '0';
        for (int32_t column = 0; column < columns; column++) {
            const rayrec_field field = fields[row * columns + column];
            *to++ = '\t';
            memcpy(to, text + field.start, field.length);
            to += field.length;
        }
        *to++ = '\n';
    }
    return to - out;
}
