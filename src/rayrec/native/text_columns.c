/* Splits CSV text into columns, and reads columns of text as numbers. */

#include "kernels.h"

#include <stddef.h>
#include <string.h>

/* Splits CSV text (RFC 4180; any one-byte delimiter; rows end with \n, \r\n or \r; empty lines are passed over) as far as
 * its rows are complete. What follows a closing quote belongs to the field; a quote inside an unquoted field is itself.
 *
 * Rows have `columns` fields; field c is stored as number places[c], or not where that is negative. Field k of row r is
 * text[starts[r * kept + k], ... + lengths[...]), its quotes removed in place. kinds[r] is 0, or 1 or 2 for a row of too few
 * or too many fields, whose fields are stored as empty.
 *
 * Returns the rows stored, at most `capacity`, and in result: bytes consumed, and whether the text ends inside a quoted
 * field. With `final` the last row may lack its line end. */
int64_t rayrec_split_csv(uint8_t *text, int64_t length, int32_t final, uint8_t delimiter, int32_t columns,
                         const int32_t *places, int32_t kept, int64_t capacity, int64_t *starts, int64_t *lengths,
                         uint8_t *kinds, int64_t *result) {
    const uint8_t *const end = text + length;
    const uint8_t *p = text;
    int64_t row = 0, consumed = 0;
    int open = 0;
    while (p < end && row < capacity) {
        if (*p == '\n' || *p == '\r') { /* an empty line, or the \n of \r\n */
            p++;
            consumed = p - text;
            continue;
        }
        int column = 0;
        for (;;) { /* a field a turn */
            const uint8_t *start = p;
            if (p < end && *p == '"') {
                for (p++;; p += 2) { /* to behind the closing quote; a row is unquoted once it is known to be complete */
                    const uint8_t *quote = p < end ? memchr(p, '"', (size_t)(end - p)) : NULL;
                    if (!quote) {
                        open = 1;
                        goto stop;
                    }
                    p = quote;
                    if (p + 1 >= end || p[1] != '"') break;
                }
                p++;
            }
            while (p < end && *p != delimiter && *p != '\n' && *p != '\r') p++;
            if (p >= end && !final) goto stop;
            if (column < columns && places[column] >= 0) {
                starts[row * kept + places[column]] = start - text;
                lengths[row * kept + places[column]] = p - start;
            }
            column++;
            if (p >= end || *p != delimiter) break;
            p++;
        }
        if (p < end) p++; /* the \n of \r\n is passed over as an empty line */
        consumed = p - text;
        kinds[row] = column == columns ? 0 : column < columns ? 1 : 2;
        if (kinds[row]) {
            memset(starts + row * kept, 0, (size_t)kept * sizeof *starts);
            memset(lengths + row * kept, 0, (size_t)kept * sizeof *lengths);
        } else {
            for (int64_t k = row * kept; k < (row + 1) * kept; k++) {
                uint8_t *field = text + starts[k];
                if (lengths[k] == 0 || *field != '"') continue;
                int64_t in = 1, out = 0;
                for (; in < lengths[k]; in++) { /* to the closing quote */
                    if (field[in] == '"') {
                        if (in + 1 >= lengths[k] || field[in + 1] != '"') break;
                        in++;
                    }
                    field[out++] = field[in];
                }
                for (in++; in < lengths[k]; in++) field[out++] = field[in];
                lengths[k] = out;
            }
        }
        row++;
    }
stop:
    result[0] = consumed;
    result[1] = open;
    return row;
}

/* Field number `place` of each row, one after the other in `data`, and where each starts: `offsets` (rows + 1). */
void rayrec_gather_text(const uint8_t *text, const int64_t *starts, const int64_t *lengths, int64_t rows, int32_t kept,
                        int32_t place, int64_t *offsets, uint8_t *data) {
    offsets[0] = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t field = row * kept + place;
        memcpy(data + offsets[row], text + starts[field], (size_t)lengths[field]);
        offsets[row + 1] = offsets[row] + lengths[field];
    }
}

static inline const uint8_t *digits(const uint8_t *p, const uint8_t *end) {
    while (p < end && (uint8_t)(*p - '0') <= 9) p++;
    return p;
}

/* Which texts are decimal numbers: [+-]? (digits [. digits?] | . digits) ([eE] [+-]? digits)?. */
void rayrec_check_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i], *const end = data + offsets[i + 1];
        if (p == end || (null && null[i])) {
            status[i] = TEXT_EMPTY;
            continue;
        }
        status[i] = TEXT_REFUSED;
        p += *p == '-' || *p == '+';
        const uint8_t *q = digits(p, end);
        int64_t found = q - p;
        if (q < end && *q == '.') {
            p = q + 1;
            q = digits(p, end);
            found += q - p;
        }
        if (found == 0) continue;
        if (q < end && (*q | 0x20) == 'e') {
            p = q + 1;
            p += p < end && (*p == '-' || *p == '+');
            q = digits(p, end);
            if (q == p) continue;
        }
        if (q == end) status[i] = TEXT_VALUE;
    }
}

/* Texts as integers of up to 18 digits, as rayrec_parse reads them. */
void rayrec_text_integers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, int64_t *out,
                          uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i], *const end = data + offsets[i + 1];
        out[i] = 0;
        if (p == end || (null && null[i])) {
            status[i] = TEXT_EMPTY;
            continue;
        }
        status[i] = TEXT_REFUSED;
        const int negative = *p == '-';
        p += negative;
        if (p == end || end - p > 18 || digits(p, end) != end) continue;
        int64_t value = 0;
        for (; p < end; p++) value = value * 10 + (*p - '0');
        out[i] = negative ? -value : value;
        status[i] = TEXT_VALUE;
    }
}

/* Texts of 8 hexadecimal digits as numbers. */
void rayrec_text_hexadecimal(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint32_t *out,
                             uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i];
        const int64_t length = offsets[i + 1] - offsets[i];
        out[i] = 0;
        if (length == 0 || (null && null[i])) {
            status[i] = TEXT_EMPTY;
            continue;
        }
        status[i] = TEXT_REFUSED;
        if (length != 8) continue;
        uint32_t value = 0;
        int good = 1;
        for (int d = 0; d < 8; d++) {
            const uint8_t decimal = (uint8_t)(p[d] - '0'), letter = (uint8_t)((p[d] | 0x20) - 'a');
            good &= decimal <= 9 || letter <= 5;
            value = value << 4 | (decimal <= 9 ? decimal : (uint32_t)letter + 10);
        }
        if (!good) continue;
        out[i] = value;
        status[i] = TEXT_VALUE;
    }
}
