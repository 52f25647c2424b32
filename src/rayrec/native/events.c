/* Kernels that build lists of events (data/sequences). Arrays belong to the caller. */

#include "kernels.h"

#include <string.h>

/* Copies ranges of `values`, items of `item_bytes`, to `out`, one after the other. Ranges may overlap. */
void rayrec_take_ranges(const uint8_t *values, int64_t item_bytes, const int64_t *starts, const int64_t *lengths, int64_t ranges,
                        uint8_t *out) {
    for (int64_t i = 0; i < ranges; i++) {
        const int64_t bytes = lengths[i] * item_bytes;
        memcpy(out, values + starts[i] * item_bytes, (size_t)bytes);
        out += bytes;
    }
}

/* Events are rows of `width` values, the first of which is the hash of the user. A partition has a range of hashes. */
static inline int64_t part_of(uint64_t key, int64_t partitions) { return (int64_t)((key >> 32) * (uint64_t)partitions >> 32); }

/* Adds the number of events in each partition to `counts`. */
void rayrec_count_partitions(const uint64_t *keys, int64_t events, int64_t partitions, int64_t *counts) {
    for (int64_t i = 0; i < events; i++) counts[part_of(keys[i], partitions)]++;
}

/* Copies events, whose columns start with the keys, to rows of their partitions in `out`. `ends` has the next row of each
 * partition, and is advanced. `sources` has the number of the event in each row, from `first` on; NULL if it is not needed. */
void rayrec_partition_events(const uint64_t *const *columns, int64_t width, int64_t events, int64_t partitions, int64_t *ends,
                             int64_t first, uint64_t *out, int64_t *sources) {
    for (int64_t i = 0; i < events; i++) {
        const int64_t row = ends[part_of(columns[0][i], partitions)]++;
        for (int64_t c = 0; c < width; c++) out[row * width + c] = columns[c][i];
        if (sources) sources[row] = first + i;
    }
}

static inline uint64_t slot_of(uint64_t value, int bits) { return (value ^ value >> 32) * 0x9E3779B97F4A7C15ULL >> (64 - bits); }

static int64_t distinct_of(const uint64_t *rows, int64_t width, int64_t column, int64_t start, int64_t stop, uint32_t *slots,
                           uint64_t *values, int64_t *out) {
    int64_t found = 0;
    int bits = 6; /* The table grows with the values, so that few of them stay in the cache. */
    memset(slots, 0, sizeof *slots << bits);
    for (int64_t row = start; row < stop; row++) {
        const uint64_t value = rows[row * width + column], mask = ((uint64_t)1 << bits) - 1;
        uint64_t slot = slot_of(value, bits);
        while (slots[slot] && values[slots[slot] - 1] != value) slot = (slot + 1) & mask;
        if (slots[slot]) continue;
        values[found] = value;
        out[found++] = row;
        slots[slot] = (uint32_t)found;
        if (found << 1 <= (int64_t)mask) continue;
        memset(slots, 0, sizeof *slots << ++bits);
        for (int64_t i = 0; i < found; i++) {
            slot = slot_of(values[i], bits);
            while (slots[slot]) slot = (slot + 1) & ((mask << 1) + 1);
            slots[slot] = (uint32_t)i + 1;
        }
    }
    return found;
}

/* Writes each different value of a column of rows to `values`, and its first row to `out`, for each of the partitions that begin
 * at `starts`. `ends` has the number of values of a partition and those before. `slots` has room for four times as many numbers
 * as the largest partition has rows, and at least 64. */
void rayrec_distinct_values(const uint64_t *rows, int64_t width, int64_t column, const int64_t *starts, int64_t partitions,
                            uint32_t *slots, uint64_t *values, int64_t *out, int64_t *ends) {
    int64_t before = 0;
    for (int64_t p = 0; p < partitions; p++) {
        const int64_t found = distinct_of(rows, width, column, starts[p], starts[p + 1], slots, values + before, out + before);
        ends[p] = before += found;
    }
}

/* Whether event b is before event a: by the key, then by the second value if `by` is 2. */
static inline int is_before(const int64_t *b, const int64_t *a, int64_t by) {
    if (b[0] != a[0]) return (uint64_t)b[0] < (uint64_t)a[0];
    return by > 1 && b[1] < a[1];
}

