/* Kernels of the click-log path: parse text to raw columns, count and look up categories, encode to model inputs.
 *
 * Raw rows are row-major: integers int64 (rows, num_dense), tokens uint32 (rows, num_sparse), missing uint64 (rows) with
 * bit d for dense column d and bit num_dense + s for sparse column s, labels float32 (rows).
 *
 * All structs are mirrored by ctypes structures in Python, field by field and in the same order (`c_fields` of
 * native/__init__.py). Their memory belongs to the caller: NumPy arrays and tensors that it keeps alive for the call, or as long as a
 * struct that points into them is used. Kernels allocate nothing that outlives a call, and keep no pointer.
 */
#ifndef RAYREC_KERNELS_H
#define RAYREC_KERNELS_H

#include <stdint.h>

enum { RAYREC_MAX_COLUMNS = 64, RAYREC_TEXT_PADDING = 64 };

/* Why a row was rejected. Must match FAULT_KINDS in data/logs/text_parser.py. */
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

/* Rejected row. The caller provides an array of `max_faults`; later faults are only counted. */
typedef struct {
    int64_t byte; /* start of the line in the text */
    int32_t kind;
    int32_t column; /* 0-based column of the line, -1 for the full line */
} rayrec_fault;

/* Columns of a line of text: the label if any, then dense, then sparse columns. */
typedef struct {
    int32_t has_label;
    int32_t num_dense;
    int32_t num_sparse;
    int32_t max_line_bytes;
} rayrec_layout;

/* Matrices that the parser fills and the encoder reads, see above. Each has room for `capacity` rows. */
typedef struct {
    int64_t *integers;
    uint32_t *tokens;
    uint64_t *missing;
    float *labels;
    int64_t capacity; /* maximum rows */
} rayrec_raw_rows;

enum rayrec_hash { HASH_MURMUR3 = 1, HASH_MIX = 2 };

/* Finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits without visible order. */
static inline uint64_t rayrec_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

/* Rule of a sparse column, from token to id: SparseColumn in data/encoding/rules.py. */
typedef struct {
    const uint64_t *slots;  /* table of rayrec_build_slots; NULL: hashed, id = base + token % modulo */
    int64_t num_slots;
    uint64_t modulo;        /* if hashed */
    int64_t base;           /* if hashed */
    int64_t missing_id;
    int64_t unknown_id;
    int64_t hash;           /* if hashed: flags of rayrec_hash, applied to tokens first, in their order */
    uint32_t token_modulo;  /* modulo of tokens before the lookup; 0: none */
    int32_t padding;
} rayrec_sparse_column;

enum rayrec_dense_kind { DENSE_SIGNED_LOG, DENSE_LOG, DENSE_IDENTITY };

/* Rule of a dense column, from integer x to (f(x) - mean - mean_low) * scale: f(x) = sign(x) ln(1 + |x|),
 * ln(max(x, lowest) + shift) or max(x, lowest). DenseColumn in data/encoding/rules.py. */
typedef struct {
    int64_t kind;
    int64_t lowest;
    double shift;
    double mean;
    double mean_low;
    double scale;
    float missing_value;
    float lower;
    float upper;
    int32_t bounded; /* whether inputs are at least `lower` and at most `upper` */
} rayrec_dense_column;

/* Open-addressing table of one column's tokens. */
typedef struct {
    uint64_t *slots; /* `words` numbers each: token, count (0 if free) and, if words is 3, the first row */
    int64_t size;    /* number of slots, a power of two of at least 2 */
    int64_t used;
    uint64_t factor; /* of the hash function; odd */
    int32_t shift;   /* 64 - log2(size) */
    int32_t words;   /* 2 or 3 */
} rayrec_counter;

/* Consecutive row ranges of row-major matrices. */
typedef struct {
    const uint8_t *const *rows; /* address of each range's first row */
    const int64_t *starts;      /* its number, rising from 0 */
    int64_t count;
} rayrec_runs;

/* Storage format of a table's rows: float32; IEEE half; a byte or (low bits first) half a byte per value, then scale and offset as
 * float32 or half, for values integer * scale + offset. The last two are the packed formats of PyTorch's
 * quantized::embedding_bag_byte_prepack and embedding_bag_4bit_prepack. */
