/* The backward pass of a ReLU, with what the layer before it needs of its result. */
#include "kernels.h"
#include "vectors.h"

/* Rows and columns that are taken at once: transposed, a row of such a tile fills a cache line. */
enum { TILE = 16 };

#define BODY "relu_body.h"
#include "each_cpu.h"
