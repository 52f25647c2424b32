/* Pages of Parquet files whose values are a dictionary's entries: https://parquet.apache.org/docs/file-format. Files may be damaged
 * or made to harm, so that nothing outside of the given bytes is read. */
#include "kernels.h"

#include <string.h>

/* Bytes of Thrift's compact protocol that are not yet read. */
typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    int failed; /* whether they ended too early, or have a type that does not exist; then all that is read is 0 */
} input;

enum thrift_type {
    THRIFT_STOP,
    THRIFT_TRUE,
    THRIFT_FALSE,
    THRIFT_BYTE,
    THRIFT_INT16,
    THRIFT_INT32,
    THRIFT_INT64,
    THRIFT_DOUBLE,
    THRIFT_BINARY,
    THRIFT_LIST,
    THRIFT_SET,
    THRIFT_MAP,
    THRIFT_STRUCT
};
enum { MAX_DEPTH = 16 }; /* of nested structs */
enum { PAGE_TYPE = 1, PAGE_BYTES, PAGE_STORED_BYTES, PAGE_DATA = 5, PAGE_DICTIONARY = 7, PAGE_DATA_2 }; /* fields of PageHeader */
enum { MAX_FIELDS = 8 };                                                                                /* in the structs of a page */

static uint8_t next_byte(input *in) {
    if (in->failed || in->at >= in->end) {
        in->failed = 1;
        return 0;
    }
    return *in->at++;
}

static void skip_bytes(input *in, uint64_t count) {
    if (in->failed || count > (uint64_t)(in->end - in->at)) in->failed = 1;
    else in->at += count;
}

static uint64_t next_varint(input *in) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        const uint8_t byte = next_byte(in);
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return value;
    }
    in->failed = 1;
    return 0;
}