enum rayrec_table_kind { TABLE_FP32, TABLE_FP16, TABLE_INT8, TABLE_INT4 };

/* Lookup of one column of a batch. */
typedef struct {
    const uint8_t *table;
    int64_t num_embeddings; /* rows of the table */
    int64_t row_bytes;
    const void *ids;
    const int64_t *offsets; /* (rows + 1): start of each row's ids; NULL: `size` ids per row */
    int64_t size;
    int64_t id_bytes; /* 4 or 8 */
    const float *weights; /* factor of each id's row; NULL: 1 each */
} rayrec_lookup;

/* Lookups of a batch: the ids of feature f's bag b are ids[offsets[f * bags + b]] to ids[offsets[f * bags + b + 1] - 1]. */
typedef struct {
    const int64_t *ids;
    const int64_t *offsets;
    const float *weights; /* factor of each id's row; NULL: 1 each */
    const float *gradient; /* `stride` values for each bag (pooled) or each id */
    int64_t bags; /* of each feature */
    int64_t stride;
    int64_t pooled;
} rayrec_looked_up;

/* Features of one table in a rayrec_looked_up, and the gradients of its rows. */
typedef struct {
    const rayrec_looked_up *lookup;
    int64_t first_feature;
    int64_t num_features;
    int64_t column; /* pooled: first column of the first feature in `gradient` */
    int64_t dim;
    int64_t *distinct; /* (lookups): distinct ids in order of first occurrence */
    float *sums; /* (lookups, dim): sum of the gradients of each distinct id, added in lookup order */
    int64_t found; /* number of distinct ids */
} rayrec_gathered_table;

/* weight = keep * weight - step_size * mean / (sqrt(square) * root_scale + eps), after the update of the moments with the
 * gradient scale * gradient + l2 * weight. */
typedef struct {
    float step_size;
    float root_scale;
    float eps;
    float mean_rate; /* 1 - beta1 */
    float square_keep; /* beta2 */
    float square_rate; /* 1 - beta2 */
    float l2;
    float keep;
    float scale;
} rayrec_adam;

/* Rows of a table, or of a part of one, to update; weights and moments are (.., dim). */
typedef struct {
    float *weights;
    float *mean;
    float *square;
    int64_t dim;
    const rayrec_adam *rule;
    const int64_t *ids; /* distinct rows; NULL: by `marks` */
    const float *gradients; /* (ids, dim) */
    const uint8_t *marks; /* a byte for each row of the table; rows with 0 are updated with gradient 0 */
    int64_t start; /* in ids or marks */
    int64_t stop;
    int64_t only_nonzero; /* skip ids with gradient 0 */
} rayrec_adam_rows;

enum rayrec_values_kind { VALUES_FLOAT32, VALUES_BFLOAT16 };

/* Pairwise products of each row's vectors: a dense one, and one per feature. */
typedef struct {
    const void *dense; /* (rows, dim) */
    const void *sparse; /* (rows, vectors - 1, dim) */
    const int64_t *places; /* (vectors - 1): index of each feature's vector in `sparse` */
    int64_t vectors; /* including the dense one */
    int64_t dim;
    int32_t dense_kind; /* rayrec_values_kind of `dense`, `out` and the multiplied vectors */
    int32_t sparse_kind;
    void *out; /* (rows, dim + pairs): the dense vector, and the products of all pairs, in vector order. Backward: its gradient */
    void *dense_gradient; /* like `dense` */
    void *sparse_gradient; /* like `sparse` */
} rayrec_dots;

/* Gradient of a ReLU's output, overwritten by the gradient of its input. */
typedef struct {
    const float *output; /* (rows, columns); NULL without ReLU, of which `gradient` stays as it is */
    float *gradient; /* (rows, columns) */
    float *turned; /* (columns, rows): output, the transposed gradient */
    float *sums; /* (blocks, columns), zeroed: output, sums of the gradient over each block's rows */
    int64_t rows;
    int64_t columns;
    int64_t block_rows; /* of each block; the last may have fewer */
} rayrec_relu;

