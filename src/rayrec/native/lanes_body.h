/* Functions of vectors for one kind of CPU (`each_cpu.h`), for the bodies of several kernels. */

/* Numbers of the values of a vector: 0, 1, 2, ... */
PART_OF_IT KERNEL NAMED(whole_lanes) NAMED(numbers)(void) { return *(const NAMED(whole_lanes) *)rayrec_numbers; }

PART_OF_IT KERNEL NAMED(lanes) NAMED(larger)(NAMED(lanes) a, NAMED(lanes) b) {
    const NAMED(whole_lanes) is_larger = a > b;
    return (NAMED(lanes))(((NAMED(whole_lanes))a & is_larger) | ((NAMED(whole_lanes))b & ~is_larger));
}

PART_OF_IT KERNEL float NAMED(largest_of)(NAMED(lanes) values) {
    float parts[LANES];
    *(NAMED(lanes) *)parts = values;
    quad larger = *(const quad *)parts;
    for (int i = QUAD; i < LANES; i += QUAD) {
        const quad part = *(const quad *)(parts + i);
        for (int j = 0; j < QUAD; j++) larger[j] = part[j] > larger[j] ? part[j] : larger[j];
    }
    const float even = larger[2] > larger[0] ? larger[2] : larger[0], odd = larger[3] > larger[1] ? larger[3] : larger[1];
    return odd > even ? odd : even;
}

PART_OF_IT KERNEL float NAMED(sum_of)(NAMED(lanes) values) {
    float parts[LANES];
    *(NAMED(lanes) *)parts = values;
    quad sum = *(const quad *)parts;
    for (int i = QUAD; i < LANES; i += QUAD) sum += *(const quad *)(parts + i);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* 2^x to one unit in the last place, 0 for x below -125, NaN for NaN. x is at most 127.
 *
 *     x = whole + rest, rest from -0.5 to 0.5;   2^x = 2^whole * e^(rest ln 2), by the series of e^y up to y^6 */
PART_OF_IT KERNEL NAMED(lanes) NAMED(power_of_two)(NAMED(lanes) x) {
    const NAMED(whole_lanes) is_low = x < -125.0f;
    const NAMED(lanes) lowest = (NAMED(lanes)){0} - 125.0f;
    const NAMED(lanes) in_range = (NAMED(lanes))(((NAMED(whole_lanes))lowest & is_low) | ((NAMED(whole_lanes))x & ~is_low));
    const float rounding = 12582912.0f; /* 1.5 * 2^23: adding it leaves no digit behind the point */
    const NAMED(lanes) rounded = in_range + rounding;
    const NAMED(lanes) rest = in_range - (rounded - rounding);
    NAMED(lanes) power = (NAMED(lanes)){0} + 1.5403530e-4f;
    power = power * rest + 1.3333558e-3f;
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    power = power * rest + 1.0f;
    const NAMED(bit_lanes) exponent = (NAMED(bit_lanes))rounded << 23; /* of `whole`; other digits leave the register */
    const NAMED(lanes) scaled = (NAMED(lanes))(((NAMED(whole_lanes))((NAMED(bit_lanes))power + exponent)) & ~is_low);
    return scaled + (in_range - in_range); /* NaN */
}

/* -1 for values that are kept, 0 for those that are dropped: of `first`, `first` + 1, ... in a block whose random bits are `block`.
 * The mix is a bijection of 32 bits (Wellons, "Prospecting for Hash Functions", 2018). */
PART_OF_IT KERNEL NAMED(whole_lanes) NAMED(are_kept)(uint32_t block, int64_t first, int32_t threshold) {
    NAMED(bit_lanes) x = ((NAMED(bit_lanes))NAMED(numbers)() + (uint32_t)first) * 0x9E3779B9u ^ block;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    return (NAMED(whole_lanes))(x >> 1) >= threshold;
}
