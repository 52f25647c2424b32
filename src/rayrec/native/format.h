/* The kernel that writes a click log: columns to tab-separated text. */
#ifndef RAYREC_FORMAT_H
#define RAYREC_FORMAT_H

#include <stdint.h>

/* Columns are contiguous and `stride` elements apart: dense column d of row i is dense[d * stride + i], sparse column s
 * is tokens[s * stride + i]. Bit d of missing[i] empties dense column d, bit num_dense + s sparse column s. Writes
 * "label\tdense...\ttokens...\n" a row, tokens as 8 lowercase hex digits. Returns the bytes written, or -1 where the
 * text does not fit `capacity` or the arguments make no sense; no byte beyond `capacity` is ever touched. */
int64_t rayrec_format_rows(const uint8_t *labels, const int32_t *dense, const uint32_t *tokens, const uint64_t *missing,
                           int64_t rows, int64_t stride, int32_t num_dense, int32_t num_sparse, uint8_t *out,
                           int64_t capacity);

#endif