/* Random values of dropout. Value i of block b depends on `seed`, b and i alone, so that a backward pass draws them again. */
typedef struct {
    uint64_t seed;
    int32_t threshold; /* 2^31 times the probability of dropping a value */
    float factor; /* of values that are kept */
} rayrec_dropout;

/* Values, or their gradients, with dropout. */
typedef struct {
    rayrec_dropout dropout;
    const float *values; /* (count) */
    float *out; /* (count); may be `values` */
    int64_t count;
    int64_t block_values; /* of each block; the last may have fewer */
} rayrec_dropped_values;

/* Scores of rows, overwritten by 2^(score - largest of the row). */
typedef struct {
    float *scores; /* (rows, columns) */
    float *largest; /* (rows): output, at least the lowest finite value */
    float *sums; /* (rows): output */
    int64_t columns;
} rayrec_exponents;

/* Attention of each element to its own list's elements: softmax(scale * query . key), with dropout, times value.
 * A row of queries, keys or values has all heads side by side, and is followed by the next one after a stride. */
typedef struct {
    const float *query, *key, *value; /* (elements, heads * width) */
    const int64_t *starts; /* (lists + 1): first element of each list, then the number of elements */
    int64_t heads;
    int64_t width;
    int64_t query_stride;
    int64_t memory_stride; /* of keys and values */
    int32_t causal; /* whether elements attend only to those up to them */
    float scale;
    rayrec_dropout dropout;
    float *out; /* (elements, heads * width) */
    float *log_sums; /* (elements, heads): logarithms of the softmax's sums, to base 2; output, in the backward pass input */
    const float *gradient; /* (elements, heads * width), of `out`; of the backward pass, like all that follow */
    float *query_gradient, *key_gradient, *value_gradient; /* outputs, with strides of what they belong to */
} rayrec_list_attention;

/* Two vectors to multiply: `first` of those of a row's first set, `second` of its second. */
typedef struct {
    int32_t first;
    int32_t second;
} rayrec_pair;

/* Weighted sums of products of vectors: out[row, i] = bias[i] + sum over pairs p of weight[p, i] first[row, p.first]
 * second[row, p.second], value by value. The number of pairs is a multiple of 8 and `width` one of 16, with weights of 0 for those
 * that are none. */
typedef struct {
    const float *first; /* (rows, firsts, dim) */
    const float *second; /* (rows, seconds, dim) */
    const rayrec_pair *pairs; /* (count) */
    const float *weight; /* (count, width) */
    const float *bias; /* (width) */
    int64_t rows;
    int64_t firsts;
    int64_t seconds;
    int64_t dim;
    int64_t count;
    int64_t outputs;
    int64_t width;
    int64_t block_rows;
    float *out; /* (rows, outputs, dim); backward: its gradient */
    float *first_gradient; /* like `first` */
    float *second_gradient; /* like `second` */
    float *weight_gradient; /* (blocks, count, width), zeroed: sums over each block's rows */
} rayrec_products;

/* Decision trees with room for `splits` splits each. Nodes below `splits` are splits, and node splits + i is leaf i. */
typedef struct {
    const float *values; /* (rows, columns) */
    const int32_t *roots; /* (count): first node; a leaf if the tree has no split */
    const int32_t *column; /* (count, splits): column that a split compares, below `columns` */
    const float *threshold; /* (count, splits): values of at most this go left, larger ones and NaN right */
    const int32_t *left; /* (count, splits): node, larger than the split's number */
    const int32_t *right; /* (count, splits) */
    const double *value; /* (count, splits + 1): values of leaves */
    int64_t columns;
    int64_t count;
    int64_t splits;
    double *sums; /* (rows): output, sum of the row's leaves */
} rayrec_trees;

