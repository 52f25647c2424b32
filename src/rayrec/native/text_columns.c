/* Splitting of CSV text into columns, and parsing of text columns as numbers. */

#include "kernels.h"
#include "vectors.h"

#include <stddef.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

enum { BLOCK = 64 };

/* Marks of a block of text, bit i for block[i]. */
typedef struct {
    const uint8_t *block;
    uint64_t delimiters; /* first bytes of a delimiter */
    uint64_t line_ends;
    uint64_t quotes;
} marked_block;

#if defined(__SSE2__)
static inline uint64_t bits_of(__m128i found, int first) { return (uint64_t)(uint32_t)_mm_movemask_epi8(found) << first; }

static inline void mark(marked_block *at, const uint8_t *p, uint8_t delimiter) {
    const __m128i mark = _mm_set1_epi8((char)delimiter), quote = _mm_set1_epi8('"');
    const __m128i feed = _mm_set1_epi8('\n'), carriage = _mm_set1_epi8('\r');
    at->delimiters = at->line_ends = at->quotes = 0;
    for (int i = 0; i < BLOCK; i += 16) {
        const __m128i text = _mm_loadu_si128((const __m128i *)(p + i));
        at->delimiters |= bits_of(_mm_cmpeq_epi8(text, mark), i);
        at->line_ends |= bits_of(_mm_or_si128(_mm_cmpeq_epi8(text, feed), _mm_cmpeq_epi8(text, carriage)), i);
        at->quotes |= bits_of(_mm_cmpeq_epi8(text, quote), i);
    }
}
#else
/* Returns the high bit of each byte of `text` that equals the byte of which `pattern` has eight. */
static inline uint64_t equal_bytes(uint64_t text, uint64_t pattern) {
    const uint64_t low = 0x7F7F7F7F7F7F7F7FULL, other = text ^ pattern;
    return ~(((other & low) + low) | other | low);
}

static inline uint64_t bits_of(uint64_t found, int first) { /* the eight bits, side by side */
    return ((found >> 7) * 0x0102040810204080ULL >> 56) << first;
}

static inline void mark(marked_block *at, const uint8_t *p, uint8_t delimiter) { /* needs a little-endian machine */
    const uint64_t ones = 0x0101010101010101ULL;
    at->delimiters = at->line_ends = at->quotes = 0;
    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t text;
        memcpy(&text, p + i, 8);
        at->delimiters |= bits_of(equal_bytes(text, ones * delimiter), i);
        at->line_ends |= bits_of(equal_bytes(text, ones * '\n') | equal_bytes(text, ones * '\r'), i);
        at->quotes |= bits_of(equal_bytes(text, ones * '"'), i);
    }
}
#endif

static inline void mark_block(marked_block *at, const uint8_t *p, const uint8_t *end, uint8_t delimiter) {
    at->block = p;
    if (end - p >= BLOCK) {
        mark(at, p, delimiter);
        return;
    }
    uint8_t tail[BLOCK] = {0};
    memcpy(tail, p, (size_t)(end - p));
    mark(at, tail, delimiter);
    if (!delimiter) at->delimiters &= (1ULL << (end - p)) - 1;
}

/* Returns the first byte at or after `p` that may end a field, or `end`. */
static inline const uint8_t *next_mark(marked_block *at, const uint8_t *p, const uint8_t *end, uint8_t delimiter) {
    const uint64_t offset = (uint64_t)(p - at->block);
    if (offset < BLOCK) {
        const uint64_t marks = (at->delimiters | at->line_ends) >> offset;
        if (marks) return p + __builtin_ctzll(marks);
        p = at->block + BLOCK;
    }
    for (; p < end; p += BLOCK) {
        mark_block(at, p, end, delimiter);
        const uint64_t marks = at->delimiters | at->line_ends;
        if (marks) return p + __builtin_ctzll(marks);
    }
    return end;
}

