/* Splitting of CSV text into columns, and parsing of text columns as numbers. */

#include "kernels.h"
#include "vectors.h"

#include <stddef.h>
#include <string.h>

static inline int ends_line(uint8_t c) { return c == '\n' || c == '\r'; }

static inline int is_blank(uint8_t c) { return c == ' ' || c == '\t'; }

/* Returns the closing quote of a field that starts at `p`, after its opening quote. NULL if the text has none, or none within
 * `max_bytes` bytes and `max_lines` line ends; then *exceeded is 1. Adds the line ends inside to *lines. A doubled quote, and a
 * quote or an escape behind `escape` (-1: none), are ordinary characters. */
static const uint8_t *closing_quote(const uint8_t *p, const uint8_t *end, int32_t escape, int64_t max_bytes,
                                    int64_t max_lines, int64_t *lines, int *exceeded) {
    const uint8_t *const limit = end - p > max_bytes + 1 ? p + max_bytes + 1 : end;
    for (; p < limit; p++) {
        const int has_next = p + 1 < end;
        if (*p == escape && has_next && (p[1] == '"' || p[1] == escape)) {
            p++;
        } else if (*p == '"') {
            if (!has_next || p[1] != '"') break;
            p++;
        } else {
            *lines += *p == '\n' || (*p == '\r' && has_next && p[1] != '\n');
        }
    }
    *exceeded = *lines > max_lines || (p >= limit && limit < end);
    return p < limit && !*exceeded ? p : NULL;
}

/* Delimiter of fields, found from the left: a field that ends with a part of it gives that part to the next field. */
typedef struct {
    const uint8_t *text;
    int64_t bytes;
} delimiter_text;

static inline int is_delimiter(const uint8_t *p, const uint8_t *end, delimiter_text delimiter) {
    return *p == *delimiter.text &&
           (delimiter.bytes == 1 ||
            (end - p >= delimiter.bytes && !memcmp(p, delimiter.text, (size_t)delimiter.bytes)));
}

/* Returns whether the text ends at or after `p` before it can be known whether a delimiter starts there. */
static inline int is_cut(const uint8_t *p, const uint8_t *end, delimiter_text delimiter) {
    return p >= end || (delimiter.bytes > 1 && end - p < delimiter.bytes && !memcmp(p, delimiter.text, (size_t)(end - p)));
}

/* Splits CSV text (RFC 4180; any delimiter; rows end with \n, \r\n or \r; empty lines are skipped) up to its last
 * complete row. A quote inside an unquoted field is an ordinary character. `trim` removes blanks and tabs around an unquoted
 * field; those after a closing quote are always skipped. In quoted fields, a quote or an escape behind `escape` (-1: none)
 * is an ordinary character.
 *
 * A quote is unmatched if its field has no closing quote within `max_bytes` bytes and `max_lines` line ends, or if the field
 * spans lines and either text follows its closing quote or its row has a wrong number of fields. Then the first line of the
 * row is one invalid row, and the next row starts at the next line.
 *
 * Rows have `columns` fields; field c is stored at index places[c], or not if that is negative. Field k of row r is
 * text[starts[r * kept + k], ... + lengths[...]), its quotes removed in place. kinds[r] is 0, or 1, 2, 3 or 4 for a row with too
 * few fields, too many fields, an unmatched quote or text after a closing quote, whose fields are stored as empty.
 *
 * Returns the number of rows stored, at most `capacity`; *consumed is their size in bytes. With `final` the last row may lack its
 * line end. */