/* Values of a column in a row group of a Parquet file, stored as indices of a dictionary. All fields have 8 bytes. */
typedef struct {
    const uint8_t *data; /* bytes in the file */
    int64_t length;
    int64_t rows;
    int64_t max_bytes; /* of a decompressed page */
    int64_t codec; /* 0: none, 1: Snappy, 2: LZ4; others are not decoded */
    int64_t optional; /* whether values may be null */
    int64_t item_bytes; /* of numbers: 4 or 8; 0: text */
    int64_t state; /* output: 0, or -1 if the pages are others, or damaged */
    int64_t entries; /* output of rayrec_find_pages: values in the dictionary */
    int64_t dictionary_bytes; /* output of rayrec_find_pages, decompressed */
    int64_t page_bytes; /* output of rayrec_find_pages: of the largest decompressed page with indices */
    uint32_t *codes; /* (rows): output, the entry of each value, 0 for null; NULL: not wanted */
    uint8_t *valid; /* (rows bits), zeroed: output, bits of values that are not null; NULL if none may be null */
    void *values; /* output: numbers (rows), undefined for null, or the bytes of the dictionary's texts (dictionary_bytes) */
    int64_t *offsets; /* (entries + 1): output, places of the texts */
    int64_t nulls; /* output */
} rayrec_coded_chunk;

/* Kernel that computes items [start, stop) of its arguments. Returns 0, or 1 if out of memory. */
typedef int32_t rayrec_kernel(const void *arguments, int64_t start, int64_t stop);

/* Work for several threads, which share this struct. Threads take items by adding to `next` and set `failed`, both atomically
 * and without an order: items are independent, and the end of the parallel region makes all results visible to the caller. */
typedef struct {
    rayrec_kernel *kernel;
    const void *arguments;
    int64_t count;
    int64_t at_once; /* items that a thread takes at once */
    int64_t next; /* first item that no thread has taken, initially 0 */
    int32_t failed; /* whether the kernel returned 1 */
} rayrec_work;

/* Threads of a parallel region, which share this struct. Each takes a place by adding to `count` atomically and writes only
 * there; threads beyond `capacity` write nothing. */
typedef struct {
    int64_t *ids; /* (capacity): Linux thread ids */
    int64_t capacity;
    int64_t count; /* threads that have called, initially 0 */
} rayrec_team;

/* Row of a group, for sorting. */
typedef struct {
    uint64_t hash; /* of its group, unique */
    uint32_t falling; /* sort key of its score: rises as the score falls */
    uint32_t label; /* 0 or 1 */
} rayrec_ranked_row;

/* Sums over groups. Each sum has two values; the second is the rounding error of the first. */
typedef struct {
    const int64_t *ks; /* ranks of at least 1 */
    const double *discounts; /* (largest k + 1): sum of 1 / log2(rank + 1) over ranks 1 to k */
    double *room; /* (2 * num_ks) */
    double *sums; /* (4 + 6 * num_ks): AUROC times rows, reciprocal rank; then NDCG, recall, hits of each k */
    int64_t *counts; /* rows and groups of both classes, groups with positives */
    int64_t num_ks;
} rayrec_ranking;

int64_t rayrec_parse(const uint8_t *text, int64_t length, const rayrec_layout *layout, const rayrec_raw_rows *out,
                     int64_t *fault_counts, rayrec_fault *faults, int64_t max_faults, int64_t *num_faults);
int64_t rayrec_last_line_start(const uint8_t *text, int64_t length);

void rayrec_encode(const rayrec_raw_rows *raw, const rayrec_layout *layout, const int64_t *order, int64_t rows, int32_t bucketed,
                   const rayrec_dense_column *dense_columns, const rayrec_sparse_column *sparse_columns,
                   float *dense_out, void *ids_out, int64_t id_bytes, int64_t ids_stride);
void rayrec_bucket_integers(const int64_t *integers, int64_t count, uint32_t *out, int64_t columns, int64_t out_columns);
void rayrec_transform_dense(const int64_t *values, int64_t count, const rayrec_dense_column *column, float *out);

int64_t rayrec_count_rows(const void *tokens, int32_t token_bytes, const uint64_t *missing, int64_t rows, int64_t stride,
                          int32_t first_bit, int32_t columns, int64_t first_row, rayrec_counter *const *counters,
                          int64_t *absences);
int64_t rayrec_count_values(const void *tokens, int32_t token_bytes, const int64_t *amounts, const int64_t *rows,
                            int64_t shift_rows, int64_t count, rayrec_counter *counter);
void rayrec_count_move(const rayrec_counter *from, rayrec_counter *to);
int64_t rayrec_count_items(const rayrec_counter *counter, int64_t min_count, int32_t token_bytes, int32_t partition_bits,
                           int64_t *offsets, void *tokens, int64_t *counts, int64_t *rows);
