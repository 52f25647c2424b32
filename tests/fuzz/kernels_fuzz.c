/* Fuzzes the kernels under AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz`): random and mutated inputs in buffers of
 * exactly the promised size, and results that two ways must agree on. Arguments: seconds, seed. */

#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t state;

static uint64_t next(void) { /* SplitMix64 */
    uint64_t x = state += 0x9E3779B97F4A7C15ULL;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ x >> 27) * 0x94D049BB133111EBULL;
    return x ^ x >> 31;
}

static int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }

static void *buffer(int64_t bytes) { /* of exactly this size, so that the first byte behind it is poisoned */
    void *memory = malloc(bytes ? (size_t)bytes : 1);
    if (!memory) abort();
    return memory;
}

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "fuzz: %s:%d: %s\n", __FILE__, __LINE__, #condition);    \
            abort();                                                                 \
        }                                                                            \
    } while (0)

/* Text of pieces that the parsers care about, with some random bytes. */
static uint8_t *text_of(const char *const *pieces, int count, int64_t most, int64_t *length, int64_t padding) {
    uint8_t scratch[8192];
    int64_t size = 0, wanted = below(most + 1);
    while (size < wanted) {
        const char *piece = pieces[below(count)];
        const int64_t bytes = (int64_t)strlen(piece);
        if (size + bytes > (int64_t)sizeof scratch) break;
        memcpy(scratch + size, piece, (size_t)bytes);
        size += bytes;
        if (!below(40) && size) scratch[below(size)] = (uint8_t)next();
    }
    uint8_t *text = buffer(size + padding);
    memcpy(text, scratch, (size_t)size);
    memset(text + size, 0, (size_t)padding);
    *length = size;
    return text;
}

static int64_t interesting(void) {
    static const int64_t values[] = {0, 1, -1, 2, 2047, 2048, -16, -17, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1000000007};
    return below(2) ? values[below(sizeof values / sizeof *values)] : (int64_t)next() >> below(64);
}

static rayrec_dense_column dense_column(void) {
    return (rayrec_dense_column){.kind = below(3), .lowest = interesting(), .shift = 1, .mean = 0.5, .scale = 2, .missing_value = -1};
}

static void encode(const rayrec_raw_rows *raw, const rayrec_layout *layout, int64_t raw_rows) {
    rayrec_dense_column dense[RAYREC_MAX_COLUMNS];
    rayrec_sparse_column sparse[RAYREC_MAX_COLUMNS];
    uint64_t *slots[RAYREC_MAX_COLUMNS];
    const int32_t bucketed = (int32_t)below(2), num_dense = bucketed ? 0 : layout->num_dense;
    const int32_t num_sparse = layout->num_sparse + layout->num_dense - num_dense;
    for (int d = 0; d < num_dense; d++) dense[d] = dense_column();
    for (int s = 0; s < num_sparse; s++) {
        const int64_t count = below(40), size = 64;
        uint32_t *tokens = buffer(4 * count);
        int32_t *ids = buffer(4 * count);
        slots[s] = calloc((size_t)size, 8);
        for (int64_t i = 0; i < count; i++) {
            tokens[i] = i && !below(50) ? tokens[below(i)] : below(3) ? (uint32_t)i : (uint32_t)next();
            ids[i] = (int32_t)below(INT32_MAX);
        }
        const int built = rayrec_build_slots(tokens, 4, ids, count, slots[s], size);
        sparse[s] = (rayrec_sparse_column){.slots = below(3) ? slots[s] : NULL, .num_slots = size,
                                           .modulo = (uint64_t)below(1000) + 1, .base = below(3), .missing_id = 1,
                                           .hash = (int64_t)below(4), .token_modulo = (uint32_t)below(2) * 1000};
        if (!built && count) {
            int32_t *found = buffer(4 * count);
            rayrec_look_up(tokens, 4, count, slots[s], size, -1, found);
            CHECK(!memcmp(found, ids, (size_t)count * 4));
            free(found);
        }
        free(tokens);
        free(ids);
    }
    const int64_t rows = raw_rows ? below(below(20) ? 600 : 3000) : 0, id_bytes = below(2) ? 4 : 8;
    int64_t *order = buffer(8 * rows);
    for (int64_t i = 0; i < rows; i++) order[i] = below(raw_rows);
    float *dense_out = buffer(4 * rows * num_dense);
    void *ids_out = buffer(id_bytes * rows * num_sparse);
    rayrec_encode(raw, layout, order, rows, bucketed, dense, sparse, dense_out, ids_out, id_bytes, rows);
    for (int s = 0; s < num_sparse; s++) free(slots[s]);
    free(order), free(dense_out), free(ids_out);
}

static void fuzz_parse_and_encode(void) {
    static const char *const pieces[] = {"0", "1", "\t", "\t", "\t", "\n", "\r\n", "-", "123", "999999999999999999", "deadbeef",
                                         "0123ABCD", "1\t5\tdeadbeef\n", "0\t\t\n", "1\t-7\t00000001\r\n", "x"};
    const rayrec_layout layout = {(int32_t)below(2), (int32_t)below(3), (int32_t)below(3), (int32_t)below(60) + 4};
    if (layout.num_dense + layout.num_sparse == 0) return;
    int64_t length, found = 0, counts[FAULT_KINDS] = {0};
    uint8_t *text = text_of(pieces, sizeof pieces / sizeof *pieces, 600, &length, RAYREC_TEXT_PADDING);
    const int64_t shortest = 2 * layout.has_label + layout.num_dense + layout.num_sparse, capacity = length / shortest + 1;
    rayrec_raw_rows rows = {buffer(8 * capacity * layout.num_dense), buffer(4 * capacity * layout.num_sparse),
                            buffer(8 * capacity), buffer(4 * capacity), capacity};
    rayrec_fault *faults = buffer(3 * (int64_t)sizeof *faults);
    const int64_t good = rayrec_parse(text, length, &layout, &rows, counts, faults, 3, &found);
    CHECK(good >= 0 && found <= 3 && rayrec_last_line_start(text, length) <= length);
    int64_t lines = length && text[length - 1] != '\n', total = good;
    for (int64_t i = 0; i < length; i++) lines += text[i] == '\n';
    for (int kind = 0; kind < FAULT_KINDS; kind++) total += counts[kind];
    CHECK(total == lines);
    for (int64_t i = 0; i < good * layout.num_dense; i++)
        if (!below(8)) rows.integers[i] = interesting();
    encode(&rows, &layout, good);
    if (good) {
        const int64_t columns = layout.num_dense, out_columns = columns + layout.num_sparse;
        uint32_t *tokens = buffer(4 * good * out_columns);
        rayrec_bucket_integers(rows.integers, good, tokens, columns, out_columns);
        free(tokens);
    }
    free(text), free(rows.integers), free(rows.tokens), free(rows.missing), free(rows.labels), free(faults);
}