static int64_t next_integer(input *in) {
    const uint64_t value = next_varint(in);
    return (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
}

/* Reads the head of a struct's next field. Returns its type, THRIFT_STOP behind the last one, and sets *id, which is that of the
 * field before. */
static int next_field(input *in, int64_t *id) {
    const uint8_t head = next_byte(in);
    const int type = head & 15;
    if (type != THRIFT_STOP) *id = head >> 4 ? *id + (head >> 4) : next_integer(in);
    return in->failed ? THRIFT_STOP : type;
}

static void skip_value(input *in, int type, int depth);

static void skip_items(input *in, uint64_t count, int type, int depth) {
    for (uint64_t i = 0; i < count && !in->failed; i++) {
        if (type == THRIFT_TRUE || type == THRIFT_FALSE) skip_bytes(in, 1);
        else skip_value(in, type, depth);
    }
}

static void skip_value(input *in, int type, int depth) {
    if (depth == 0) in->failed = 1;
    if (in->failed || type == THRIFT_TRUE || type == THRIFT_FALSE) return;
    if (type == THRIFT_BYTE) {
        skip_bytes(in, 1);
    } else if (type >= THRIFT_INT16 && type <= THRIFT_INT64) {
        next_varint(in);
    } else if (type == THRIFT_DOUBLE) {
        skip_bytes(in, 8);
    } else if (type == THRIFT_BINARY) {
        skip_bytes(in, next_varint(in));
    } else if (type == THRIFT_LIST || type == THRIFT_SET) {
        const uint8_t head = next_byte(in);
        const uint64_t count = head >> 4 == 15 ? next_varint(in) : head >> 4;
        skip_items(in, count, head & 15, depth - 1);
    } else if (type == THRIFT_MAP) {
        const uint64_t count = next_varint(in);
        const uint8_t types = count ? next_byte(in) : 0;
        for (uint64_t i = 0; i < count && !in->failed; i++) {
            skip_items(in, 1, types >> 4, depth - 1);
            skip_items(in, 1, types & 15, depth - 1);
        }
    } else if (type == THRIFT_STRUCT) {
        int64_t id = 0;
        for (int field; (field = next_field(in, &id)) != THRIFT_STOP;) skip_value(in, field, depth - 1);
    } else {
        in->failed = 1;
    }
}

/* Reads the integers and booleans of a struct to places[id], and skips other fields, and those without a place. */
static void read_struct(input *in, int64_t *const places[MAX_FIELDS]) {
    int64_t id = 0;
    for (int type; (type = next_field(in, &id)) != THRIFT_STOP;) {
        int64_t *place = id > 0 && id < MAX_FIELDS ? places[id] : NULL;
        if (place && (type == THRIFT_TRUE || type == THRIFT_FALSE)) *place = type == THRIFT_TRUE;
        else if (place && type >= THRIFT_INT16 && type <= THRIFT_INT64) *place = next_integer(in);
        else skip_value(in, type, MAX_DEPTH);
    }
}

enum page_type { DATA_PAGE = 0, DICTIONARY_PAGE = 2, DATA_PAGE_2 = 3 };
enum encoding { PLAIN = 0, PLAIN_DICTIONARY = 2, RUNS = 3, RUNS_OF_CODES = 8 };

/* Header of a page. -1: it does not say this. */
typedef struct {
    int64_t type;
    int64_t stored_bytes;
    int64_t bytes; /* once it is decompressed */
    int64_t values;
    int64_t encoding;        /* of values */
    int64_t levels_encoding; /* of definition levels */
    int64_t level_bytes;     /* of definition levels, in version 2 */
    int64_t repetition_bytes;
    int64_t is_compressed;
} page_header;

/* Reads the header of a page. */
static void read_header(input *in, page_header *page) {
    int64_t *const of_data[MAX_FIELDS] = {NULL, &page->values, &page->encoding, &page->levels_encoding};
    int64_t *const of_dictionary[MAX_FIELDS] = {NULL, &page->values, &page->encoding};
    int64_t *const of_data_2[MAX_FIELDS] = {NULL, &page->values, NULL, NULL, &page->encoding, &page->level_bytes,
                                            &page->repetition_bytes, &page->is_compressed};
    const page_header empty = {.type = -1, .encoding = -1, .levels_encoding = -1, .is_compressed = 1};
    *page = empty;
    int64_t id = 0;
    for (int type; (type = next_field(in, &id)) != THRIFT_STOP;) {
        const int is_struct = type == THRIFT_STRUCT;
        if (type == THRIFT_INT32 && id == PAGE_TYPE) page->type = next_integer(in);
        else if (type == THRIFT_INT32 && id == PAGE_BYTES) page->bytes = next_integer(in);
        else if (type == THRIFT_INT32 && id == PAGE_STORED_BYTES) page->stored_bytes = next_integer(in);
        else if (is_struct && id == PAGE_DATA) read_struct(in, of_data);
        else if (is_struct && id == PAGE_DICTIONARY) read_struct(in, of_dictionary);
        else if (is_struct && id == PAGE_DATA_2) read_struct(in, of_data_2);
        else skip_value(in, type, MAX_DEPTH);
    }
}

enum { CODEC_NONE, CODEC_SNAPPY, CODEC_LZ4 };

/* Bytes that are being decompressed. */
typedef struct {
    uint8_t *begin;
    uint8_t *at;
    uint8_t *end;
} output;

/* Copies `count` bytes of the input. Returns whether there are as many, and room for them. */
static inline int copy_literal(input *in, output *out, uint64_t count) {
    const uint64_t left = (uint64_t)(in->end - in->at), room = (uint64_t)(out->end - out->at);
    if (count > left || count > room) return 0;
    if (count <= 16 && left >= 16 && room >= 16) memcpy(out->at, in->at, 16);
    else memcpy(out->at, in->at, (size_t)count);
    in->at += count;
    out->at += count;
    return 1;
}

/* Repeats `count` bytes from `offset` bytes before. Returns whether they are there, and room for them. */
static inline int copy_before(output *out, uint64_t offset, uint64_t count) {
    const uint64_t room = (uint64_t)(out->end - out->at);
    if (offset == 0 || offset > (uint64_t)(out->at - out->begin) || count > room) return 0;
    const uint8_t *from = out->at - offset;
    uint8_t *to = out->at;
    out->at += count;
    if (offset >= 8 && room >= count + 8) {
        for (uint64_t done = 0; done < count; done += 8) memcpy(to + done, from + done, 8);
    } else {
        for (uint64_t done = 0; done < count; done++) to[done] = from[done];
    }
    return 1;
}

static uint32_t next_number(input *in, int bytes) {
    uint32_t number = 0;
    for (int i = 0; i < bytes; i++) number |= (uint32_t)next_byte(in) << (8 * i);
    return number;
}

/* https://github.com/google/snappy/blob/main/format_description.txt */
static int decompress_snappy(input in, output out) {
    if (next_varint(&in) != (uint64_t)(out.end - out.begin)) return 0;
    while (in.at < in.end) {
        const uint8_t tag = next_byte(&in);
        uint64_t count = tag >> 2;
        int is_copied;
        if ((tag & 3) == 0) {
            if (count >= 60) count = next_number(&in, (int)count - 59);
            is_copied = copy_literal(&in, &out, count + 1);
        } else if ((tag & 3) == 1) {
            const uint32_t high = (uint32_t)tag >> 5 << 8;
            is_copied = copy_before(&out, high | next_byte(&in), (count & 7) + 4);
        } else {
            is_copied = copy_before(&out, next_number(&in, (tag & 3) == 2 ? 2 : 4), count + 1);
        }
        if (in.failed || !is_copied) return 0;
    }
    return !in.failed && out.at == out.end;
}

static uint64_t next_length(input *in, uint64_t count) {
    if (count < 15) return count;
    for (uint8_t more = 255; more == 255 && !in->failed; count += more) more = next_byte(in);
    return count;
}

/* https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md */
static int decompress_lz4(input in, output out) {
    while (in.at < in.end) {
        const uint8_t token = next_byte(&in);
        const uint64_t literal = next_length(&in, token >> 4);
        if (in.failed || !copy_literal(&in, &out, literal)) return 0;
        if (in.at == in.end) break; /* the last sequence has no copy */
        const uint32_t offset = next_number(&in, 2);
        const uint64_t count = next_length(&in, token & 15) + 4;
        if (in.failed || !copy_before(&out, offset, count)) return 0;
    }
    return out.at == out.end;
}

/* Decompresses to exactly `bytes` bytes of `out`. Returns whether these are what is stored. */
int32_t rayrec_decompress(int64_t codec, const uint8_t *data, int64_t length, uint8_t *out, int64_t bytes) {
    const input in = {data, data + length, 0};
    const output to = {out, out, out + bytes};
    return codec == CODEC_SNAPPY ? decompress_snappy(in, to) : decompress_lz4(in, to);
}

/* Copies the texts of a dictionary page, each behind its length in 4 bytes, to `out`. Text i is out[offsets[i], offsets[i + 1]). Returns
 * whether there are `count`. */
static int copy_texts(input in, int64_t count, int64_t *offsets, uint8_t *out) {
    output to = {out, out, out + (in.end - in.at)};
    offsets[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t size = next_number(&in, 4);
        if (in.failed || !copy_literal(&in, &to, size)) return 0;
        offsets[i + 1] = to.at - out;
    }
    return 1;
}

/* Copies entries of a dictionary with items of 4 or 8 bytes: out[i] is that of codes[i]. */
static void copy_numbers(const uint8_t *dictionary, int64_t item_bytes, const uint32_t *codes, int64_t count, uint8_t *out) {
    if (item_bytes == 4) {
        for (int64_t i = 0; i < count; i++) memcpy(out + 4 * i, dictionary + 4 * (int64_t)codes[i], 4);
    } else {
        for (int64_t i = 0; i < count; i++) memcpy(out + 8 * i, dictionary + 8 * (int64_t)codes[i], 8);
    }
}

/* A run of numbers: packed ones of `width` bits, or one that is repeated. */
typedef struct {
    const uint8_t *packed; /* NULL: `value` is repeated */
    int64_t bytes;
    int64_t count;
    uint32_t value;
} number_run;

/* Reads the next run of numbers of `width` bits. Returns whether there is one. */
static int next_run(input *in, int width, number_run *run) {
    const uint64_t head = next_varint(in), size = head >> 1;
    if (in->failed || size == 0 || size >> 31) return 0;
    const uint8_t *const data = in->at;
    run->count = (int64_t)(head & 1 ? size * 8 : size);
    run->bytes = head & 1 ? (int64_t)size * width : (width + 7) >> 3;
    run->packed = head & 1 ? data : NULL;
    run->value = 0;
    skip_bytes(in, (uint64_t)run->bytes);
    if (in->failed) return 0;
    if (!run->packed) memcpy(&run->value, data, (size_t)run->bytes);
    run->value &= (uint32_t)((1ULL << width) - 1);
    return 1;
}

/* Unpacks the first `count` numbers of a run. */
static void unpack(const number_run *run, int width, int64_t count, uint32_t *out) {
    const uint64_t mask = (1ULL << width) - 1;
    /* Of these, all 8 bytes from the first one on are in the run. */
    int64_t whole = run->bytes < 8 || width == 0 ? 0 : ((run->bytes - 8) * 8 + 7) / width + 1;
    if (whole > count) whole = count;
    int64_t bit = 0, i = 0;
    for (; i < whole; i++, bit += width) {
        uint64_t word;
        memcpy(&word, run->packed + (bit >> 3), 8);
        out[i] = (uint32_t)(word >> (bit & 7) & mask);
    }
    for (; i < count; i++, bit += width) {
        uint64_t word = 0;
        const int64_t left = run->bytes - (bit >> 3);
        memcpy(&word, run->packed + (bit >> 3), (size_t)(left < 8 ? left : 8));
        out[i] = (uint32_t)(word >> (bit & 7) & mask);
    }
}

/* Decodes `count` numbers of `width` bits. Returns whether there are as many. */
static int decode_numbers(input in, int width, int64_t count, uint32_t *out) {
    for (number_run run; count > 0; count -= run.count, out += run.count) {
        if (!next_run(&in, width, &run)) return 0;
        if (run.count > count) run.count = count;
        if (run.packed) unpack(&run, width, run.count, out);
        else for (int64_t i = 0; i < run.count; i++) out[i] = run.value;
    }
    return 1;
}

/* Adds bits to a bitmap from bit `first` on, where it is zero. */
static void add_bits(uint8_t *map, int64_t first, const uint8_t *bits, int64_t count) {
    uint8_t *const out = map + (first >> 3);
    const int shift = (int)(first & 7);
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t left = count - i;
        const unsigned byte = bits ? bits[i >> 3] : 255, word = (left < 8 ? byte & ((1u << left) - 1) : byte) << shift;
        out[i >> 3] |= (uint8_t)word;
        if (word >> 8) out[(i >> 3) + 1] |= (uint8_t)(word >> 8);
    }
}