int64_t rayrec_select_partition(void *tokens, int32_t token_bytes, int64_t *counts, int64_t *rows, int64_t count,
                                int32_t partition_bits, int64_t partition);
int64_t rayrec_num_small_logs(void);
void rayrec_small_logs(double units, int32_t *out);
void rayrec_dense_moments(const int64_t *integers, const uint64_t *missing, int64_t rows, int32_t columns, double units,
                          int32_t low_bits, const int32_t *small, int64_t *moments);
int64_t rayrec_exact_sums(const double *values, int64_t count, uint64_t *bins, double *range);

int32_t rayrec_build_slots(const void *tokens, int32_t token_bytes, const int32_t *ids, int64_t count, uint64_t *table,
                           int64_t slots);
void rayrec_look_up(const void *tokens, int32_t token_bytes, int64_t count, const uint64_t *table, int64_t slots,
                    int32_t unknown_id, int32_t *out);

/* events.c */
void rayrec_take_ranges(const uint8_t *values, int64_t item_bytes, const int64_t *starts, const int64_t *lengths, int64_t ranges,
                        uint8_t *out);
void rayrec_count_partitions(const uint64_t *keys, int64_t events, int64_t partitions, int64_t *counts);
void rayrec_partition_events(const uint64_t *const *columns, int64_t width, int64_t events, int64_t partitions, int64_t *ends,
                             int64_t first, uint64_t *out, int64_t *sources);
void rayrec_distinct_values(const uint64_t *rows, int64_t width, int64_t column, const int64_t *starts, int64_t partitions,
                            uint32_t *slots, uint64_t *values, int64_t *out, int64_t *ends);
void rayrec_sort_events(int64_t *rows, int64_t *room, int64_t events, int64_t width, int64_t by, int64_t partition,
                        int64_t partitions, int64_t buckets, int64_t *ends);

/* parquet.c */
int32_t rayrec_decompress(int64_t codec, const uint8_t *data, int64_t length, uint8_t *out, int64_t bytes);
void rayrec_find_pages(rayrec_coded_chunk *chunks, int64_t count);
void rayrec_decode_chunks(rayrec_coded_chunk *chunks, int64_t count, uint8_t *room);

/* side_tables.c: key index of a side table. Slots are a power of two, at least twice the keys and at least 2. */
int64_t rayrec_build_key_slots(const uint64_t *keys, int64_t num_keys, uint32_t *slots, int64_t num_slots, int64_t *pair);
void rayrec_find_keys(const uint64_t *tokens, const uint8_t *missing, int64_t count, const uint64_t *keys, int64_t num_keys,
                      const uint32_t *slots, int64_t num_slots, int64_t *out);
void rayrec_newest_rows(const int64_t *at, int64_t count, const int64_t *starts, const int64_t *times, const int64_t *rows,
                        int64_t num_rows, int64_t *found);

void rayrec_expand_bags(const void *ids, int64_t rows, int64_t id_bytes, int64_t size, int64_t num_embeddings,
                        uint64_t seed, int64_t column, int32_t pareto, void *out);

int64_t rayrec_pool_tables(const rayrec_lookup *lookups, int64_t columns, int64_t rows, int64_t dim, int32_t kind,
                           float *out);

void rayrec_join_ranges(const uint8_t *const *starts, const int64_t *bytes, int64_t ranges, uint8_t *out);
void rayrec_gather_rows(const rayrec_runs *runs, const int64_t *order, int64_t rows, int64_t columns, int64_t item_bytes,
                        int32_t transposed, void *out);
void rayrec_unpack_rows(const rayrec_runs *runs, const int64_t *order, int64_t rows, int32_t num_dense, int32_t num_sparse,
                        const rayrec_dense_column *columns, float *dense, int32_t *ids, float *labels);
int64_t rayrec_pack_rows(const int64_t *integers, const int64_t *lowest, const void *ids, int64_t id_bytes,
                         const float *labels, int64_t rows, int32_t num_dense, int32_t num_sparse, int32_t *out);