PART_OF_IT int64_t split_csv(uint8_t *text, int64_t length, int32_t final, delimiter_text delimiter, int32_t escape,
                             int32_t trim, int64_t max_bytes, int64_t max_lines, int32_t columns, const int32_t *places,
                             int32_t kept, int64_t capacity, int64_t *starts, int64_t *lengths, uint8_t *kinds,
                             int64_t *consumed) {
    const uint8_t *const end = text + length;
    const uint8_t *p = text;
    int64_t row = 0;
    *consumed = 0;
    while (p < end && row < capacity) {
        if (ends_line(*p)) { /* an empty line, or the \n of \r\n */
            p++;
            *consumed = p - text;
            continue;
        }
        const uint8_t *const line = p;
        int column = 0, spans_lines = 0, unmatched = 0, trails = 0;
        for (;;) { /* one field per turn */
            const uint8_t *const start = p;
            if (p < end && *p == '"') {
                int64_t lines = 0;
                int exceeded = 0;
                const uint8_t *const quote = closing_quote(p + 1, end, escape, max_bytes, max_lines, &lines, &exceeded);
                if (!quote) {
                    if (!exceeded && !final) return row;
                    unmatched = 1;
                    break;
                }
                p = quote + 1;
                while (p < end && is_blank(*p) && !is_delimiter(p, end, delimiter)) p++;
                if (!final && is_cut(p, end, delimiter)) return row;
                const int has_text = p < end && !is_delimiter(p, end, delimiter) && !ends_line(*p);
                spans_lines |= lines > 0;
                trails |= has_text;
                unmatched = lines > 0 && has_text;
                if (unmatched) break;
            }
            while (p < end && !is_delimiter(p, end, delimiter) && !ends_line(*p)) p++;
            if (p >= end && !final) return row;
            if (column < columns && places[column] >= 0) {
                starts[row * kept + places[column]] = start - text;
                lengths[row * kept + places[column]] = p - start;
            }
            column++;
            if (p >= end || !is_delimiter(p, end, delimiter)) break;
            p += delimiter.bytes;
        }
        unmatched |= spans_lines && column != columns;
        if (unmatched) {
            for (p = line; p < end && !ends_line(*p);) p++;
            if (p >= end && !final) return row;
        }
        if (p < end) p++; /* the \n of \r\n is skipped as an empty line */
        *consumed = p - text;
        kinds[row] = 0;
        if (unmatched) kinds[row] = 3;
        else if (trails) kinds[row] = 4;
        else if (column != columns) kinds[row] = column < columns ? 1 : 2;
        for (int64_t k = row * kept; k < (row + 1) * kept; k++) {
            if (kinds[row]) {
                starts[k] = lengths[k] = 0;
                continue;
            }
            uint8_t *const field = text + starts[k];
            if (lengths[k] == 0) continue;
            if (*field != '"') {
                if (!trim) continue;
                int64_t first = 0, last = lengths[k];
                while (first < last && is_blank(field[first])) first++;
                while (first < last && is_blank(field[last - 1])) last--;
                starts[k] += first;
                lengths[k] = last - first;
                continue;
            }
            int64_t in = 1, out = 0;
            for (; in < lengths[k]; in++) { /* to the closing quote */
                const int has_next = in + 1 < lengths[k];
                if (field[in] == escape && has_next && (field[in + 1] == '"' || field[in + 1] == escape)) {
                    in++;
                } else if (field[in] == '"') {
                    if (!has_next || field[in + 1] != '"') break;
                    in++;
                }
                field[out++] = field[in];
            }
            lengths[k] = out;
        }
        row++;
    }
    return row;
}

int64_t rayrec_split_csv(uint8_t *text, int64_t length, int32_t final, const uint8_t *delimiter, int64_t delimiter_bytes,
                         int32_t escape, int32_t trim, int64_t max_bytes, int64_t max_lines, int32_t columns,
                         const int32_t *places, int32_t kept, int64_t capacity, int64_t *starts, int64_t *lengths,
                         uint8_t *kinds, int64_t *consumed) {
    if (delimiter_bytes == 1) /* The compiler makes a faster copy of the function for it */
        return split_csv(text, length, final, (delimiter_text){delimiter, 1}, escape, trim, max_bytes, max_lines, columns,
                         places, kept, capacity, starts, lengths, kinds, consumed);
    return split_csv(text, length, final, (delimiter_text){delimiter, delimiter_bytes}, escape, trim, max_bytes, max_lines,
                     columns, places, kept, capacity, starts, lengths, kinds, consumed);
}

/* Concatenates field `place` of all rows in `data`, with their starts and the end in `offsets` (rows + 1). */
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

/* Checks which texts are decimal numbers: [+-]? (digits [. digits?] | . digits) ([eE] [+-]? digits)?. */
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

/* Parses texts as integers of up to 18 digits, like rayrec_parse. */
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

/* Parses texts of 8 hexadecimal digits. */
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