/* Decodes definition levels of 0 or 1 to bits of `valid`. Returns how many are 1, or -1 if there are fewer than `count`. */
static int64_t decode_levels(input in, int64_t count, int64_t first, uint8_t *valid) {
    int64_t present = 0;
    const int64_t stop = first + count;
    for (int64_t at = first; at < stop;) {
        number_run run;
        if (!next_run(&in, 1, &run)) return -1;
        if (run.count > stop - at) run.count = stop - at;
        if (run.packed || run.value) add_bits(valid, at, run.packed, run.count);
        at += run.count;
    }
    for (int64_t i = first; i < stop; i++) present += valid[i >> 3] >> (i & 7) & 1;
    return present;
}

/* Reads the next page of a chunk: its header, and its stored bytes. Returns whether there is one that is not damaged. */
static int next_page(input *in, int64_t max_bytes, page_header *page, input *stored) {
    if (in->at == in->end) return 0;
    read_header(in, page);
    stored->at = in->at;
    skip_bytes(in, (uint64_t)page->stored_bytes); /* a negative number is too large */
    stored->end = in->at;
    stored->failed = 0;
    return !in->failed && page->bytes >= 0 && page->bytes <= max_bytes && page->values >= 0;
}

/* Finds out whether the pages of a chunk are a dictionary and its indices. Returns whether they are, and sets `entries`,
 * `dictionary_bytes` and `page_bytes`. */
