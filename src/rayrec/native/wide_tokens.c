/* Conversion of text categories to 64-bit tokens. */

#include "kernels.h"

#include <stddef.h>
#include <string.h>

static const uint64_t PRIME1 = 0x9E3779B185EBCA87ULL, PRIME2 = 0xC2B2AE3D27D4EB4FULL, PRIME3 = 0x165667B19E3779F9ULL,
                      PRIME4 = 0x85EBCA77C2B2AE63ULL, PRIME5 = 0x27D4EB2F165667C5ULL;

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t load8(const uint8_t *p) { /* needs a little-endian machine */
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline uint64_t load4(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t mix_lane(uint64_t accumulator, uint64_t lane) {
    return rotate(accumulator + lane * PRIME2, 31) * PRIME1;
}

static inline uint64_t merge(uint64_t hash, uint64_t accumulator) {
    return (hash ^ mix_lane(0, accumulator)) * PRIME1 + PRIME4;
}

/* XXH64 with seed 0, from "xxHash fast digest algorithm" (doc/xxhash_spec.md in github.com/Cyan4973/xxHash). */
static uint64_t xxh64(const uint8_t *p, uint64_t length) {
    const uint8_t *const end = p + length;
    uint64_t hash;
    if (length >= 32) {
        uint64_t a = PRIME1 + PRIME2, b = PRIME2, c = 0, d = 0 - PRIME1;
        for (; end - p >= 32; p += 32) {
            a = mix_lane(a, load8(p));
            b = mix_lane(b, load8(p + 8));
            c = mix_lane(c, load8(p + 16));
            d = mix_lane(d, load8(p + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = merge(merge(merge(merge(hash, a), b), c), d);
    } else {
        hash = PRIME5;
    }
    hash += length;
    for (; end - p >= 8; p += 8) hash = rotate(hash ^ mix_lane(0, load8(p)), 27) * PRIME1 + PRIME4;
    if (end - p >= 4) {
        hash = rotate(hash ^ load4(p) * PRIME1, 23) * PRIME2 + PRIME3;
        p += 4;
    }
    for (; p < end; p++) hash = rotate(hash ^ *p * PRIME5, 11) * PRIME1;
    hash = (hash ^ hash >> 33) * PRIME2;
    hash = (hash ^ hash >> 29) * PRIME3;
    return hash ^ hash >> 32;
}

/* Returns the bytes of a text of 1 to 8, the first one lowest, and zeros above. Reads no others. */
static inline uint64_t load_short(const uint8_t *p, int64_t length) {
    if (length >= 4) return load4(p) | load4(p + length - 4) << (8 * (length - 4));
    return p[0] | (uint64_t)p[length >> 1] << (8 * (length >> 1)) | (uint64_t)p[length - 1] << (8 * (length - 1));
}

/* Parses 1 to 8 digits at once, with zeros before them: adjacent digits are joined to pairs, these to fours, and these to the value.
 * Returns whether all are digits. */
static inline int short_digits(const uint8_t *p, int64_t length, uint64_t *value) {
    const uint64_t zeros = 0x3030303030303030ULL, high = 0xF0F0F0F0F0F0F0F0ULL;
    uint64_t word = load_short(p, length);
    if (length < 8) word = word << (64 - 8 * length) | zeros >> (8 * length);
    if ((word & high) != zeros || ((word + 0x0606060606060606ULL) & high) != zeros) return 0;
    word = (word & 0x0F0F0F0F0F0F0F0FULL) * (10 << 8 | 1) >> 8;
    word = (word & 0x00FF00FF00FF00FFULL) * (100 << 16 | 1) >> 16;
    *value = (word & 0x0000FFFF0000FFFFULL) * (10000ULL << 32 | 1) >> 32;
    return 1;
}

/* Returns whether the text, not empty, is an int64 in canonical form: no plus, no leading zeros, no -0. */
static inline int canonical_integer(const uint8_t *p, int64_t length, uint64_t *out) {
    const int negative = length > 1 && *p == '-';
    p += negative;
    length -= negative;
    if (length > 19 || (*p == '0' && (length > 1 || negative))) return 0;
    uint64_t value = 0, part; /* 19 digits fit 64 bits */
    if (length <= 8) {
        if (!short_digits(p, length, &value)) return 0;
    } else
        for (int64_t size = (length - 1) % 8 + 1; length; p += size, length -= size, size = 8) {
            if (!short_digits(p, size, &part)) return 0;
            value = value * 100000000 + part;
        }
    if (value > (uint64_t)INT64_MAX + (uint64_t)negative) return 0;
    *out = negative ? 0 - value : value;
    return 1;
}

static int is_ascii(const uint8_t *p, int64_t length) {
    uint64_t bits = 0;
    int64_t i = 0;
    for (; i + 8 <= length; i += 8) bits |= load8(p + i);
    for (; i < length; i++) bits |= p[i];
    return !(bits & 0x8080808080808080ULL);
}

/* Returns whether the bytes are UTF-8 (RFC 3629: no overlong forms, no surrogates, at most U+10FFFF). */
static int is_utf8(const uint8_t *p, int64_t length) {
    const uint8_t *const end = p + length;
    while (p < end) {
        if (end - p >= 8 && !(load8(p) & 0x8080808080808080ULL)) {
            p += 8;
            continue;
        }
        const uint8_t first = *p++;
        if (first < 0x80) continue;
        int more;
        uint8_t low = 0x80, high = 0xBF; /* of the second byte */
        if (first >= 0xC2 && first <= 0xDF) more = 1;
        else if ((first & 0xF0) == 0xE0) {
            more = 2;
            if (first == 0xE0) low = 0xA0;
            if (first == 0xED) high = 0x9F;
        } else if (first >= 0xF0 && first <= 0xF4) {
            more = 3;
            if (first == 0xF0) low = 0x90;
            if (first == 0xF4) high = 0x8F;
        } else return 0;
        if (end - p < more || *p < low || *p > high) return 0;
        for (int i = 1; i < more; i++)
            if ((p[i] & 0xC0) != 0x80) return 0;
        p += more;
    }
    return 1;
}

/* Returns 1 or 0 for true or false in lower case, upper case or capitalized; -1 for other texts. */
static inline int boolean_of(const uint8_t *p, int64_t length) {
    if (length == 4 && (!memcmp(p, "true", 4) || !memcmp(p, "True", 4) || !memcmp(p, "TRUE", 4))) return 1;
    if (length == 5 && (!memcmp(p, "false", 5) || !memcmp(p, "False", 5) || !memcmp(p, "FALSE", 5))) return 0;
    return -1;
}

static inline void text_tokens(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count,
                               uint64_t *out, uint8_t *status, int booleans) {
    const int ascii = is_ascii(data + offsets[0], offsets[count] - offsets[0]);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *text = data + offsets[i];
        const int64_t length = offsets[i + 1] - offsets[i];
        out[i] = 0;
        status[i] = TEXT_VALUE;
        if (length == 0 || (null && null[i])) status[i] = TEXT_EMPTY;
        else if (canonical_integer(text, length, &out[i])) continue;
        else if (booleans && boolean_of(text, length) >= 0) out[i] = (uint64_t)boolean_of(text, length);
        else if (ascii || is_utf8(text, length)) out[i] = xxh64(text, (uint64_t)length);
        else status[i] = TEXT_REFUSED;
    }
}

/* Writes the tokens of texts data[offsets[i], offsets[i + 1]): the int64 of canonical integers, 1 and 0 for true and false, else
 * the XXH64. */
void rayrec_text_tokens(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint64_t *out,
                        uint8_t *status) {
    text_tokens(offsets, data, null, count, out, status, 1);
}

/* The same, with true and false as plain text. */
void rayrec_plain_text_tokens(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count,
                              uint64_t *out, uint8_t *status) {
    text_tokens(offsets, data, null, count, out, status, 0);
}

/* Returns whether bit `i` is 1, of as many as there are values. NULL: all are. */
static inline int is_valid(const uint8_t *bits, int64_t i) { return !bits || (bits[i >> 3] >> (i & 7) & 1); }

/* Writes the tokens and statuses of texts given by their codes in a dictionary, whose tokens and statuses are given. A text is
 * missing if bit `first` + i of `valid` is 0; then its code is not read. */
void rayrec_coded_tokens(const int32_t *codes, const uint8_t *valid, int64_t first, int64_t count, const uint64_t *tokens,
                         const uint8_t *statuses, uint64_t *out, uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const int present = is_valid(valid, first + i);
        out[i] = present ? tokens[codes[i]] : 0;
        status[i] = present ? statuses[codes[i]] : TEXT_EMPTY;
    }
}

/* Copies values of 8 bytes. A value is missing, and 0, if bit `first` + i of `valid` is 0. */
void rayrec_present_words(const uint64_t *values, const uint8_t *valid, int64_t first, int64_t count, uint64_t *out,
                          uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const int present = is_valid(valid, first + i);
        out[i] = present ? values[i] : 0;
        status[i] = present ? TEXT_VALUE : TEXT_EMPTY;
    }
}

/* Writes what texts are as categories: TEXT_EMPTY, TEXT_TRUE, TEXT_FALSE, TEXT_REFUSED if not UTF-8, else TEXT_VALUE. */
void rayrec_text_kinds(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint8_t *kinds) {
    const int ascii = is_ascii(data + offsets[0], offsets[count] - offsets[0]);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *text = data + offsets[i];
        const int64_t length = offsets[i + 1] - offsets[i];
        const int boolean = boolean_of(text, length);
        kinds[i] = TEXT_VALUE;
        if (length == 0 || (null && null[i])) kinds[i] = TEXT_EMPTY;
        else if (boolean >= 0) kinds[i] = boolean ? TEXT_TRUE : TEXT_FALSE;
        else if (!ascii && !is_utf8(text, length)) kinds[i] = TEXT_REFUSED;
    }
}

/* Parses texts as int64: blanks, [+-]? digits [. zeros?]?, blanks; true and false are 1 and 0, nan is an empty field. */
void rayrec_text_whole(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint64_t *out,
                       uint8_t *status) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *p = data + offsets[i], *end = data + offsets[i + 1];
        out[i] = 0;
        while (p < end && (*p == ' ' || *p == '\t')) p++;
        while (p < end && (end[-1] == ' ' || end[-1] == '\t')) end--;
        status[i] = TEXT_EMPTY;
        if (p == end || (null && null[i])) continue;
        if (end - p == 3 && (p[0] | 0x20) == 'n' && (p[1] | 0x20) == 'a' && (p[2] | 0x20) == 'n') continue;
        status[i] = TEXT_VALUE;
        const int boolean = boolean_of(p, end - p);
        if (boolean >= 0) {
            out[i] = (uint64_t)boolean;
            continue;
        }
        const int negative = *p == '-';
        p += negative || *p == '+';
        const uint8_t *const first = p;
        const uint64_t limit = (uint64_t)INT64_MAX + (uint64_t)negative;
        uint64_t value = 0;
        int good = 1;
        for (uint8_t digit; p < end && (digit = (uint8_t)(*p - '0')) <= 9; p++) {
            good &= value <= (limit - digit) / 10;
            value = value * 10 + digit;
        }
        good &= p > first;
        if (p < end && *p == '.')
            for (p++; p < end && *p == '0';) p++;
        if (good && p == end) out[i] = negative ? 0 - value : value;
        else status[i] = TEXT_REFUSED;
    }
}