/* text_features.c: functions of texts and lists. Text i is data[offsets[i], offsets[i + 1]); data is void where integers may take
 * the place of texts, with NULL offsets. Row r has the items starts[r] to starts[r] + lengths[r] - 1. */
int64_t rayrec_text_runs(const int64_t *offsets, const uint8_t *data, int64_t count, const uint8_t *separators, int64_t *lengths,
                         int64_t *ends, uint8_t *runs_data);
void rayrec_bucketize(const double *values, int64_t count, const double *edges, int64_t num_edges, int64_t *out);
void rayrec_join_texts(const int64_t *offsets0, const void *data0, const int64_t *offsets1, const void *data1,
                       const int64_t *offsets2, const void *data2, int64_t mark, int64_t rows, int64_t *ends, uint8_t *out);
void rayrec_count_equal(const int64_t *item_offsets, const void *item_data, const int64_t *starts, const int64_t *lengths,
                        const int64_t *offsets, const void *data, int64_t rows, double *out);
void rayrec_count_common(const int64_t *left_offsets, const void *left_data, const int64_t *left_starts,
                         const int64_t *left_lengths, const int64_t *right_offsets, const void *right_data,
                         const int64_t *right_starts, const int64_t *right_lengths, int64_t rows, uint32_t *slots, double *out);

/* Status of one value in a text column. Value i is data[offsets[i], offsets[i + 1]), empty if null[i] is set (`null` may be
 * NULL). */
enum rayrec_text_status { TEXT_VALUE, TEXT_EMPTY, TEXT_REFUSED, TEXT_LONG };
/* Status of `rayrec_text_kinds`, in addition. */
enum rayrec_text_kind { TEXT_TRUE = 4, TEXT_FALSE };

void rayrec_text_tokens(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint64_t *out,
                        uint8_t *status);
void rayrec_plain_text_tokens(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count,
                              uint64_t *out, uint8_t *status);
void rayrec_coded_tokens(const int32_t *codes, const uint8_t *valid, int64_t first, int64_t count, const uint64_t *tokens,
                         const uint8_t *statuses, uint64_t *out, uint8_t *status);
void rayrec_present_words(const uint64_t *values, const uint8_t *valid, int64_t first, int64_t count, uint64_t *out,
                          uint8_t *status);
void rayrec_text_kinds(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint8_t *kinds);
void rayrec_text_whole(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint64_t *out,
                       uint8_t *status);

/* Bytes [start, start + length) of a text. */
typedef struct {
    uint32_t start;
    uint32_t length;
} rayrec_field;

int64_t rayrec_split_csv(uint8_t *text, int64_t length, int32_t final, const uint8_t *delimiter, int64_t delimiter_bytes,
                         int32_t escape, int32_t trim, int64_t max_bytes, int64_t max_lines, int32_t columns,
                         const int32_t *places, int32_t kept, int64_t capacity, rayrec_field *fields, uint8_t *kinds,
                         int64_t *consumed);
void rayrec_text_sizes(const rayrec_field *fields, int64_t rows, int32_t kept, int64_t *sizes);
void rayrec_gather_text(const uint8_t *text, int64_t length, const rayrec_field *fields, int64_t rows, int32_t kept,
                        const int64_t *starts, int64_t *offsets, uint8_t *data);
/* What a value of JSON is. Must match the kinds in data/json_rows.py. */
enum rayrec_json_kind {
    JSON_ABSENT,
    JSON_NULL = 1,
    JSON_STRING = 2,
    JSON_INTEGER = 4,
    JSON_DECIMAL = 8, /* a number with a fraction or an exponent */
    JSON_BOOLEAN = 16
};

int64_t rayrec_split_json(uint8_t *text, int64_t length, const uint8_t *names, const int64_t *offsets, int32_t num_names,
                          int32_t *follows, int64_t capacity, rayrec_field *fields, uint8_t *kinds);
int64_t rayrec_join_fields(const uint8_t *text, const rayrec_field *fields, int64_t rows, int32_t columns, uint8_t *out);

void rayrec_check_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint8_t *status);
void rayrec_text_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, double *out,
                         uint8_t *status);
int64_t rayrec_are_short_numbers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count);
void rayrec_text_integers(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, int64_t *out,
                          uint8_t *status);