static int find_pages(rayrec_coded_chunk *chunk) {
    input in = {chunk->data, chunk->data + chunk->length, 0}, stored;
    page_header page;
    if (chunk->codec < CODEC_NONE || chunk->codec > CODEC_LZ4) return 0;
    if (!next_page(&in, chunk->max_bytes, &page, &stored) || page.type != DICTIONARY_PAGE) return 0;
    if (page.encoding != PLAIN && page.encoding != PLAIN_DICTIONARY) return 0;
    chunk->entries = page.values;
    chunk->dictionary_bytes = page.bytes;
    chunk->page_bytes = 0;
    /* Of text, each has a length in four bytes */
    if (page.values > page.bytes / (chunk->item_bytes ? chunk->item_bytes : 4)) return 0;
    int64_t values = 0;
    while (next_page(&in, chunk->max_bytes, &page, &stored)) {
        if (page.type != DATA_PAGE && page.type != DATA_PAGE_2) return 0;
        if (page.encoding != PLAIN_DICTIONARY && page.encoding != RUNS_OF_CODES) return 0;
        if (page.type == DATA_PAGE && chunk->optional && page.levels_encoding != RUNS) return 0;
        if (page.bytes > chunk->page_bytes) chunk->page_bytes = page.bytes;
        values += page.values;
        if (values > chunk->rows) return 0;
    }
    return in.at == in.end && !in.failed && values == chunk->rows;
}