/* Returns the closing quote if it is the next one and on this line: of most quoted fields, which start with `p`. Else NULL. */
static inline const uint8_t *simple_closing_quote(marked_block *at, const uint8_t *p, const uint8_t *end, uint8_t delimiter,
                                                  int64_t max_bytes) {
    uint64_t offset = (uint64_t)(p - at->block);
    if (p < end && (offset >= BLOCK || !(at->quotes >> offset))) {
        mark_block(at, p, end, delimiter);
        offset = 0;
    }
    if (p >= end || !(at->quotes >> offset)) return NULL;
    const int64_t size = __builtin_ctzll(at->quotes >> offset);
    const uint64_t inside = (1ULL << size) - 1;
    const uint8_t *const quote = p + size;
    if ((at->line_ends >> offset & inside) || size > max_bytes || quote + 1 >= end || quote[1] == '"') return NULL;
    return quote;
}

/* Returns the end of an unquoted field, or of what follows a closing quote, from `p` on. */
static inline const uint8_t *field_end(marked_block *at, const uint8_t *p, const uint8_t *end, delimiter_text delimiter) {
    p = next_mark(at, p, end, *delimiter.text);
    while (delimiter.bytes > 1 && p < end && !is_delimiter(p, end, delimiter) && !ends_line(*p))
        p = next_mark(at, p + 1, end, *delimiter.text);
    return p;
}

/* Bit of a field's length while its quotes are yet to be removed. */
#define QUOTED (1U << 31)

