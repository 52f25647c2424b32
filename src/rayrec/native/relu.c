/* Backward pass of a ReLU, with the sums and the transpose that the preceding layer needs. */
#include "kernels.h"
#include "vectors.h"

/* Rows and columns of a tile: its transposed row fills a cache line. */
enum { TILE = 16 };

#define BODY "relu_body.h"
#include "each_cpu.h"