/* Sets `state` of each chunk: 0 if it can be decoded, else -1. */
void rayrec_find_pages(rayrec_coded_chunk *chunks, int64_t count) {
    for (int64_t i = 0; i < count; i++) chunks[i].state = find_pages(&chunks[i]) ? 0 : -1;
}

/* Appends a page's `count` values to codes, indices of the dictionary, with 0 for null, from row `first` on. Returns whether it is not
 * damaged. `numbers` has room for them. */
static int decode_page(rayrec_coded_chunk *chunk, const input *levels, input data, int64_t count, int64_t first, uint32_t *numbers,
                       uint32_t *codes) {
    const int64_t present = levels ? decode_levels(*levels, count, first, chunk->valid) : count;
    if (present < 0) return 0;
    uint32_t *const decoded = present < count ? numbers : codes;
    if (present) {
        const uint8_t width = next_byte(&data);
        if (data.failed || width > 32 || !decode_numbers(data, width, present, decoded)) return 0;
    }
    uint32_t largest = 0;
    for (int64_t i = 0; i < present; i++) largest = decoded[i] > largest ? decoded[i] : largest;
    if (present && largest >= chunk->entries) return 0;
    chunk->nulls += count - present;
    if (present == count) return 1;
    numbers[present] = 0; /* is read for nulls behind the last value */
    for (int64_t i = 0, at = 0; i < count; i++) {
        const uint32_t is_valid = chunk->valid[(first + i) >> 3] >> ((first + i) & 7) & 1;
        codes[i] = numbers[at] & -is_valid;
        at += is_valid;
    }
    return 1;
}

