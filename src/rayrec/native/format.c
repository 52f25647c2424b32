/* Formatting of click columns as tab-separated text. */
#include "kernels.h"

#include <stddef.h>
#include <string.h>

enum {
    MAX_COLUMNS = 64,
    MAX_INTEGER_BYTES = 12, /* tab, sign and the ten digits of an int32 */
    TOKEN_BYTES = 9,        /* tab and eight hex digits */
    MAX_ROW_BYTES = 2 + MAX_COLUMNS * MAX_INTEGER_BYTES
};

static const char DIGIT_PAIRS[201] =
    "00010203040506070809101112131415161718192021222324252627282930313233343536373839404142434445464748495051525354"
    "5556575859606162636465666768697071727374757677787980818283848586878889909192939495969798"
    "99";

static uint8_t *put_integer(uint8_t *cursor, int32_t value) {
    uint32_t magnitude = (uint32_t)value;
    if (value < 0) {
        *cursor++ = '-';
        magnitude = 0u - magnitude; /* also right for INT32_MIN, whose negation exceeds an int32 */
    }
    if (magnitude < 10) {
        *cursor++ = (uint8_t)('0' + magnitude);
        return cursor;
    }
    if (magnitude < 100) {
        memcpy(cursor, DIGIT_PAIRS + 2 * magnitude, 2);
        return cursor + 2;
    }
    char digits[10];
    int start = 10;
    while (magnitude >= 100) {
        start -= 2;
        memcpy(digits + start, DIGIT_PAIRS + 2 * (magnitude % 100), 2);
        magnitude /= 100;
    }
    if (magnitude >= 10) {
        start -= 2;
        memcpy(digits + start, DIGIT_PAIRS + 2 * magnitude, 2);
    } else {
        digits[--start] = (char)('0' + magnitude);
    }
    memcpy(cursor, digits + start, (size_t)(10 - start));
    return cursor + (10 - start);
}

static uint8_t *put_token(uint8_t *cursor, uint32_t token) {
    /* Eight nibbles to eight characters in one 64-bit word, written by byte to be independent of byte order. */
    uint64_t nibbles = token;
    nibbles = ((nibbles & 0xFFFF0000u) << 16) | (nibbles & 0xFFFFu);
    nibbles = ((nibbles << 8) | nibbles) & 0x00FF00FF00FF00FFull;
    nibbles = ((nibbles << 4) | nibbles) & 0x0F0F0F0F0F0F0F0Full;
    uint64_t letters = ((nibbles + 0x0606060606060606ull) >> 4) & 0x0101010101010101ull; /* 1 if the digit is a-f */
    uint64_t characters = nibbles + 0x3030303030303030ull + letters * ('a' - '0' - 10);
    for (int i = 0; i < 8; i++) cursor[i] = (uint8_t)(characters >> (56 - 8 * i));
    return cursor + 8;
}

static uint8_t *put_row(uint8_t *cursor, int64_t row, const uint8_t *labels, const int32_t *dense,
                        const uint32_t *tokens, uint64_t missing, int64_t stride, int32_t num_dense,
                        int32_t num_sparse) {
    *cursor++ = (uint8_t)('0' + labels[row]);
    for (int32_t d = 0; d < num_dense; d++, missing >>= 1) {
        *cursor++ = '\t';
        if (!(missing & 1)) cursor = put_integer(cursor, dense[d * stride + row]);
    }
    for (int32_t s = 0; s < num_sparse; s++, missing >>= 1) {
        *cursor++ = '\t';
        if (!(missing & 1)) cursor = put_token(cursor, tokens[s * stride + row]);
    }
    *cursor++ = '\n';
    return cursor;
}

int64_t rayrec_format_rows(const uint8_t *labels, const int32_t *dense, const uint32_t *tokens, const uint64_t *missing,
                           int64_t rows, int64_t stride, int32_t num_dense, int32_t num_sparse, uint8_t *out,
                           int64_t capacity) {
    if (rows < 0 || stride < rows || capacity < 0 || num_dense < 0 || num_sparse < 0 ||
        num_dense > MAX_COLUMNS || num_sparse > MAX_COLUMNS || num_dense + num_sparse > MAX_COLUMNS)
        return -1;
    const int64_t most = 2 + (int64_t)num_dense * MAX_INTEGER_BYTES + (int64_t)num_sparse * TOKEN_BYTES;
    int64_t used = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (labels[row] > 9) return -1;
        if (capacity - used >= most) {
            used = put_row(out + used, row, labels, dense, tokens, missing[row], stride, num_dense, num_sparse) - out;
            continue;
        }
        uint8_t line[MAX_ROW_BYTES]; /* near the end: copied only if it fits */
        int64_t length = put_row(line, row, labels, dense, tokens, missing[row], stride, num_dense, num_sparse) - line;
        if (length > capacity - used) return -1;
        memcpy(out + used, line, (size_t)length);
        used += length;
    }
    return used;
}