static void fuzz_csv(void) {
    static const char *const pieces[] = {"x", "yz", ",", ",", "\"", "\"\"", "\n", "\r\n", "\r", "12", " ", "\t", "\"q,\n\"", "\"a \"\"b\"\" c\"", "\\", "\\\"", ":", "::", "\"::\n\""};
    enum { COLUMNS = 3, KEPT = 2 };
    const uint8_t *const delimiter = (const uint8_t *)(below(2) ? "," : "::");
    const int64_t delimiter_bytes = (int64_t)strlen((const char *)delimiter);
    const int32_t places[COLUMNS] = {0, below(2) ? -1 : 1, 1};
    int64_t length;
    uint8_t *text = text_of(pieces, sizeof pieces / sizeof *pieces, 400, &length, 0);
    const int64_t capacity = length / COLUMNS + 1, cut = below(length + 1), max_bytes = below(40) + 1, max_lines = below(4);
    rayrec_field *fields = buffer((int64_t)sizeof *fields * capacity * KEPT);
    int64_t consumed = 0, begin = 0, rows[2] = {0, 0};
    uint8_t *kinds = buffer(capacity), *copy = buffer(cut), *again = buffer(length);
    const int32_t trim = (int32_t)below(2), escape = below(2) ? '\\' : -1;
    memcpy(again, text, (size_t)length);
    for (begin = 0; begin < length; begin += consumed) { /* the whole text */
        const int64_t got = rayrec_split_csv(text + begin, length - begin, 1, delimiter, delimiter_bytes, escape, trim, max_bytes, max_lines, COLUMNS, places, KEPT,
                                             capacity, fields, kinds, &consumed);
        CHECK(got >= 0 && got <= capacity && consumed > 0 && consumed <= length - begin);
        rows[0] += got;
        int64_t *all_offsets = buffer(8 * KEPT * (got + 1)), starts[KEPT + 1] = {0};
        rayrec_text_sizes(fields, got, KEPT, starts + 1);
        for (int32_t place = 0; place < KEPT; place++) starts[place + 1] += starts[place];
        uint8_t *all_data = buffer(starts[KEPT]);
        rayrec_gather_text(text + begin, length - begin, fields, got, KEPT, starts, all_offsets, all_data);
        for (int32_t place = 0; place < KEPT; place++) {
            const int64_t *const offsets = all_offsets + place * (got + 1), bytes = offsets[got];
            CHECK(offsets[0] == 0 && bytes == starts[place + 1] - starts[place]);
            int64_t *integers = buffer(8 * got);
            uint8_t *data = buffer(bytes), *status = buffer(got);
            uint64_t *tokens = buffer(8 * got);
            if (bytes) memcpy(data, all_data + starts[place], (size_t)bytes);
            for (int64_t row = 0; row < got; row++) {
                const rayrec_field field = fields[row * KEPT + place];
                CHECK(offsets[row + 1] - offsets[row] == field.length);
                CHECK(!field.length || !memcmp(text + begin + field.start, data + offsets[row], field.length));
            }
            rayrec_text_tokens(offsets, data, NULL, got, tokens, status);
            rayrec_plain_text_tokens(offsets, data, NULL, got, tokens, status);
            rayrec_text_kinds(offsets, data, NULL, got, status);
            rayrec_text_whole(offsets, data, NULL, got, tokens, status);
            rayrec_check_numbers(offsets, data, NULL, got, status);
            double *numbers = buffer(8 * got);
            rayrec_text_numbers(offsets, data, NULL, got, numbers, status);
            if (rayrec_are_short_numbers(offsets, data, NULL, got))
                for (int64_t row = 0; row < got; row++) CHECK(status[row] != TEXT_REFUSED && numbers[row] < 1e18 && numbers[row] > -1e18);
            free(numbers);
            rayrec_text_integers(offsets, data, NULL, got, integers, status);
            rayrec_text_hexadecimal(offsets, data, NULL, got, (uint32_t *)integers, status);
            free(integers), free(data), free(status), free(tokens);
        }
        free(all_offsets), free(all_data);
    }
    memcpy(copy, again, (size_t)cut); /* the same rows in two pieces */
    int64_t done = 0;
    while ((rows[1] += rayrec_split_csv(copy + done, cut - done, 0, delimiter, delimiter_bytes, escape, trim, max_bytes, max_lines, COLUMNS, places, KEPT, capacity,
                                        fields, kinds, &consumed),
            done += consumed, consumed > 0 && done < cut)) {}
    while (done < length) {
        rows[1] += rayrec_split_csv(again + done, length - done, 1, delimiter, delimiter_bytes, escape, trim, max_bytes, max_lines, COLUMNS, places, KEPT, capacity,
                                    fields, kinds, &consumed);
        done += consumed;
    }
    CHECK(rows[0] == rows[1]);
    free(text), free(fields), free(kinds), free(copy), free(again);
}

static void fuzz_json_rows(void) {
    static const char *const names_of[] = {"a", "bb", "c"}, *const values[] = {"1", "-20", "2.5e3", "-0", "123456789012345678", "\"x\"", "\"\"", "\"q\\\"\"", "null", "true", "false", "[1]"};
    enum { NAMES = 3, ROOM = 4096 };
    char text[ROOM];
    int64_t size = snprintf(text, ROOM, "{\"rows\": ["), offsets[NAMES + 1] = {0, 1, 3, 4};
    const int64_t rows = below(6);
    for (int64_t row = 0; row < rows; row++) {
        size += snprintf(text + size, (size_t)(ROOM - size), row ? ", {" : "{");
        const int64_t first = below(NAMES), members = below(NAMES + 1);
        for (int64_t i = 0; i < members; i++)
            size += snprintf(text + size, (size_t)(ROOM - size), "%s\"%s\":%s%s", i ? "," : "", names_of[(first + i) % NAMES], below(2) ? " " : "",
                             values[below(below(3) ? 5 : (int64_t)(sizeof values / sizeof *values))]);
        size += snprintf(text + size, (size_t)(ROOM - size), "}");
    }
    size += snprintf(text + size, (size_t)(ROOM - size), "]}");
    if (below(2)) text[below(size)] = (char)next();
    if (!below(4)) size = below(size + 1);
    const int64_t capacity = below(8) + 1;
    uint8_t *copy = buffer(size), *names = buffer(4), *kinds = buffer(capacity * NAMES);
    rayrec_field *fields = buffer((int64_t)sizeof *fields * capacity * NAMES);
    int32_t *follows = buffer(4 * (NAMES + 1));
    memcpy(copy, text, (size_t)size);
    memcpy(names, "abbc", 4);
    const int64_t got = rayrec_split_json(copy, size, names, offsets, NAMES, follows, capacity, fields, kinds);
    CHECK(got == -1 || (got > 0 && got <= capacity));
    int64_t joined = 0;
    for (int64_t i = 0; i < got * NAMES; i++) {
        const int kind = kinds[i];
        CHECK((kind & (kind - 1)) == 0 && kind <= JSON_BOOLEAN);
        CHECK((int64_t)fields[i].start + fields[i].length <= size && (kind > JSON_NULL || !fields[i].length));
        CHECK(kind < JSON_INTEGER || fields[i].length);
        joined += fields[i].length + 1;
    }
    if (got > 0) {
        joined += 2 * got;
        uint8_t *out = buffer(joined);
        CHECK(rayrec_join_fields(copy, fields, got, NAMES, out) == joined);
        free(out);
    }
    free(copy), free(names), free(kinds), free(fields), free(follows);
}

static void fuzz_wide_look_up(void) {
    const int64_t count = below(100), slots = 256;
    uint64_t *tokens = buffer(8 * count), *table = calloc((size_t)slots, 16);
    int32_t *ids = buffer(4 * count), *found = buffer(4 * count);
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = below(2) ? (uint64_t)i << below(50) | (uint64_t)i : next();
        ids[i] = (int32_t)below(INT32_MAX);
    }
    if (!rayrec_build_slots(tokens, 8, ids, count, table, slots)) {
        rayrec_look_up(tokens, 8, count, table, slots, -1, found);
        CHECK(!count || !memcmp(ids, found, (size_t)count * 4));
    }
    free(tokens), free(table), free(ids), free(found);
}

static void fuzz_present_values(void) {
    const int64_t count = below(100), first = below(20), distinct = below(9) + 1;
    uint8_t *valid = below(3) ? buffer((first + count + 7) / 8) : NULL;
    uint64_t *tokens = buffer(8 * distinct), *words = buffer(8 * count), *coded = buffer(8 * count), *copied = buffer(8 * count);
    int32_t *codes = buffer(4 * count);
    uint8_t *statuses = buffer(distinct), *kinds[2] = {buffer(count), buffer(count)};
    for (int64_t i = 0; valid && i < (first + count + 7) / 8; i++) valid[i] = (uint8_t)next();
    for (int64_t i = 0; i < distinct; i++) {
        tokens[i] = next();
        statuses[i] = (uint8_t)below(3);
    }
    for (int64_t i = 0; i < count; i++) {
        const int present = !valid || (valid[(first + i) / 8] >> (first + i) % 8 & 1);
        codes[i] = (int32_t)(present ? below(distinct) : interesting());
        words[i] = next();
    }
    rayrec_coded_tokens(codes, valid, first, count, tokens, statuses, coded, kinds[0]);
    rayrec_present_words(words, valid, first, count, copied, kinds[1]);
    for (int64_t i = 0; i < count; i++) {
        const int present = !valid || (valid[(first + i) / 8] >> (first + i) % 8 & 1);
        CHECK(coded[i] == (present ? tokens[codes[i]] : 0) && kinds[0][i] == (present ? statuses[codes[i]] : TEXT_EMPTY));
        CHECK(copied[i] == (present ? words[i] : 0) && kinds[1][i] == (present ? TEXT_VALUE : TEXT_EMPTY));
    }
    free(valid), free(tokens), free(words), free(coded), free(copied), free(codes), free(statuses), free(kinds[0]), free(kinds[1]);
}

static int64_t naive_row(uint64_t token, int64_t at, const uint64_t *keys, const int64_t *times, int64_t rows) {
    int64_t best = -1;
    for (int64_t row = 0; row < rows; row++)
        if (keys[row] == token && times[row] <= at && (best < 0 || times[row] > times[best])) best = row;
    return best;
}

