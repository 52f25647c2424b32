/* Synthetic multi-hot bags: random ids as a function of their position, without a table. */
#include "kernels.h"

#include <math.h>

static inline int64_t random_id(uint64_t bits, int64_t num_embeddings, int pareto) {
    if (!pareto) return (int64_t)((__uint128_t)bits * (uint64_t)num_embeddings >> 64);
    /* Lomax with shape 0.25 by inversion: (1 - u)^-4 - 1, u in [0, 1). Beyond 32 bits NumPy's cast returns INT32_MIN, and its
     * remainder is never negative. */
    const double v = (double)((bits >> 11) + 1) * 0x1.0p-53; /* 1 - u, in (0, 1] */
    const double square = v * v, value = 1.0 / (square * square) - 1.0;
    const int64_t cut = value < 2147483648.0 ? (int64_t)value : INT32_MIN;
    const int64_t remainder = cut % num_embeddings;
    return remainder < 0 ? remainder + num_embeddings : remainder;
}

/* Writes the bag of each row r: ids[r], then size - 1 random ids in [0, num_embeddings), a function of (seed, column, ids[r],
 * place). `id_bytes`, 4 or 8, is the size of ids and of out (rows, size). */
void rayrec_expand_bags(const void *ids, int64_t rows, int64_t id_bytes, int64_t size, int64_t num_embeddings,
                        uint64_t seed, int64_t column, int32_t pareto, void *out) {
    const uint64_t stream = rayrec_mix(rayrec_mix(seed + 0x9E3779B97F4A7C15ULL) + (uint64_t)column);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t id = id_bytes == 4 ? ((const int32_t *)ids)[row] : ((const int64_t *)ids)[row];
        const uint64_t bag = rayrec_mix(stream + 0x9E3779B97F4A7C15ULL * (uint64_t)(id + 1));
        for (int64_t place = 0; place < size; place++) {
            const int64_t value =
                place ? random_id(rayrec_mix(bag + 0x9E3779B97F4A7C15ULL * (uint64_t)place), num_embeddings, pareto) : id;
            if (id_bytes == 4) ((int32_t *)out)[row * size + place] = (int32_t)value;
            else ((int64_t *)out)[row * size + place] = value;
        }
    }
}