/* Returns a page's `bytes` bytes, decompressed to `out` if they have to be. Their `failed` says whether they are damaged. */
static input page_bytes(const rayrec_coded_chunk *chunk, input stored, int64_t bytes, int is_compressed, uint8_t *out) {
    const int64_t stored_bytes = stored.end - stored.at;
    if (bytes == 0) stored.at = stored.end; /* some codecs write a byte for none */
    if (bytes == 0 || chunk->codec == CODEC_NONE || !is_compressed) {
        stored.failed |= bytes != 0 && bytes != stored_bytes;
        return stored;
    }
    const input page = {out, out + bytes, !rayrec_decompress(chunk->codec, stored.at, stored_bytes, out, bytes)};
    return page;
}

/* Decodes a chunk; `room` as for rayrec_decode_chunks. Returns whether it is not damaged. */
static int decode_chunk(rayrec_coded_chunk *chunk, uint8_t *room) {
    uint32_t *const numbers = (uint32_t *)room, *const codes = chunk->codes ? chunk->codes : numbers + chunk->rows;
    uint8_t *const dictionary_room = (uint8_t *)(numbers + 2 * chunk->rows), *const page_room = dictionary_room + chunk->dictionary_bytes;
    input in = {chunk->data, chunk->data + chunk->length, 0}, stored;
    page_header page;
    next_page(&in, chunk->max_bytes, &page, &stored); /* rayrec_find_pages has seen it */
    const input dictionary = page_bytes(chunk, stored, page.bytes, 1, dictionary_room);
    if (dictionary.failed) return 0;
    if (chunk->item_bytes && dictionary.end - dictionary.at != chunk->entries * chunk->item_bytes) return 0;
    if (!chunk->item_bytes && !copy_texts(dictionary, chunk->entries, chunk->offsets, chunk->values)) return 0;
    chunk->nulls = 0;
    for (int64_t done = 0; next_page(&in, chunk->max_bytes, &page, &stored); done += page.values) {
        input levels = {stored.at, stored.at, 0}, data;
        if (page.type == DATA_PAGE_2) {
            const int64_t level_bytes = page.level_bytes;
            if (page.repetition_bytes || level_bytes < 0 || level_bytes > page.bytes) return 0;
            skip_bytes(&stored, (uint64_t)level_bytes);
            levels.end = stored.at;
            data = page_bytes(chunk, stored, page.bytes - level_bytes, (int)page.is_compressed, page_room);
            data.failed |= stored.failed;
        } else {
            data = page_bytes(chunk, stored, page.bytes, 1, page_room);
            if (chunk->optional) {
                uint32_t level_bytes = 0;
                levels.at = data.at;
                skip_bytes(&data, 4);
                if (!data.failed) memcpy(&level_bytes, levels.at, 4);
                levels.at = data.at;
                skip_bytes(&data, level_bytes);
                levels.end = data.at;
            }
        }
        if (data.failed) return 0;
        if (!decode_page(chunk, chunk->optional ? &levels : NULL, data, page.values, done, numbers, codes + done)) return 0;
    }
    if (chunk->item_bytes && chunk->entries == 0) memset(chunk->values, 0, (size_t)(chunk->rows * chunk->item_bytes));
    else if (chunk->item_bytes) copy_numbers(dictionary.at, chunk->item_bytes, codes, chunk->rows, chunk->values);
    return 1;
}

/* Decodes the chunks whose `state` is 0, and sets it to -1 if one is damaged. `room` has, for each of them, room for 2 * rows numbers
 * of 4 bytes, dictionary_bytes and page_bytes. */
void rayrec_decode_chunks(rayrec_coded_chunk *chunks, int64_t count, uint8_t *room) {
    for (int64_t i = 0; i < count; i++)
        if (chunks[i].state == 0 && !decode_chunk(&chunks[i], room)) chunks[i].state = -1;
}