static void fuzz_side_tables(void) {
    const int64_t num_keys = below(90), count = below(300), spread = below(60);
    int64_t num_slots = 2, pair[2] = {0, 0}, repeated = 0;
    while (num_slots < 2 * num_keys) num_slots *= 2;
    uint64_t *keys = buffer(8 * num_keys), *tokens = buffer(8 * count);
    uint32_t *slots = calloc((size_t)num_slots, 4);
    uint8_t *missing = buffer(count);
    int64_t *found = buffer(8 * count), *at = buffer(8 * count), *starts = buffer(8 * (num_keys + 1));
    for (int64_t k = 0; k < num_keys; k++) {
        keys[k] = k && !below(60) ? keys[below(k)] : below(2) ? (uint64_t)k << spread : next();
        int earlier = 0;
        for (int64_t j = 0; j < k && !earlier; j++) earlier = keys[j] == keys[k];
        repeated += earlier;
    }
    CHECK(rayrec_build_key_slots(keys, num_keys, slots, num_slots, pair) == repeated);
    CHECK(!repeated || (pair[0] < pair[1] && keys[pair[0]] == keys[pair[1]]));
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = num_keys && below(3) ? keys[below(num_keys)] : (uint64_t)interesting();
        missing[i] = !below(9), at[i] = interesting();
    }
    const int has_missing = (int)below(2), damaged = !below(4);
    if (damaged)
        for (int64_t i = 0; i < num_slots; i++) slots[i] = below(3) ? (uint32_t)below(num_keys + 2) : (uint32_t)next();
    rayrec_find_keys(tokens, has_missing ? missing : NULL, count, keys, num_keys, slots, num_slots, found);
    for (int64_t i = 0; i < count; i++) {
        CHECK(found[i] >= -1 && found[i] < num_keys);
        int64_t wanted = -1;
        for (int64_t k = num_keys - 1; k >= 0; k--)
            if (keys[k] == tokens[i]) wanted = k;
        CHECK(damaged || found[i] == (has_missing && missing[i] ? -1 : wanted));
    }
    starts[0] = 0;
    for (int64_t k = 0; k < num_keys; k++) starts[k + 1] = starts[k] + below(6);
    const int64_t num_rows = starts[num_keys];
    uint64_t *row_keys = buffer(8 * num_rows);
    int64_t *times = buffer(8 * num_rows), *rows = buffer(8 * num_rows);
    for (int64_t k = 0; k < num_keys; k++)
        for (int64_t i = starts[k]; i < starts[k + 1]; i++) {
            row_keys[i] = (uint64_t)k, rows[i] = i;
            times[i] = (i > starts[k] ? times[i - 1] : -below(1000)) + 1 + below(1000);
        }
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = (uint64_t)found[i];
        if (below(3)) at[i] = below(4000) - 1000;
    }
    rayrec_newest_rows(at, count, starts, times, rows, num_rows, found);
    for (int64_t i = 0; i < count; i++) CHECK(found[i] == naive_row(tokens[i], at[i], row_keys, times, num_rows));
    free(keys), free(tokens), free(slots), free(missing), free(found), free(at), free(starts);
    free(row_keys), free(times), free(rows);
}

static void fuzz_gather(void) {
    const int32_t num_dense = (int32_t)below(4), num_sparse = (int32_t)below(4);
    const int64_t columns = 1 + num_dense + num_sparse, first = below(300) + 1, second = below(300) + 1, rows = below(900);
    int32_t *parts[2] = {buffer(4 * first * columns), buffer(4 * second * columns)};
    const int64_t sizes[2] = {first, second}, starts[2] = {0, first};
    for (int part = 0; part < 2; part++)
        for (int64_t i = 0; i < sizes[part] * columns; i++) parts[part][i] = (int32_t)interesting();
    const uint8_t *const places[2] = {(const uint8_t *)parts[0], (const uint8_t *)parts[1]};
    const rayrec_runs runs = {places, starts, 2};
    int64_t *order = buffer(8 * rows);
    for (int64_t i = 0; i < rows; i++) order[i] = below(first + second);
    int32_t *out = buffer(4 * rows * columns), *ids = buffer(4 * rows * num_sparse);
    rayrec_gather_rows(&runs, order, rows, columns, 4, (int32_t)below(2), out);
    rayrec_dense_column dense[4];
    for (int d = 0; d < num_dense; d++) dense[d] = dense_column();
    float *values = buffer(4 * rows * num_dense), *labels = buffer(4 * rows);
    rayrec_unpack_rows(&runs, order, rows, num_dense, num_sparse, dense, values, ids, labels);
    int64_t *integers = buffer(8 * rows * num_dense), lowest[4];
    for (int64_t i = 0; i < rows * num_dense; i++) integers[i] = interesting();
    for (int d = 0; d < 4; d++) lowest[d] = interesting();
    for (int64_t i = 0; i < rows; i++) labels[i] = (float)below(2);
    const int64_t wrong = rayrec_pack_rows(integers, lowest, ids, 4, labels, rows, num_dense, num_sparse, out);
    CHECK(wrong >= -1 && wrong < rows * columns);
    free(parts[0]), free(parts[1]), free(order), free(out), free(ids), free(values), free(labels), free(integers);
}

static void fuzz_take_ranges(void) {
    const int64_t items = below(60), ranges = below(12), bytes = 1 << below(4);
    uint8_t *values = buffer(items * bytes);
    int64_t *starts = buffer(8 * ranges), *lengths = buffer(8 * ranges), total = 0;
    for (int64_t i = 0; i < items * bytes; i++) values[i] = (uint8_t)next();
    for (int64_t i = 0; i < ranges; i++) {
        starts[i] = below(items + 1);
        total += lengths[i] = below(items - starts[i] + 1);
    }
    uint8_t *out = buffer(total * bytes), *at = out;
    rayrec_take_ranges(values, bytes, starts, lengths, ranges, out);
    for (int64_t i = 0; i < ranges; i++)
        for (int64_t byte = 0; byte < lengths[i] * bytes; byte++) CHECK(*at++ == values[starts[i] * bytes + byte]);
    /* The same ranges by their addresses */
    const uint8_t **addresses = buffer(sizeof *addresses * ranges);
    for (int64_t i = 0; i < ranges; i++) {
        addresses[i] = values + starts[i] * bytes;
        lengths[i] *= bytes;
    }
    uint8_t *joined = buffer(total * bytes);
    rayrec_join_ranges(addresses, lengths, ranges, joined);
    for (int64_t byte = 0; byte < total * bytes; byte++) CHECK(joined[byte] == out[byte]);
    free(values), free(starts), free(lengths), free(out), free(addresses), free(joined);
}

/* Events of few and many users and times, whose last value is their number: in partitions, with their distinct values, and sorted. */
static void fuzz_events(void) {
    const int64_t events = below(below(20) ? 80 : 2000), width = 2 + below(3), partitions = 1 + below(5);
    const int64_t users = 1 + below(2 * events + 1), times = 1 + below(20), first = below(9);
    uint64_t *columns[4];
    for (int64_t c = 0; c < width; c++) columns[c] = buffer(8 * events);
    for (int64_t i = 0; i < events; i++) {
        columns[0][i] = rayrec_mix((uint64_t)below(users));
        for (int64_t c = 1; c < width - 1; c++) columns[c][i] = (uint64_t)(below(times) - 9);
        columns[width - 1][i] = (uint64_t)(first + i);
    }
    int64_t *starts = buffer(8 * (partitions + 1)), *ends = buffer(8 * partitions), *sources = buffer(8 * events);
    uint64_t *rows = buffer(8 * width * events);
    memset(starts, 0, (size_t)(partitions + 1) * 8);
    rayrec_count_partitions(columns[0], events, partitions, starts + 1);
    for (int64_t p = 0; p < partitions; p++) starts[p + 1] += starts[p];
    CHECK(starts[partitions] == events);
    memcpy(ends, starts, (size_t)partitions * 8);
    const int64_t half = below(events + 1); /* in two batches */
    const uint64_t *batch[4];
    for (int64_t c = 0; c < width; c++) batch[c] = columns[c] + half;
    rayrec_partition_events((const uint64_t *const *)columns, width, half, partitions, ends, first, rows, sources);
    rayrec_partition_events(batch, width, events - half, partitions, ends, first + half, rows, below(2) ? sources : NULL);
    for (int64_t p = 0; p < partitions; p++) {
        CHECK(ends[p] == starts[p + 1]);
        for (int64_t i = starts[p]; i < ends[p]; i++) {
            const uint64_t *row = rows + i * width, number = row[width - 1];
            CHECK((int64_t)((row[0] >> 32) * (uint64_t)partitions >> 32) == p && row[0] == columns[0][number - (uint64_t)first]);
            CHECK(i == starts[p] || row[-1] < number);
            CHECK(number >= (uint64_t)(first + half) || sources[i] == (int64_t)number);
        }
    }
    int64_t largest = 16, *out = buffer(8 * events), *found = buffer(8 * partitions);
    for (int64_t p = 0; p < partitions; p++) largest = starts[p + 1] - starts[p] > largest ? starts[p + 1] - starts[p] : largest;
    uint32_t *slots = buffer(4 * 4 * largest);
    uint64_t *values = buffer(8 * events);
    const int64_t column = below(width), by = width > 2 ? 1 + below(2) : 1;
    rayrec_distinct_values(rows, width, column, starts, partitions, slots, values, out, found);
    for (int64_t p = 0, at = 0; p < partitions; p++)
        for (int64_t i = starts[p]; i < starts[p + 1]; i++) {
            int64_t earlier = starts[p];
            while (rows[earlier * width + column] != rows[i * width + column]) earlier++;
            if (earlier == i) {
                CHECK(out[at] == i && values[at] == rows[i * width + column]);
                at++;
            }
            if (i == starts[p + 1] - 1) CHECK(found[p] == at);
        }
    for (int64_t p = 0; p < partitions; p++) {
        const int64_t count = starts[p + 1] - starts[p], buckets = 1 + below(count + 1);
        int64_t *sorted = buffer(8 * width * count), *room = buffer(8 * width * count), *edges = buffer(8 * (buckets + 1));
        memcpy(sorted, rows + starts[p] * width, (size_t)(8 * width * count));
        const int64_t partition = below(20) ? p : 0; /* a wrong one gives some order */
        rayrec_sort_events(sorted, room, count, width, by, partition, partitions, buckets, edges);
        for (int64_t i = 1; i < count && partition == p; i++) {
            const int64_t *keys = sorted + i, *second = sorted + count + i, *numbers = sorted + (width - 1) * count + i;
            CHECK((uint64_t)keys[-1] <= (uint64_t)keys[0]);
            if (keys[-1] != keys[0]) continue;
            if (by == 2) CHECK(second[-1] <= second[0]);
            if (by == 1 || second[-1] == second[0]) CHECK(numbers[-1] < numbers[0]);
        }
        free(sorted), free(room), free(edges);
    }
    for (int64_t c = 0; c < width; c++) free(columns[c]);
    free(starts), free(ends), free(sources), free(rows), free(out), free(found), free(slots), free(values);
}