/* Removes the quotes of a field, which starts with one, and those that double or escape others, in place. */
static void unquote(uint8_t *text, rayrec_field *field, int32_t escape) {
    uint8_t *const p = text + field->start;
    uint32_t in = 1, out = 0;
    field->length &= ~QUOTED;
    for (; in < field->length; in++) { /* to the closing quote */
        const int has_next = in + 1 < field->length;
        if (p[in] == escape && has_next && (p[in + 1] == '"' || p[in + 1] == escape)) {
            in++;
        } else if (p[in] == '"') {
            if (!has_next || p[in + 1] != '"') break;
            in++;
        }
        p[out++] = p[in];
    }
    field->length = out;
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
 * fields[r * kept + k], its quotes removed in the text. kinds[r] is 0, or 1, 2, 3 or 4 for a row with too few fields, too many
 * fields, an unmatched quote or text after a closing quote, whose fields are stored as empty.
 *
 * Returns the number of rows stored, at most `capacity`; *consumed is their size in bytes. With `final` the last row may lack its
 * line end. The text has less than 2^31 bytes. */
PART_OF_IT int64_t split_csv(uint8_t *text, int64_t length, int32_t final, delimiter_text delimiter, int32_t escape,
                             int32_t trim, int64_t max_bytes, int64_t max_lines, int32_t columns, const int32_t *places,
                             int32_t kept, int64_t capacity, rayrec_field *fields, uint8_t *kinds, int64_t *consumed) {
    const uint8_t *const end = text + length;
    const uint8_t *p = text;
    marked_block at = {text + length, 0, 0, 0}; /* none yet: the first look marks a block */
    int64_t row = 0;
    *consumed = 0;
    while (p < end && row < capacity) {
        if (ends_line(*p)) { /* an empty line, or the \n of \r\n */
            p++;
            *consumed = p - text;
            continue;
        }
        const uint8_t *const line = p;
        rayrec_field *const row_fields = fields + row * kept;
        int column = 0, spans_lines = 0, unmatched = 0, trails = 0, has_quotes = 0;
        for (;;) { /* one field per turn */
            const uint8_t *start = p, *stop = NULL;
            uint32_t quoted = 0;
            if (p < end && *p == '"') {
                int64_t lines = 0;
                int exceeded = 0;
                const uint8_t *quote =
                    escape < 0 ? simple_closing_quote(&at, p + 1, end, *delimiter.text, max_bytes) : NULL;
                if (quote) {
                    start = p + 1;
                    stop = quote;
                } else {
                    quote = closing_quote(p + 1, end, escape, max_bytes, max_lines, &lines, &exceeded);
                    quoted = QUOTED;
                }
                if (!quote) {
                    if (!exceeded && !final) return row;
                    unmatched = 1;
                    break;
                }
                p = quote + 1;
                while (p < end && is_blank(*p) && !is_delimiter(p, end, delimiter)) p++;
                if (!final && is_cut(p, end, delimiter)) return row;
                const int has_text = p < end && !is_delimiter(p, end, delimiter) && !ends_line(*p);
                has_quotes |= quoted != 0;
                spans_lines |= lines > 0;
                trails |= has_text;
                unmatched = lines > 0 && has_text;
                if (unmatched) break;
            }
            p = field_end(&at, p, end, delimiter);
            if (p >= end && !final) return row;
            if (column < columns && places[column] >= 0) {
                if (!stop) {
                    stop = p;
                    if (trim && !quoted) {
                        while (start < stop && is_blank(*start)) start++;
                        while (start < stop && is_blank(stop[-1])) stop--;
                    }
                }
                row_fields[places[column]] = (rayrec_field){(uint32_t)(start - text), (uint32_t)(stop - start) | quoted};
            }
            column++;
            if (p >= end || ends_line(*p)) break;
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
        row++;
        if (kinds[row - 1]) {
            memset(row_fields, 0, (size_t)kept * sizeof *row_fields);
            continue;
        }
        for (int32_t k = 0; has_quotes && k < kept; k++)
            if (row_fields[k].length & QUOTED) unquote(text, &row_fields[k], escape);
    }
    return row;
}

int64_t rayrec_split_csv(uint8_t *text, int64_t length, int32_t final, const uint8_t *delimiter, int64_t delimiter_bytes,
                         int32_t escape, int32_t trim, int64_t max_bytes, int64_t max_lines, int32_t columns,
                         const int32_t *places, int32_t kept, int64_t capacity, rayrec_field *fields, uint8_t *kinds,
                         int64_t *consumed) {
    if (delimiter_bytes == 1) /* The compiler makes a faster copy of the function for it */
        return split_csv(text, length, final, (delimiter_text){delimiter, 1}, escape, trim, max_bytes, max_lines, columns,
                         places, kept, capacity, fields, kinds, consumed);
    return split_csv(text, length, final, (delimiter_text){delimiter, delimiter_bytes}, escape, trim, max_bytes, max_lines,
                     columns, places, kept, capacity, fields, kinds, consumed);
}

/* Computes the bytes of each column k: the sum of the lengths of its fields. */
void rayrec_text_sizes(const rayrec_field *fields, int64_t rows, int32_t kept, int64_t *sizes) {
    memset(sizes, 0, (size_t)kept * sizeof *sizes);
    for (int64_t row = 0; row < rows; row++)
        for (int32_t k = 0; k < kept; k++) sizes[k] += fields[row * kept + k].length;
}

/* Text of rows at once stays in the CPU's cache, and the processor prefetches their part of each column. */
enum { SHORT = 16, ROWS_AT_ONCE = 256 };

/* Concatenates the fields of each column k in data[starts[k], starts[k + 1]), and computes offsets[k * (rows + 1)], the starts and
 * the end of the field of each row there. */
void rayrec_gather_text(const uint8_t *text, int64_t length, const rayrec_field *fields, int64_t rows, int32_t kept,
                        const int64_t *starts, int64_t *offsets, uint8_t *data) {
    for (int32_t k = 0; k < kept; k++) offsets[k * (rows + 1)] = 0;
    for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
        const int64_t stop = first + ROWS_AT_ONCE < rows ? first + ROWS_AT_ONCE : rows;
        for (int32_t k = 0; k < kept; k++) {
            const int64_t size = starts[k + 1] - starts[k];
            int64_t *const out = offsets + k * (rows + 1);
            int64_t at = out[first];
            for (int64_t row = first; row < stop; row++) {
                const rayrec_field field = fields[row * kept + k];
                uint8_t *const to = data + starts[k] + at;
                /* Bytes behind a short field are overwritten by the next one. */
                if (field.length <= SHORT && field.start + SHORT <= length && at + SHORT <= size)
                    memcpy(to, text + field.start, SHORT);
                else
                    memcpy(to, text + field.start, field.length);
                at += field.length;
                out[row + 1] = at;
            }
        }
    }
}

static inline const uint8_t *digits(const uint8_t *p, const uint8_t *end) {
    while (p < end && (uint8_t)(*p - '0') <= 9) p++;
    return p;
}

/* The end of a number without exponent at p, or NULL if it has no digit. */
static inline const uint8_t *mantissa(const uint8_t *p, const uint8_t *end) {
    p += *p == '-' || *p == '+';
    const uint8_t *q = digits(p, end);
    int64_t found = q - p;
    if (q < end && *q == '.') {
        p = q + 1;
        q = digits(p, end);
        found += q - p;
    }
    return found ? q : NULL;
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
        const uint8_t *q = mantissa(p, end);
        if (!q) continue;
        if (q < end && (*q | 0x20) == 'e') {
            p = q + 1;
            p += p < end && (*p == '-' || *p == '+');
            q = digits(p, end);
            if (q == p) continue;
        }
        if (q == end) status[i] = TEXT_VALUE;
    }
}