void rayrec_text_hexadecimal(const int64_t *offsets, const uint8_t *data, const uint8_t *null, int64_t count, uint32_t *out,
                             uint8_t *status);

/* checksum.c: checksum of `length` bytes, from 0 to 2^63 - 1. */
int64_t rayrec_checksum(const uint8_t *data, int64_t length);

/* table_training.c: arguments are an array of rayrec_gathered_table, and one of rayrec_adam_rows. */
rayrec_kernel rayrec_gather_row_gradients, rayrec_update_by_adam;

/* dots.c: arguments are a rayrec_dots, items its rows. */
rayrec_kernel rayrec_pairwise_dots, rayrec_pairwise_dots_backward;
#if defined(__x86_64__) /* for CPUs with AVX2 and FMA, and for those that also have AVX-512 F, BW, DQ and VL */
rayrec_kernel rayrec_pairwise_dots_avx2, rayrec_pairwise_dots_backward_avx2, rayrec_relu_backward_avx2;
rayrec_kernel rayrec_pairwise_dots_avx512, rayrec_pairwise_dots_backward_avx512, rayrec_relu_backward_avx512;
rayrec_kernel rayrec_attend_lists_avx2, rayrec_attend_lists_backward_avx2, rayrec_drop_values_avx2, rayrec_exponents_of_rows_avx2;
rayrec_kernel rayrec_attend_lists_avx512, rayrec_attend_lists_backward_avx512, rayrec_drop_values_avx512;
rayrec_kernel rayrec_exponents_of_rows_avx512;
rayrec_kernel rayrec_sum_products_avx2, rayrec_sum_products_backward_avx2;
rayrec_kernel rayrec_sum_products_avx512, rayrec_sum_products_backward_avx512;
#endif

/* relu.c: arguments are a rayrec_relu, items its blocks. */
rayrec_kernel rayrec_relu_backward;

/* list_attention.c: arguments are a rayrec_list_attention, items its lists times heads. */
rayrec_kernel rayrec_attend_lists, rayrec_attend_lists_backward;

/* dropout.c: arguments are a rayrec_dropped_values, items its blocks. */
rayrec_kernel rayrec_drop_values;

/* exponents.c: arguments are a rayrec_exponents, items its rows. */
rayrec_kernel rayrec_exponents_of_rows;

/* products.c: arguments are a rayrec_products, items its blocks of rows. */
rayrec_kernel rayrec_sum_products, rayrec_sum_products_backward;

/* trees.c: arguments are a rayrec_trees, items its rows. */
rayrec_kernel rayrec_sum_trees;

/* threads.c: called by each thread with the same rayrec_work. Returns once all items are taken. */
void rayrec_take_part(void *work);

/* threads.c: called once by each thread with the same rayrec_team; adds the thread to its ids if there is room. */
void rayrec_add_thread_id(void *team);

/* ranking.c: partitions rows by group into 2^bits parts (bits from 0 to 62), without rows of group 0; part i is
 * out[starts[i]] to out[starts[i + 1] - 1]. Then ranks the groups of a part; `room` has as many rows, and both are overwritten. */
void rayrec_rank_partition(const int64_t *groups, const float *scores, const uint8_t *labels, int64_t rows, int32_t bits,
                           int64_t *starts, rayrec_ranked_row *out);
void rayrec_rank_rows(rayrec_ranked_row *rows, rayrec_ranked_row *room, int64_t count, const rayrec_ranking *ranking);

/* Writes columns of a click log as tab-separated text.
 *
 * Dense column d of row i is dense[d * stride + i], sparse column s is tokens[s * stride + i]. Bit d of missing[i] empties dense
 * column d, bit num_dense + s sparse column s. Writes "label\tdense...\ttokens...\n" per row, tokens as 8 lowercase hex digits.
 * Returns the bytes written, or -1 if the text exceeds `capacity`, beyond which nothing is written, or for invalid arguments. */
int64_t rayrec_format_rows(const uint8_t *labels, const int32_t *dense, const uint32_t *tokens, const uint64_t *missing,
                           int64_t rows, int64_t stride, int32_t num_dense, int32_t num_sparse, uint8_t *out,
                           int64_t capacity);

#endif