static void fuzz_format(void) { /* what is written is parsed again as the same rows */
    const int32_t num_dense = (int32_t)below(4), num_sparse = (int32_t)below(4) + (num_dense == 0);
    const int64_t rows = below(40), most = rows * (2 + num_dense * 12 + num_sparse * 9), room = below(2) ? most : below(most + 1);
    uint8_t *labels = buffer(rows), *text = buffer(room);
    float *labels_back = buffer(4 * (rows + 1));
    int32_t *dense = buffer(4 * rows * num_dense);
    uint32_t *tokens = buffer(4 * rows * num_sparse), *tokens_back = buffer(4 * (rows + 1) * num_sparse);
    uint64_t *missing = buffer(8 * rows), *missing_back = buffer(8 * (rows + 1));
    int64_t *integers = buffer(8 * (rows + 1) * num_dense);
    for (int64_t i = 0; i < rows; i++) labels[i] = (uint8_t)below(2), missing[i] = next() & ((1ULL << (num_dense + num_sparse)) - 1);
    for (int64_t i = 0; i < rows * num_dense; i++) dense[i] = (int32_t)interesting();
    for (int64_t i = 0; i < rows * num_sparse; i++) tokens[i] = (uint32_t)next();
    const int64_t written = rayrec_format_rows(labels, dense, tokens, missing, rows, rows, num_dense, num_sparse, text, room);
    CHECK(written <= room && (written >= 0 || room < most));
    if (written >= 0) {
        uint8_t *padded = calloc((size_t)(written + RAYREC_TEXT_PADDING), 1);
        memcpy(padded, text, (size_t)written);
        const rayrec_layout layout = {1, num_dense, num_sparse, 4096};
        const rayrec_raw_rows back = {integers, tokens_back, missing_back, labels_back, rows + 1};
        int64_t counts[FAULT_KINDS] = {0}, found = 0;
        CHECK(rayrec_parse(padded, written, &layout, &back, counts, NULL, 0, &found) == rows);
        CHECK(!rows || !memcmp(missing, missing_back, (size_t)rows * 8));
        for (int64_t i = 0; i < rows; i++) {
            CHECK(labels_back[i] == labels[i]);
            for (int d = 0; d < num_dense; d++)
                CHECK(missing[i] >> d & 1 || integers[i * num_dense + d] == dense[d * rows + i]);
            for (int s = 0; s < num_sparse; s++)
                CHECK(missing[i] >> (num_dense + s) & 1 || tokens_back[i * num_sparse + s] == tokens[s * rows + i]);
        }
        free(padded);
    }
    free(labels), free(text), free(labels_back), free(dense), free(tokens), free(tokens_back), free(missing), free(missing_back);
    free(integers);
}

static void fuzz_table_training(void) { /* gradients of rows add up to those of the lookups; every row is updated once, or stays */
    const int64_t bags = below(20), features = 1 + below(3), dim = 1 + below(20), rows = 1 + below(30), pooled = below(2);
    int64_t *offsets = buffer(8 * (features * bags + 1));
    offsets[0] = 0;
    for (int64_t i = 0; i < features * bags; i++) offsets[i + 1] = offsets[i] + below(4);
    const int64_t lookups = offsets[features * bags], stride = pooled ? features * dim : dim;
    int64_t *ids = buffer(8 * lookups), *distinct = buffer(8 * lookups);
    float *weights = buffer(4 * lookups), *gradient = buffer(4 * (pooled ? bags : lookups) * stride);
    float *sums = buffer(4 * lookups * dim);
    for (int64_t i = 0; i < lookups; i++) ids[i] = below(rows), weights[i] = (float)below(4);
    for (int64_t i = 0; i < (pooled ? bags : lookups) * stride; i++) gradient[i] = (float)below(9) - 4; /* sums are exact */
    const rayrec_looked_up looked_up = {ids, offsets, below(2) ? weights : NULL, gradient, bags, stride, pooled};
    rayrec_gathered_table table = {&looked_up, 0, features, 0, dim, distinct, sums, 0};
    CHECK(!rayrec_gather_row_gradients(&table, 0, 1));
    double expected = 0, found = 0;
    for (int64_t f = 0; f < features; f++)
        for (int64_t b = 0; b < bags; b++)
            for (int64_t p = offsets[f * bags + b]; p < offsets[f * bags + b + 1]; p++)
                for (int64_t d = 0; d < dim; d++)
                    expected += (looked_up.weights ? weights[p] : 1) * (double)(ids[p] + 1)
                                * gradient[pooled ? b * stride + f * dim + d : p * stride + d];
    uint8_t *marks = calloc((size_t)rows, 1);
    for (int64_t i = 0; i < table.found; i++) {
        CHECK(distinct[i] >= 0 && distinct[i] < rows && !marks[distinct[i]]);
        marks[distinct[i]] = 1;
        for (int64_t d = 0; d < dim; d++) found += (double)(distinct[i] + 1) * sums[i * dim + d];
    }
    CHECK(found == expected);
    float *values = buffer(4 * rows * dim), *mean = buffer(4 * rows * dim), *square = buffer(4 * rows * dim);
    for (int64_t i = 0; i < rows * dim; i++) values[i] = 1, mean[i] = 0, square[i] = 0;
    const rayrec_adam rule = {1, 1, 1, 0.5f, 0.5f, 0.5f, 0, 2, 1}; /* twice the weight, and a step if there is a gradient */
    const int64_t only_nonzero = below(2), cut = below(rows + 1);
    const rayrec_adam_rows parts[] = {
        {values, mean, square, dim, &rule, distinct, sums, NULL, 0, table.found, only_nonzero},
        {values, mean, square, dim, &rule, NULL, NULL, marks, 0, cut, 0},
        {values, mean, square, dim, &rule, NULL, NULL, marks, cut, rows, 0},
    };
    rayrec_work work = {rayrec_update_by_adam, parts, 3, 1 + below(4), 0, 0};
    rayrec_take_part(&work);
    CHECK(work.next >= 3 && !work.failed);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < dim; d++) CHECK(marks[row] || values[row * dim + d] == 2);
    for (int64_t i = 0; i < table.found; i++) {
        int any = 0;
        for (int64_t d = 0; d < dim; d++) any |= sums[i * dim + d] != 0;
        for (int64_t d = 0; d < dim; d++) {
            const float gradients = sums[i * dim + d], value = values[distinct[i] * dim + d];
            CHECK(any || !only_nonzero ? (gradients > 0) == (value < 2) && (gradients < 0) == (value > 2) : value == 1);
        }
    }
    free(offsets), free(ids), free(distinct), free(weights), free(gradient), free(sums), free(marks);
    free(values), free(mean), free(square);
}

/* One of a kernel's variants that this CPU can run. */
#if defined(__x86_64__)
#define ANY_OF(name)                                                                          \
    (below(2) && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")     \
             && __builtin_cpu_supports("avx512dq")                                            \
         ? name##_avx512                                                                      \
         : below(2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? name##_avx2 : name)
#else
#define ANY_OF(name) name
#endif

static void fuzz_dots(void) { /* against products one by one, of small whole numbers, which float32 and bfloat16 hold exactly */
    const int64_t rows = below(4), count = 1 + below(40), dim = 1 + below(40), pairs = count * (count - 1) / 2, size = dim + pairs;
    float *dense = buffer(4 * rows * dim), *sparse = buffer(4 * rows * (count - 1) * dim), *out = buffer(4 * rows * size);
    float *from_dense = buffer(4 * rows * dim), *of_sparse = buffer(4 * rows * (count - 1) * dim);
    int64_t *places = buffer(8 * (count - 1));
    for (int64_t i = 0; i < count - 1; i++) {
        const int64_t other = below(i + 1);
        places[i] = places[other], places[other] = i;
    }
    for (int64_t i = 0; i < rows * dim; i++) dense[i] = (float)(below(5) - 2);
    for (int64_t i = 0; i < rows * (count - 1) * dim; i++) sparse[i] = (float)(below(5) - 2);
    const rayrec_dots dots = {dense, sparse, places, count, dim, VALUES_FLOAT32, VALUES_FLOAT32, out, from_dense, of_sparse};
    rayrec_work work = {ANY_OF(rayrec_pairwise_dots), &dots, rows, 1 + below(3), 0, 0};
    rayrec_take_part(&work);
    CHECK(!work.failed);
#define VECTOR(row, i) ((i) ? sparse + ((row) * (count - 1) + places[(i)-1]) * dim : dense + (row) * dim)
#define GRADIENT(row, i) ((i) ? of_sparse + ((row) * (count - 1) + places[(i)-1]) * dim : from_dense + (row) * dim)
    for (int64_t row = 0; row < rows; row++) {
        const float *found = out + row * size;
        for (int64_t d = 0; d < dim; d++) CHECK(*found++ == dense[row * dim + d]);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = i + 1; j < count; j++) {
                float expected = 0;
                for (int64_t d = 0; d < dim; d++) expected += VECTOR(row, i)[d] * VECTOR(row, j)[d];
                CHECK(*found++ == expected);
            }
    }
    for (int64_t i = 0; i < rows * size; i++) out[i] = (float)(below(5) - 2);
    CHECK(!ANY_OF(rayrec_pairwise_dots_backward)(&dots, 0, rows));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < dim; d++) {
            const float *given = out + row * size + dim;
            float expected[41] = {out[row * size + d]};
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = i + 1; j < count; j++, given++)
                    expected[i] += *given * VECTOR(row, j)[d], expected[j] += *given * VECTOR(row, i)[d];
            for (int64_t i = 0; i < count; i++) CHECK(GRADIENT(row, i)[d] == expected[i]);
        }
    free(dense), free(sparse), free(out), free(from_dense), free(of_sparse), free(places);
}