/* Parses the texts that rayrec_check_numbers accepts as double; others are 0. A number whose digits are below 2^53, times or divided
 * by a power of ten up to 10^22, is rounded once, so it is the nearest double (Clinger 1990). Status TEXT_LONG: another number, 0. */
void rayrec_text_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, double *out,
                         uint8_t *status) {
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                    1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    enum { MAX_POWER = 22, MAX_DIGITS = 18 };
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i], *const end = data + offsets[i + 1];
        out[i] = 0;
        if (p == end || (null && null[i])) {
            status[i] = TEXT_EMPTY;
            continue;
        }
        status[i] = TEXT_REFUSED;
        const int negative = *p == '-';
        p += negative || *p == '+';
        uint64_t value = 0; /* wraps if there are too many digits; then it is not used */
        const uint8_t *q = p;
        for (; q < end && (uint8_t)(*q - '0') <= 9; q++) value = value * 10 + (uint64_t)(*q - '0');
        int64_t found = q - p, power = 0;
        if (q < end && *q == '.') {
            p = ++q;
            for (; q < end && (uint8_t)(*q - '0') <= 9; q++) value = value * 10 + (uint64_t)(*q - '0');
            found += q - p;
            power = p - q;
        }
        if (found == 0) continue;
        if (q < end && (*q | 0x20) == 'e') {
            p = q + 1;
            const int below_one = p < end && *p == '-';
            p += p < end && (*p == '-' || *p == '+');
            int64_t exponent = 0;
            for (q = p; q < end && (uint8_t)(*q - '0') <= 9; q++)
                if (exponent <= MAX_POWER + MAX_DIGITS) exponent = exponent * 10 + (*q - '0');
            if (q == p) continue;
            power += below_one ? -exponent : exponent;
        }
        if (q != end) continue;
        status[i] = TEXT_LONG;
        if (found > MAX_DIGITS || value > 1ULL << 53 || power > MAX_POWER || power < -MAX_POWER) continue;
        const double number = power < 0 ? (double)value / powers[-power] : (double)value * powers[power];
        out[i] = negative ? -number : number;
        status[i] = TEXT_VALUE;
    }
}

/* Whether all texts are empty or decimal numbers without an exponent, of so few letters that they are below 10^18. No values are
 * made, and the first other text ends it. */
int64_t rayrec_are_short_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count) {
    enum { MAX_LETTERS = 18 };
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *const p = data + offsets[i], *const end = data + offsets[i + 1];
        if (p == end || (null && null[i])) continue;
        if (end - p > MAX_LETTERS || mantissa(p, end) != end) return 0;
    }
    return 1;
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
