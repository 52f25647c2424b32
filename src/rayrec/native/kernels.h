/* Kernels of the click-log path: parse text to raw columns, count and look up categories, encode to model inputs.
 *
 * Raw rows are row-major: integers int64 (rows, num_dense), tokens uint32 (rows, num_sparse), missing uint64 (rows) with
 * bit d for dense column d and bit num_dense + s for sparse column s, labels uint8 (rows).
 */
#ifndef RAYREC_KERNELS_H
#define RAYREC_KERNELS_H

#include <stdint.h>

enum { RAYREC_MAX_COLUMNS = 64, RAYREC_TEXT_PADDING = 64 };

/* Why a row was refused. Kept in step with FAULT_KINDS in data/parsing.py. */
enum rayrec_fault_kind {
    FAULT_EMPTY_LINE,
    FAULT_TOO_FEW_COLUMNS,
    FAULT_TOO_MANY_COLUMNS,
    FAULT_LABEL,
    FAULT_NOT_AN_INTEGER,
    FAULT_NOT_HEXADECIMAL,
    FAULT_LINE_TOO_LONG,
    FAULT_KINDS
};

typedef struct {
    int64_t byte; /* where the line starts, counted from the start of the text */
    int32_t kind;
    int32_t column; /* 0-based column of the line, -1 where the whole line is meant */
} rayrec_fault;

typedef struct {
    int32_t has_label;
    int32_t num_dense;
    int32_t num_sparse;
    int32_t max_line_bytes;
} rayrec_layout;

typedef struct {
    int64_t *integers;
    uint32_t *tokens;
    uint64_t *missing;
    uint8_t *labels;
    int64_t capacity; /* rows there is room for */
} rayrec_raw_rows;

/* How one sparse column turns a token into an id. */
typedef struct {
    const uint64_t *slots; /* open addressing: token << 32 | id + 1, 0 where free; NULL: the modulo rule */
    uint64_t mask;         /* number of slots - 1 */
    int32_t shift;         /* 32 - log2(number of slots) */
    int32_t missing_id;
    int32_t unknown_id;
    int32_t modulo_base; /* id = modulo_base + token % modulo */
    uint32_t modulo;
    int32_t padding;
} rayrec_sparse_column;

/* How one dense column turns an integer x into (sign(x) ln(1 + |x|) - mean) * scale. */
typedef struct {
    double mean;
    double scale;
    float missing_value;
    float padding;
} rayrec_dense_column;

int64_t rayrec_parse(const uint8_t *text, int64_t length, const rayrec_layout *layout, const rayrec_raw_rows *out,
                     int64_t *fault_counts, rayrec_fault *faults, int64_t max_faults, int64_t *num_faults);
int64_t rayrec_last_line_start(const uint8_t *text, int64_t length);

void rayrec_encode(const rayrec_raw_rows *raw, const rayrec_layout *layout, const int64_t *order, int64_t rows,
                   const rayrec_dense_column *dense_columns, const rayrec_sparse_column *sparse_columns,
                   float *dense_out, int32_t *ids_out, int64_t ids_stride, float *labels_out);
void rayrec_transform_dense(const int64_t *values, int64_t count, const rayrec_dense_column *column, float *out);

int64_t rayrec_count_column(const uint32_t *tokens, const uint64_t *missing, int64_t rows, int64_t stride, int32_t bit,
                            uint32_t *keys, int64_t *counts, int64_t slots, int64_t used);
int64_t rayrec_count_merge(const uint32_t *tokens, const int64_t *amounts, int64_t count, uint32_t *keys,
                           int64_t *counts, int64_t slots, int64_t used);
int32_t rayrec_build_slots(const uint32_t *tokens, int64_t count, int32_t first_id, uint64_t *out, int64_t slots);
void rayrec_look_up(const uint32_t *tokens, int64_t count, const rayrec_sparse_column *column, int32_t *out);

#endif