/* A gradient stays where the output is above 0, or anywhere without ReLU; its transpose and its sums are of what is left. */
static void fuzz_relu(void) {
    const int64_t is_relu = below(3);
    const int64_t rows = below(200), columns = 1 + below(70), block = 1 + below(80);
    const int64_t blocks = (rows + block - 1) / block;
    float *output = buffer(4 * rows * columns), *gradient = buffer(4 * rows * columns), *turned = buffer(4 * rows * columns);
    float *given = buffer(4 * rows * columns), *sums = buffer(4 * blocks * columns);
    for (int64_t i = 0; i < rows * columns; i++) output[i] = (float)(below(3) - 1), given[i] = gradient[i] = (float)(below(9) - 4);
    for (int64_t i = 0; i < blocks * columns; i++) sums[i] = 0;
    const rayrec_relu relu = {is_relu ? output : NULL, gradient, turned, sums, rows, columns, block};
    CHECK(!ANY_OF(rayrec_relu_backward)(&relu, 0, blocks));
    for (int64_t c = 0; c < columns; c++) {
        float expected = 0, found = 0;
        for (int64_t r = 0; r < rows; r++) {
            const float kept = !is_relu || output[r * columns + c] > 0 ? given[r * columns + c] : 0;
            CHECK(gradient[r * columns + c] == kept && turned[c * rows + r] == kept);
            expected += kept;
        }
        for (int64_t b = 0; b < blocks; b++) found += sums[b * columns + c];
        CHECK(found == expected);
    }
    free(output), free(gradient), free(turned), free(given), free(sums);
}

static double drawn(void) { return (double)(below(2001) - 1000) / 500; } /* from -2 to 2 */

static int is_near(double found, double expected) { return fabs(found - expected) <= 1e-4 * (1 + fabs(expected)); }

static void fuzz_dropout(void) { /* the same values are dropped again, and others in another block */
    const int64_t count = below(300), block = 1 + below(100);
    const rayrec_dropout dropout = {next(), (int32_t)below(1LL << 31), 2};
    float *values = buffer(4 * count), *out = buffer(4 * count), *again = buffer(4 * count);
    for (int64_t i = 0; i < count; i++) values[i] = (float)(1 + below(9));
    const rayrec_dropped_values first = {dropout, values, out, count, block}, second = {dropout, values, again, count, block};
    rayrec_work work = {ANY_OF(rayrec_drop_values), &first, (count + block - 1) / block, 1 + below(3), 0, 0};
    rayrec_take_part(&work);
    CHECK(!work.failed);
    CHECK(!ANY_OF(rayrec_drop_values)(&second, 0, (count + block - 1) / block));
    for (int64_t i = 0; i < count; i++) CHECK(out[i] == again[i] && (out[i] == 0 || out[i] == 2 * values[i]));
    free(values), free(out), free(again);
}

static void fuzz_exponents(void) { /* against exponents one by one; some scores are minus infinity */
    const int64_t rows = below(6), columns = 1 + below(70);
    float *scores = buffer(4 * rows * columns), *given = buffer(4 * rows * columns), *largest = buffer(4 * rows), *sums = buffer(4 * rows);
    for (int64_t i = 0; i < rows * columns; i++) given[i] = scores[i] = below(5) ? (float)(40 * drawn()) : -INFINITY;
    const rayrec_exponents exponents = {scores, largest, sums, columns};
    CHECK(!ANY_OF(rayrec_exponents_of_rows)(&exponents, 0, rows));
    for (int64_t row = 0; row < rows; row++) {
        double high = -3.4028235e38, sum = 0;
        for (int64_t i = row * columns; i < (row + 1) * columns; i++) high = given[i] > high ? given[i] : high;
        for (int64_t i = row * columns; i < (row + 1) * columns; i++) {
            const double expected = exp2(given[i] - high);
            sum += expected;
            CHECK(is_near(scores[i], expected) && (!isinf(given[i]) || scores[i] == 0));
        }
        CHECK(largest[row] == (float)high && is_near(sums[row], sum));
    }
    free(scores), free(given), free(largest), free(sums);
}

/* Attention of lists and its gradients, without dropout, against sums one by one. */
static void fuzz_list_attention(void) {
    const int64_t lists = below(4), heads = 1 + below(3), width = 1 + below(20), dim = heads * width, joint = below(2);
    const int32_t causal = (int32_t)below(2);
    const float scale = below(2) ? 1 : 1 / sqrtf((float)width);
    int64_t *starts = buffer(8 * (lists + 1));
    starts[0] = 0;
    for (int64_t list = 0; list < lists; list++) starts[list + 1] = starts[list] + below(40);
    const int64_t elements = starts[lists], strides[] = {joint ? 3 * dim : dim, joint ? 3 * dim : 2 * dim};
    float *values = buffer(4 * 3 * elements * dim), *slopes = buffer(4 * 3 * elements * dim);
    float *out = buffer(4 * elements * dim), *gradient = buffer(4 * elements * dim), *log_sums = buffer(4 * elements * heads);
    double *expected = calloc((size_t)(4 * elements * dim + 1), sizeof *expected);
    for (int64_t i = 0; i < 3 * elements * dim; i++) values[i] = (float)drawn();
    for (int64_t i = 0; i < elements * dim; i++) gradient[i] = (float)drawn();
    const int64_t memory = joint ? dim : elements * dim;
    const rayrec_list_attention attention = {
        values, values + memory, values + memory + dim, starts, heads, width, strides[0], strides[1], causal, scale, {next(), 0, 1}, out,
        log_sums, gradient, slopes, slopes + memory, slopes + memory + dim};
    rayrec_work work = {ANY_OF(rayrec_attend_lists), &attention, lists * heads, 1 + below(3), 0, 0};
    rayrec_take_part(&work);
    CHECK(!work.failed);
    CHECK(!ANY_OF(rayrec_attend_lists_backward)(&attention, 0, lists * heads));
#define QUERY(e, d) ((e)*strides[0] + head * width + (d))
#define KEY(e, d) (memory + (e)*strides[1] + head * width + (d))
    double *of_slopes = expected + elements * dim;
    for (int64_t list = 0; list < lists; list++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = starts[list]; i < starts[list + 1]; i++) {
                const int64_t row = i * dim + head * width, end = causal ? i + 1 : starts[list + 1];
                double weights[40], by_weights[40], sum = 0, total = 0;
                for (int64_t j = starts[list]; j < end; j++) {
                    double score = 0, by_weight = 0;
                    for (int64_t d = 0; d < width; d++) {
                        score += (double)values[QUERY(i, d)] * values[KEY(j, d)];
                        by_weight += (double)gradient[row + d] * values[KEY(j, d) + dim];
                    }
                    sum += weights[j - starts[list]] = exp(score * scale);
                    by_weights[j - starts[list]] = by_weight;
                }
                for (int64_t j = starts[list]; j < end; j++) total += by_weights[j - starts[list]] * weights[j - starts[list]] / sum;
                for (int64_t j = starts[list]; j < end; j++) {
                    const double weight = weights[j - starts[list]] / sum;
                    const double slope = weight * (by_weights[j - starts[list]] - total) * scale;
                    for (int64_t d = 0; d < width; d++) {
                        expected[row + d] += weight * values[KEY(j, d) + dim];
                        of_slopes[QUERY(i, d)] += slope * values[KEY(j, d)];
                        of_slopes[KEY(j, d)] += slope * values[QUERY(i, d)];
                        of_slopes[KEY(j, d) + dim] += weight * gradient[row + d];
                    }
                }
            }
#undef QUERY
#undef KEY
    for (int64_t i = 0; i < elements * dim; i++) CHECK(is_near(out[i], expected[i]));
    for (int64_t i = 0; i < 3 * elements * dim; i++) CHECK(is_near(slopes[i], of_slopes[i]));
    free(starts), free(values), free(slopes), free(out), free(gradient), free(log_sums), free(expected);
}