static inline void copy_row(int64_t *out, const int64_t *row, int64_t width) {
    for (int64_t c = 0; c < width; c++) out[c] = row[c];
}

enum { RUN = 8 }; /* rows that insertion sorts faster than merges */

/* Sorts few rows, with room for one more. */
static void insert_rows(int64_t *rows, int64_t count, int64_t width, int64_t by, int64_t *room) {
    for (int64_t i = 1; i < count; i++) {
        int64_t at = i;
        while (at && is_before(rows + i * width, rows + (at - 1) * width, by)) at--;
        if (at == i) continue;
        copy_row(room, rows + i * width, width);
        memmove(rows + (at + 1) * width, rows + at * width, (size_t)((i - at) * width) * sizeof *rows);
        copy_row(rows + at * width, room, width);
    }
}

static void merge_rows(const int64_t *left, const int64_t *middle, const int64_t *stop, int64_t width, int64_t by, int64_t *out) {
    const int64_t *right = middle;
    for (; left < middle && right < stop; out += width) {
        if (is_before(right, left, by)) copy_row(out, right, width), right += width;
        else copy_row(out, left, width), left += width;
    }
    memcpy(out, left, (size_t)(middle - left) * sizeof *out);
    memcpy(out + (middle - left), right, (size_t)(stop - right) * sizeof *out);
}

/* Sorts rows, with room for as many. Equal ones keep their order. */
static void sort_rows(int64_t *rows, int64_t count, int64_t width, int64_t by, int64_t *room) {
    int64_t sorted = 1;
    while (sorted < count && !is_before(rows + sorted * width, rows + (sorted - 1) * width, by)) sorted++;
    if (sorted >= count) return;
    for (int64_t start = 0; start < count; start += RUN)
        insert_rows(rows + start * width, count - start < RUN ? count - start : RUN, width, by, room);
    int64_t *from = rows, *to = room;
    for (int64_t size = RUN; size < count; size *= 2) {
        for (int64_t start = 0; start < count; start += 2 * size) {
            const int64_t middle = count - start < size ? count : start + size;
            const int64_t stop = count - start < 2 * size ? count : start + 2 * size;
            merge_rows(from + start * width, from + middle * width, from + stop * width, width, by, to + start * width);
        }
        int64_t *const other = from;
        from = to, to = other;
    }
    if (from != rows) memcpy(rows, from, (size_t)(count * width) * sizeof *rows);
}

enum { AHEAD = 16 }; /* rows whose cache misses overlap */

/* Returns a range of hashes within those of a partition: most have one user or none. */
static inline int64_t bucket_of(const int64_t *row, int64_t parts, int64_t first, int64_t buckets) {
    const int64_t bucket = part_of((uint64_t)*row, parts) - first;
    return bucket < 0 || bucket >= buckets ? 0 : bucket;
}

/* Sorts the events of one of `partitions` by their key, and by their second value too if `by` is 2. Equal ones keep their order.
 * `rows` is overwritten by the columns of the sorted events, and `room` of equal size by their rows. `ends` has room for
 * buckets + 1 numbers; `partitions` times `buckets` is below 2^32. Events of other partitions give an undefined order. */
void rayrec_sort_events(int64_t *rows, int64_t *room, int64_t events, int64_t width, int64_t by, int64_t partition,
                        int64_t partitions, int64_t buckets, int64_t *ends) {
    const int64_t parts = partitions * buckets, first = partition * buckets;
    memset(ends, 0, (size_t)(buckets + 1) * sizeof *ends);
    for (int64_t i = 0; i < events; i++) ends[bucket_of(rows + i * width, parts, first, buckets) + 1]++;
    for (int64_t b = 0; b < buckets; b++) ends[b + 1] += ends[b];
    for (int64_t i = 0; i < events; i++) {
        if (i + AHEAD < events)
            __builtin_prefetch(room + ends[bucket_of(rows + (i + AHEAD) * width, parts, first, buckets)] * width, 1);
        copy_row(room + ends[bucket_of(rows + i * width, parts, first, buckets)]++ * width, rows + i * width, width);
    }
    for (int64_t b = 0, start = 0; b < buckets; start = ends[b++])
        sort_rows(room + start * width, ends[b] - start, width, by, rows + start * width);
    for (int64_t i = 0; i < events; i++)
        for (int64_t c = 0; c < width; c++) rows[c * events + i] = room[i * width + c];
}
