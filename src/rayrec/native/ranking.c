/* Ranking metrics within groups: partitions rows by group, then sorts and sums each part. */
#include "kernels.h"

#include <string.h>

enum { DIGITS = 12, DIGIT_VALUES = 256 };

/* Bijection, so that groups stay distinct; its high bits depend on all bits of the key. */
static inline uint64_t hash_of(int64_t group) {
    uint64_t x = (uint64_t)group;
    x = (x ^ x >> 32) * 0x9E3779B97F4A7C15ULL;
    return (x ^ x >> 29) * 0xBF58476D1CE4E5B9ULL;
}

/* Sort key that rises as the score falls; -0 equals 0. */
static inline uint32_t falling(float score) {
    const float plain = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &plain, 4);
    return ~(bits ^ ((bits >> 31 ? UINT32_MAX : 0) | 0x80000000u));
}

void rayrec_rank_partition(const int64_t *groups, const float *scores, const uint8_t *labels, int64_t rows, int32_t bits,
                           int64_t *starts, rayrec_ranked_row *out) {
    const int64_t parts = (int64_t)1 << bits;
    const int shift = 63 - bits; /* of hash >> 1, because a shift by 64 is undefined */
    memset(starts, 0, (size_t)(parts + 1) * sizeof *starts);
    for (int64_t i = 0; i < rows; i++)
        if (groups[i]) starts[(hash_of(groups[i]) >> 1 >> shift) + 1]++;
    for (int64_t part = 0; part < parts; part++) starts[part + 1] += starts[part];
    for (int64_t i = 0; i < rows; i++) {
        if (!groups[i]) continue;
        const uint64_t hash = hash_of(groups[i]);
        rayrec_ranked_row *row = out + starts[hash >> 1 >> shift]++;
        row->hash = hash, row->falling = falling(scores[i]), row->label = labels[i];
    }
    memmove(starts + 1, starts, (size_t)parts * sizeof *starts);
    starts[0] = 0;
}

static inline unsigned digit(const rayrec_ranked_row *row, int place) {
    return place < 4 ? row->falling >> 8 * place & 255 : row->hash >> 8 * (place - 4) & 255;
}

/* Sorts by group, then by falling score: LSD radix sort that skips digits equal in all rows. Returns the sorted array, `rows` or
 * `room`. */
static rayrec_ranked_row *sorted(rayrec_ranked_row *rows, rayrec_ranked_row *room, int64_t count) {
    int64_t places[DIGITS][DIGIT_VALUES];
    memset(places, 0, sizeof places);
    for (int64_t i = 0; i < count; i++)
        for (int place = 0; place < DIGITS; place++) places[place][digit(rows + i, place)]++;
    for (int place = 0; place < DIGITS; place++) {
        int64_t *starts = places[place], sum = 0;
        if (!count || starts[digit(rows, place)] == count) continue;
        for (int value = 0; value < DIGIT_VALUES; value++) {
            const int64_t size = starts[value];
            starts[value] = sum, sum += size;
        }
        for (int64_t i = 0; i < count; i++) room[starts[digit(rows + i, place)]++] = rows[i];
        rayrec_ranked_row *other = rows;
        rows = room, room = other;
    }
    return rows;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns the expected 1 / rank of the first of `positives` among `size` tied rows in random order, below `before` rows. */
static double reciprocal_rank(int64_t before, int64_t size, int64_t positives) {
    double expected = 0, none_yet = 1;
    for (int64_t i = 0; i <= size - positives && none_yet > 0; i++) {
        const double here = (double)positives / (double)(size - i);
        expected += none_yet * here / (double)(before + i + 1);
        none_yet *= 1 - here;
    }
    return expected;
}

/* Returns the probability that the first `taken` of `size` tied rows in random order include one of `positives`. */
static double hit(int64_t size, int64_t positives, int64_t taken) {
    double none = 1;
    for (int64_t i = 0; i < taken && none > 0; i++) none *= (double)(size - positives - i) / (double)(size - i);
    return 1 - none;
}

static void add(double *sum, double value) { /* Neumaier: sum[1] is the rounding error of sum[0] */
    const double total = sum[0] + value;
    const double larger = sum[0] > value ? sum[0] : value, smaller = sum[0] > value ? value : sum[0];
    sum[1] += larger - total + smaller; /* no value is negative */
    sum[0] = total;
}

static void rank_group(const rayrec_ranked_row *rows, int64_t count, const rayrec_ranking *ranking) {
    int64_t positives = 0, before = 0, negatives_before = 0, twice_wrong = 0;
    for (int64_t i = 0; i < count; i++) positives += rows[i].label;
    const int64_t negatives = count - positives, num_ks = ranking->num_ks;
    if (!positives) return;
    double *sums = ranking->sums, *of_ks = ranking->room;
    memset(of_ks, 0, 2 * (size_t)num_ks * sizeof *of_ks);
    int64_t found = 0;
    while (before < count && found < positives) {
        int64_t stop = before, of_block = 0;
        while (stop < count && rows[stop].falling == rows[before].falling) of_block += rows[stop++].label;
        const int64_t size = stop - before, wrong = size - of_block;
        if (of_block) {
            twice_wrong += of_block * (2 * negatives_before + wrong);
            const double share = (double)of_block / (double)size;
            for (int64_t j = 0; j < num_ks; j++) {
                const int64_t k = ranking->ks[j], first = least(before, k), last = least(stop, k);
                of_ks[2 * j] += share * (ranking->discounts[last] - ranking->discounts[first]);
                of_ks[2 * j + 1] += share * (double)(last - first);
                if (!found) add(sums + 4 + 6 * j + 4, hit(size, of_block, last - first));
            }
            if (!found) add(sums + 2, reciprocal_rank(before, size, of_block));
        }
        found += of_block, negatives_before += wrong, before = stop;
    }
    for (int64_t j = 0; j < num_ks; j++) {
        add(sums + 4 + 6 * j, of_ks[2 * j] / ranking->discounts[least(positives, ranking->ks[j])]);
        add(sums + 4 + 6 * j + 2, of_ks[2 * j + 1] / (double)positives);
    }
    ranking->counts[2]++;
    if (!negatives) return;
    const double twice_pairs = 2.0 * (double)positives * (double)negatives;
    add(sums, (double)(2 * positives * negatives - twice_wrong) / twice_pairs * (double)count);
    ranking->counts[0] += count, ranking->counts[1]++;
}

void rayrec_rank_rows(rayrec_ranked_row *rows, rayrec_ranked_row *room, int64_t count, const rayrec_ranking *ranking) {
    const rayrec_ranked_row *in_order = sorted(rows, room, count);
    for (int64_t start = 0, stop; start < count; start = stop) {
        for (stop = start + 1; stop < count && in_order[stop].hash == in_order[start].hash; stop++);
        rank_group(in_order + start, stop - start, ranking);
    }
}