/* Weighted sums of products of vectors and their gradients, against sums one by one. */
static void fuzz_products(void) {
    const int64_t rows = below(20), firsts = 1 + below(5), seconds = 1 + below(5), dim = 1 + below(40), outputs = 1 + below(20);
    const int64_t count = 8 * (1 + below(3)), width = (outputs + 15) / 16 * 16, block_rows = 1 + below(8);
    const int64_t blocks = (rows + block_rows - 1) / block_rows, values = rows * dim;
    float *first = buffer(4 * firsts * values), *second = buffer(4 * seconds * values), *weight = buffer(4 * count * width);
    float *bias = buffer(4 * width), *out = buffer(4 * outputs * values), *gradient = buffer(4 * outputs * values);
    float *first_slopes = buffer(4 * firsts * values), *second_slopes = buffer(4 * seconds * values);
    float *weight_slopes = buffer(4 * blocks * count * width);
    rayrec_pair *pairs = buffer(count * (int64_t)sizeof *pairs);
    for (int64_t i = 0; i < firsts * values; i++) first[i] = (float)drawn();
    for (int64_t i = 0; i < seconds * values; i++) second[i] = (float)drawn();
    for (int64_t i = 0; i < count * width; i++) weight[i] = i % width < outputs ? (float)drawn() : 0;
    for (int64_t i = 0; i < width; i++) bias[i] = (float)drawn();
    for (int64_t i = 0; i < outputs * values; i++) gradient[i] = (float)drawn();
    for (int64_t i = 0; i < count; i++) pairs[i] = (rayrec_pair){(int32_t)below(firsts), (int32_t)below(seconds)};
    memset(weight_slopes, 0, (size_t)(4 * blocks * count * width));
    rayrec_products products = {first, second, pairs, weight, bias, rows, firsts, seconds, dim, count, outputs, width, block_rows, out,
                                first_slopes, second_slopes, weight_slopes};
    rayrec_work work = {ANY_OF(rayrec_sum_products), &products, blocks, 1 + below(3), 0, 0};
    rayrec_take_part(&work);
    CHECK(!work.failed);
    products.out = gradient;
    CHECK(!ANY_OF(rayrec_sum_products_backward)(&products, 0, blocks));
    double *expected = calloc((size_t)((outputs + firsts + seconds) * values + count * width + 1), sizeof *expected);
    double *of_first = expected + outputs * values, *of_second = of_first + firsts * values, *of_weight = of_second + seconds * values;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < dim; d++) {
#define OF(vectors, v) ((row * (vectors) + (v)) * dim + d)
            for (int64_t i = 0; i < outputs; i++) expected[OF(outputs, i)] = bias[i];
            for (int64_t p = 0; p < count; p++) {
                const int64_t a = OF(firsts, pairs[p].first), b = OF(seconds, pairs[p].second);
                for (int64_t i = 0; i < outputs; i++) {
                    const double factor = weight[p * width + i], slope = gradient[OF(outputs, i)];
                    expected[OF(outputs, i)] += factor * first[a] * second[b];
                    of_first[a] += factor * slope * second[b];
                    of_second[b] += factor * slope * first[a];
                    of_weight[p * width + i] += slope * first[a] * second[b];
                }
            }
#undef OF
        }
    for (int64_t i = 0; i < outputs * values; i++) CHECK(is_near(out[i], expected[i]));
    for (int64_t i = 0; i < firsts * values; i++) CHECK(is_near(first_slopes[i], of_first[i]));
    for (int64_t i = 0; i < seconds * values; i++) CHECK(is_near(second_slopes[i], of_second[i]));
    for (int64_t i = 0; i < count * width; i++) {
        double sum = 0;
        for (int64_t block = 0; block < blocks; block++) sum += weight_slopes[block * count * width + i];
        CHECK(is_near((float)sum, of_weight[i]));
    }
    free(first), free(second), free(weight), free(bias), free(out), free(gradient), free(first_slopes), free(second_slopes);
    free(weight_slopes), free(pairs), free(expected);
}

/* Rows of groups in parts, and what is summed up over them against pairs of rows counted one by one. */
static void fuzz_ranking(void) {
    const int64_t rows = below(200), bits = below(11), num_ks = below(3), ks[] = {1 + below(3), 1 + below(300)};
    int64_t *groups = buffer(8 * rows), *starts = buffer(8 * ((1 << bits) + 1));
    float *scores = buffer(4 * rows);
    uint8_t *labels = buffer(rows);
    rayrec_ranked_row *ranked = buffer(16 * rows), *room = buffer(16 * rows);
    for (int64_t i = 0; i < rows; i++) {
        groups[i] = below(3) ? below(4) : interesting(), labels[i] = (uint8_t)below(2);
        scores[i] = below(10) ? (float)(below(5) - 2) * 0.5f : below(2) ? 1 / 0.0f : -0.0f;
    }
    double weighted = 0;
    int64_t of_both = 0;
    for (int64_t i = 0; i < rows; i++) {
        int64_t first = 1, size = 0, positives = 0, twice = 0;
        for (int64_t j = 0; j < i; j++) first &= groups[j] != groups[i];
        if (!first || !groups[i]) continue;
        for (int64_t j = i; j < rows; j++) {
            if (groups[j] != groups[i]) continue;
            size++, positives += labels[j];
            for (int64_t k = i; k < rows; k++)
                if (groups[k] == groups[i] && labels[j] && !labels[k])
                    twice += scores[j] > scores[k] ? 2 : scores[j] == scores[k];
        }
        if (!positives || positives == size) continue;
        of_both += size;
        weighted += (double)twice / (2.0 * (double)positives * (double)(size - positives)) * (double)size;
    }
    rayrec_rank_partition(groups, scores, labels, rows, (int32_t)bits, starts, ranked);
    int64_t grouped = 0;
    for (int64_t i = 0; i < rows; i++) grouped += groups[i] != 0;
    CHECK(starts[0] == 0 && starts[1 << bits] == grouped);
    double discounts[302] = {0}, of_ks[4], sums[16] = {0};
    for (int64_t rank = 1; rank < 302; rank++) discounts[rank] = discounts[rank - 1] + 1 / (double)rank;
    int64_t counts[3] = {0};
    const rayrec_ranking ranking = {ks, discounts, of_ks, sums, counts, num_ks};
    for (int64_t part = 0; part < 1 << bits; part++) {
        CHECK(starts[part] <= starts[part + 1]);
        rayrec_rank_rows(ranked + starts[part], room, starts[part + 1] - starts[part], &ranking);
    }
    CHECK(counts[0] == of_both && counts[1] <= counts[2]);
    CHECK(sums[0] + sums[1] - weighted < 1e-9 && weighted - sums[0] - sums[1] < 1e-9);
    for (int64_t i = 2; i < 4 + 6 * num_ks; i += 2) {
        const double mean = counts[2] ? (sums[i] + sums[i + 1]) / (double)counts[2] : 0;
        CHECK(mean > -1e-9 && mean < 1 + 1e-9);
    }
    free(groups), free(starts), free(scores), free(labels), free(ranked), free(room);
}

static int same_text(const int64_t *offsets, const uint8_t *data, int64_t i, int64_t j) {
    const int64_t size = offsets[i + 1] - offsets[i];
    return size == offsets[j + 1] - offsets[j] && !memcmp(data + offsets[i], data + offsets[j], (size_t)size);
}

/* Joins any texts and integers, whose digits printf knows. */
static void check_join(const int64_t *offsets, const uint8_t *data, const int64_t *integers, int64_t rows) {
    const int64_t *text_offsets[3], bytes = offsets[rows] - offsets[0];
    const void *columns[3];
    const int parts = 2 + (int)below(2);
    for (int k = 0; k < 3; k++) {
        const int is_text = !below(2);
        text_offsets[k] = is_text && k < parts ? offsets : NULL;
        columns[k] = k == parts ? NULL : is_text ? (const void *)data : integers;
    }
    uint8_t *out = buffer(3 * (bytes + 21 * rows)), expected[3 * 32];
    int64_t *ends = buffer(8 * (rows + 1));
    rayrec_join_texts(text_offsets[0], columns[0], text_offsets[1], columns[1], text_offsets[2], columns[2], 31, rows, ends, out);
    CHECK(ends[0] == 0);
    for (int64_t row = 0; row < rows; row++) {
        int64_t size = 0;
        for (int k = 0; k < parts; k++) {
            if (k) expected[size++] = 31;
            if (text_offsets[k]) {
                const int64_t length = offsets[row + 1] - offsets[row];
                memcpy(expected + size, data + offsets[row], (size_t)length);
                size += length;
            } else size += sprintf((char *)expected + size, "%lld", (long long)integers[row]);
        }
        CHECK(ends[row + 1] - ends[row] == size && !memcmp(out + ends[row], expected, (size_t)size));
    }
    free(out), free(ends);
}

