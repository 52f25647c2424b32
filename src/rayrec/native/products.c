/* Weighted sums of products of a row's vectors, and their gradients: layers of xDeepFM's interaction. */
#include "kernels.h"
#include "vectors.h"

#include <stdlib.h>
#include <string.h>

#define BODY "products_body.h"
#include "each_cpu.h"