static void fuzz_bucketize(void) {
    const int64_t num_edges = below(40), count = below(60);
    double *edges = buffer(8 * num_edges), *values = buffer(8 * count);
    int64_t *buckets = buffer(8 * count);
    for (int64_t i = 0; i < num_edges; i++) edges[i] = (double)(2 * i - below(2));
    for (int64_t i = 0; i < count; i++) values[i] = below(9) ? (double)(below(2 * num_edges + 4) - 2) : (double)NAN;
    rayrec_bucketize(values, count, edges, num_edges, buckets);
    for (int64_t i = 0; i < count; i++) {
        int64_t expected = 0;
        while (expected < num_edges && edges[expected] <= values[i]) expected++;
        CHECK(buckets[i] == expected);
    }
    free(edges), free(values), free(buckets);
}

/* Any bytes as texts, and lists of them, and integers that are equal as the texts are. Separators are random. */
static void fuzz_text_features(void) {
    const int64_t texts = 1 + below(60), rows = below(20), letters = 1 + below(4);
    int64_t *offsets = buffer(8 * (texts + 1)), *left = buffer(16 * rows), *right = buffer(16 * rows), longest = 0;
    offsets[0] = below(4);
    for (int64_t i = 0; i < texts; i++) offsets[i + 1] = offsets[i] + below(12);
    const int64_t bytes = offsets[texts] - offsets[0], room = (bytes + texts) / 2;
    uint8_t *data = buffer(offsets[texts]), *separators = buffer(1 << 16);
    const int is_any = !below(3);
    for (int64_t i = 0; i < offsets[texts]; i++) data[i] = (uint8_t)(is_any ? next() : (uint64_t)('a' + below(letters)));
    for (int64_t i = 0; i < 1 << 16; i++) separators[i] = (uint8_t)!below(3);
    int64_t *lengths = buffer(8 * texts), *ends = buffer(8 * room), total = 0;
    uint8_t *runs = buffer(bytes);
    const int64_t count = rayrec_text_runs(offsets, data, texts, separators, lengths, ends, runs);
    for (int64_t i = 0; i < texts; i++) total += lengths[i];
    CHECK(count == total && count <= room);
    for (int64_t i = 0; i < count; i++) CHECK(ends[i] > (i ? ends[i - 1] : 0) && ends[i] <= bytes);
    for (int64_t row = 0; row < rows; row++) {
        left[row] = below(texts), right[row] = below(texts);
        left[rows + row] = below(texts - left[row] + 1), right[rows + row] = below(texts - right[row] + 1);
        if (right[rows + row] > longest) longest = right[rows + row];
    }
    int64_t num_slots = 2;
    while (num_slots < 2 * longest) num_slots *= 2;
    uint32_t *slots = buffer(4 * num_slots);
    double *common = buffer(8 * rows), *equal = buffer(8 * rows);
    rayrec_count_common(offsets, data, left, left + rows, offsets, data, right, right + rows, rows, slots, common);
    if (rows <= texts) rayrec_count_equal(offsets, data, left, left + rows, offsets, data, rows, equal);
    int64_t *integers = buffer(8 * texts);
    double *counts = buffer(8 * rows);
    for (int64_t i = 0; i < texts; i++) {
        int64_t first = 0;
        while (!same_text(offsets, data, first, i)) first++;
        integers[i] = first == i ? (int64_t)((uint64_t)((int64_t)next() >> below(64)) << 6) | i : integers[first];
    }
    rayrec_count_common(NULL, integers, left, left + rows, NULL, integers, right, right + rows, rows, slots, counts);
    CHECK(!memcmp(counts, common, (size_t)(8 * rows)));
    if (rows <= texts) {
        rayrec_count_equal(NULL, integers, left, left + rows, NULL, integers, rows, counts);
        CHECK(!memcmp(counts, equal, (size_t)(8 * rows)));
        check_join(offsets, data, integers, rows);
    }
    for (int64_t row = 0; row < rows; row++) {
        double found = 0, same = 0;
        for (int64_t i = left[row]; i < left[row] + left[rows + row]; i++) {
            int is_new = 1, is_common = 0;
            for (int64_t j = left[row]; j < i; j++) is_new &= !same_text(offsets, data, i, j);
            for (int64_t j = right[row]; j < right[row] + right[rows + row]; j++) is_common |= same_text(offsets, data, i, j);
            found += is_new && is_common;
            if (rows <= texts) same += same_text(offsets, data, i, row);
        }
        CHECK(common[row] == found && (rows > texts || equal[row] == same));
    }
    free(offsets), free(left), free(right), free(data), free(separators), free(lengths), free(ends), free(runs), free(slots);
    free(common), free(equal), free(integers), free(counts);
}

/* Writes numbers of `width` bits as runs of packed ones, and of equal ones, for a page of a Parquet file. Returns the bytes. */
static int64_t write_runs(const uint32_t *numbers, int64_t count, int width, uint8_t *out) {
    uint8_t *const begin = out;
    for (int64_t i = 0; i < count;) {
        int64_t equal = 1;
        while (i + equal < count && equal < 1000 && numbers[i + equal] == numbers[i]) equal++;
        if (equal >= 8 || !below(8)) {
            const uint64_t head = (uint64_t)equal << 1;
            if (head > 127) *out++ = (uint8_t)(head & 127) | 128, *out++ = (uint8_t)(head >> 7);
            else *out++ = (uint8_t)head;
            memcpy(out, &numbers[i], (size_t)(width + 7) / 8), out += (width + 7) / 8;
            i += equal;
            continue;
        }
        const int64_t groups = 1 + below(4);
        *out++ = (uint8_t)(groups << 1 | 1);
        memset(out, 0, (size_t)(groups * width));
        for (int64_t n = 0; n < 8 * groups && i + n < count; n++)
            for (int bit = 0; bit < width; bit++)
                out[(n * width + bit) >> 3] |= (uint8_t)((numbers[i + n] >> bit & 1) << ((n * width + bit) & 7));
        out += groups * width, i += 8 * groups;
    }
    return out - begin;
}

static void *exact_copy(const void *data, int64_t bytes) {
    void *copy = buffer(bytes);
    memcpy(copy, data, (size_t)bytes);
    return copy;
}

static uint8_t *write_varint(uint8_t *out, uint64_t value) {
    for (; value > 127; value >>= 7) *out++ = (uint8_t)(value | 128);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *write_field(uint8_t *out, int delta, int64_t value) { /* an int32 of Thrift's compact protocol */
    *out++ = (uint8_t)(delta << 4 | 5);
    return write_varint(out, (uint64_t)value << 1 ^ (uint64_t)(value >> 63));
}

/* Writes data as Snappy or LZ4 (codec 1, 2) with literals, and with copies of bytes that happen to be the same before. */
static uint8_t *compress(int codec, const uint8_t *data, int64_t bytes, uint8_t *out) {
    if (codec == 0) return (uint8_t *)memcpy(out, data, (size_t)bytes) + bytes;
    if (codec == 1) out = write_varint(out, (uint64_t)bytes);
    for (int64_t at = 0; at < bytes || (codec == 2 && at == bytes);) {
        int64_t literal = below(bytes - at + 1), copied = 0, offset = 0;
        const int64_t from = at + literal;
        if (from && below(4)) {
            offset = 1 + below(from < 2000 ? from : 2000);
            while (from + copied < bytes && copied < 64 && data[from + copied] == data[from + copied - offset]) copied++;
        }
        if (copied < 4) copied = 0, literal = bytes - at;
        if (codec == 2) {
            *out++ = (uint8_t)((literal < 15 ? literal : 15) << 4 | (copied < 4 ? 0 : copied - 4 < 15 ? copied - 4 : 15));
            if (literal >= 15) {
                int64_t left = literal - 15;
                for (; left >= 255; left -= 255) *out++ = 255;
                *out++ = (uint8_t)left;
            }
            out = (uint8_t *)memcpy(out, data + at, (size_t)literal) + literal;
            if (!copied) return out;
            *out++ = (uint8_t)offset, *out++ = (uint8_t)(offset >> 8);
            if (copied - 4 >= 15) *out++ = (uint8_t)(copied - 19);
        } else {
            if (literal) {
                const uint32_t size = (uint32_t)literal - 1;
                const int extra = size < 60 ? 0 : size < 256 ? 1 : 2;
                *out++ = (uint8_t)((extra ? 59 + extra : (int)size) << 2);
                for (int i = 0; i < extra; i++) *out++ = (uint8_t)(size >> (8 * i));
                out = (uint8_t *)memcpy(out, data + at, (size_t)literal) + literal;
            }
            if (copied >= 4 && copied < 12 && offset < 2048 && below(2)) {
                *out++ = (uint8_t)(1 | (copied - 4) << 2 | offset >> 8 << 5), *out++ = (uint8_t)offset;
            } else if (copied) {
                *out++ = (uint8_t)(2 | (copied - 1) << 2), *out++ = (uint8_t)offset, *out++ = (uint8_t)(offset >> 8);
            }
        }
        at += literal + copied;
    }
    return out;
}

/* Writes a page of a Parquet file, of type 0 (data), 2 (dictionary) or 3 (data of version 2, whose first `levels` bytes are levels). */
static uint8_t *write_page(int type, int codec, const uint8_t *data, int64_t bytes, int64_t levels, int64_t values, uint8_t *out) {
    static uint8_t stored[1 << 16];
    const int64_t plain = type == 3 ? levels : 0;
    memcpy(stored, data, (size_t)plain);
    const int64_t size = bytes > plain ? compress(codec, data + plain, bytes - plain, stored + plain) - stored : plain;
    out = write_field(out, 1, type);
    out = write_field(out, 1, bytes);
    out = write_field(out, 1, size);
    if (below(2)) out = write_field(out, 1, (int64_t)next() >> 33), *out++ = (uint8_t)((type == 0 ? 1 : type == 2 ? 3 : 4) << 4 | 12);
    else *out++ = (uint8_t)((type == 0 ? 2 : type == 2 ? 4 : 5) << 4 | 12);
    out = write_field(out, 1, values);
    if (type == 3) out = write_field(write_field(out, 1, 0), 1, values);
    out = write_field(out, 1, type == 2 ? 0 : 8);
    if (type == 0) out = write_field(write_field(out, 1, 3), 1, 3);
    if (type == 3) out = write_field(write_field(out, 1, levels), 1, 0);
    *out++ = 0, *out++ = 0;
    return (uint8_t *)memcpy(out, stored, (size_t)size) + size;
}

enum { CHUNK_ROWS = 300 };

/* Random values of a column chunk, and the chunk with them. */
typedef struct {
    int64_t rows, entries, item_bytes, codec, optional, bytes;
    uint32_t codes[CHUNK_ROWS], levels[CHUNK_ROWS];
    uint8_t dictionary[1 << 14], data[1 << 17];
} written_chunk;

static void write_chunk(written_chunk *chunk) {
    const int width = (int)below(9);
    const int64_t null_share = below(4), repeats = 1 + below(20);
    chunk->rows = 1 + below(CHUNK_ROWS), chunk->entries = 1 + below(1 << width), chunk->codec = below(3), chunk->optional = below(2);
    chunk->item_bytes = 4 * below(3);
    uint8_t *out = chunk->dictionary;
    for (int64_t i = 0; i < chunk->entries; i++) {
        const uint32_t size = chunk->item_bytes ? (uint32_t)chunk->item_bytes : (uint32_t)below(24);
        if (!chunk->item_bytes) memcpy(out, &size, 4), out += 4;
        for (uint32_t n = 0; n < size; n++) *out++ = (uint8_t)below(3);
    }
    const int64_t bytes = out - chunk->dictionary;
    out = write_page(2, (int)chunk->codec, chunk->dictionary, bytes, 0, chunk->entries, chunk->data);
    for (int64_t first = 0; first < chunk->rows;) {
        const int64_t count = 1 + below(chunk->rows - first);
        uint32_t numbers[CHUNK_ROWS];
        int64_t present = 0;
        for (int64_t i = first; i < first + count; i++) {
            chunk->levels[i] = !chunk->optional || null_share == 0 || (null_share < 3 && below(4) >= null_share);
            chunk->codes[i] = 0;
            if (!chunk->levels[i]) continue;
            chunk->codes[i] = present && below(repeats) ? numbers[present - 1] : (uint32_t)below(chunk->entries);
            numbers[present++] = chunk->codes[i];
        }
        uint8_t page[8192];
        const int type = below(2) ? 0 : 3, prefix = type == 0 && chunk->optional ? 4 : 0;
        const int64_t level_bytes = chunk->optional ? write_runs(chunk->levels + first, count, 1, page + prefix) : 0;
        if (prefix) memcpy(page, &(uint32_t){(uint32_t)level_bytes}, 4);
        uint8_t *const indices = page + prefix + level_bytes;
        *indices = (uint8_t)width;
        const int64_t page_bytes = prefix + level_bytes + 1 + write_runs(numbers, present, width, indices + 1);
        out = write_page(type, (int)chunk->codec, page, page_bytes, level_bytes, count, out);
        first += count;
    }
    chunk->bytes = out - chunk->data;
}

/* Decodes a chunk as coded_columns.py does, and compares it with what was written, or if it was damaged, checks that it is inside its
 * memory. */
static void check_chunk(const written_chunk *written, int64_t bytes, int is_damaged) {
    uint8_t *data = exact_copy(written->data, bytes);
    rayrec_coded_chunk chunk = {.data = data, .length = bytes, .rows = written->rows, .max_bytes = 1 << 17, .codec = written->codec,
                                .optional = written->optional, .item_bytes = written->item_bytes};
    rayrec_find_pages(&chunk, 1);
    CHECK(is_damaged || (chunk.state == 0 && chunk.entries == written->entries));
    if (chunk.state == 0) {
        const int is_text = chunk.item_bytes == 0;
        chunk.codes = is_text || below(2) ? buffer(4 * chunk.rows) : NULL;
        chunk.valid = chunk.optional ? calloc((size_t)(chunk.rows + 7) / 8, 1) : NULL;
        chunk.values = buffer(is_text ? chunk.dictionary_bytes : chunk.rows * chunk.item_bytes);
        chunk.offsets = is_text ? buffer(8 * (chunk.entries + 1)) : NULL;
        uint8_t *room = buffer(8 * chunk.rows + chunk.dictionary_bytes + chunk.page_bytes);
        rayrec_decode_chunks(&chunk, 1, room);
        CHECK(is_damaged || chunk.state == 0);
        int64_t nulls = 0;
        for (int64_t i = 0; i < chunk.rows && chunk.state == 0; i++) {
            const int is_valid = !chunk.valid || (chunk.valid[i >> 3] >> (i & 7) & 1);
            const uint8_t *values = chunk.values;
            nulls += !is_valid;
            CHECK(!chunk.codes || chunk.codes[i] < chunk.entries || chunk.entries == 0);
            if (is_damaged) continue;
            CHECK(is_valid == (int)written->levels[i] && (!chunk.codes || chunk.codes[i] == written->codes[i]));
            const int64_t entry = chunk.item_bytes * (int64_t)written->codes[i];
            CHECK(is_text || !memcmp(values + chunk.item_bytes * i, written->dictionary + entry, (size_t)chunk.item_bytes));
        }
        CHECK(chunk.state || nulls == chunk.nulls);
        for (int64_t i = 0, at = 0; is_text && i < chunk.entries && chunk.state == 0; i++) {
            const int64_t size = chunk.offsets[i + 1] - chunk.offsets[i];
            CHECK(size >= 0 && chunk.offsets[i + 1] <= chunk.dictionary_bytes);
            at += 4;
            CHECK(is_damaged || !memcmp((uint8_t *)chunk.values + chunk.offsets[i], written->dictionary + at, (size_t)size));
            at += size;
        }
        free(chunk.codes), free(chunk.valid), free(chunk.values), free(chunk.offsets), free(room);
    }
    free(data);
}

static void fuzz_coded_chunks(void) { /* what is written is decoded; what is damaged then is refused, or decoded inside of its memory */
    static written_chunk chunk;
    write_chunk(&chunk);
    check_chunk(&chunk, chunk.bytes, 0);
    for (int turn = 0; turn < 6; turn++) {
        chunk.data[below(turn < 4 ? chunk.bytes : chunk.bytes < 40 ? chunk.bytes : 40)] = (uint8_t)next();
        check_chunk(&chunk, turn == 3 ? below(chunk.bytes + 1) : chunk.bytes, 1);
    }
}

static void fuzz_decompress(void) {
    static uint8_t stored[1 << 16];
    const int64_t bytes = 1 + below(3000);
    uint8_t *data = buffer(bytes), *out = buffer(bytes);
    for (int64_t i = 0; i < bytes; i++) data[i] = (uint8_t)below(2);
    const int codec = 1 + (int)below(2);
    int64_t size = compress(codec, data, bytes, stored) - stored;
    for (int turn = 0; turn < 5; turn++) {
        uint8_t *copy = exact_copy(stored, size);
        const int32_t is_right = rayrec_decompress(codec, copy, size, out, bytes);
        CHECK(turn || (is_right && !memcmp(out, data, (size_t)bytes)));
        free(copy);
        stored[below(size)] = (uint8_t)next();
        if (turn == 3) size = below(size + 1);
        if (!size) break;
    }
    free(data), free(out);
}

int main(int count, char **arguments) {
    static void (*const targets[])(void) = {fuzz_parse_and_encode, fuzz_csv, fuzz_wide_look_up, fuzz_gather, fuzz_format,
                                             fuzz_table_training, fuzz_dots, fuzz_relu, fuzz_dropout, fuzz_exponents,
                                             fuzz_list_attention, fuzz_products, fuzz_ranking, fuzz_side_tables,
                                             fuzz_text_features, fuzz_bucketize, fuzz_present_values, fuzz_take_ranges,
                                             fuzz_events, fuzz_coded_chunks, fuzz_decompress, fuzz_json_rows};
    const double seconds = count > 1 ? atof(arguments[1]) : 10;
    const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : (uint64_t)time(NULL);
    const time_t end = time(NULL) + (time_t)seconds;
    fprintf(stderr, "fuzz: %g s from seed %llu\n", seconds, (unsigned long long)seed);
    int64_t rounds = 0;
    for (; rounds % 64 || time(NULL) < end; rounds++) {
        state = seed + (uint64_t)rounds; /* so that seed + round alone repeats a failure */
        for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) targets[i]();
    }
    fprintf(stderr, "fuzz: %lld rounds of %zu targets\n", (long long)rounds, sizeof targets / sizeof *targets);
    return 0;
}
