/* Exponents of a softmax over long rows, whose sums need one more pass over a row while it is in cache. */
#include "lanes.h"

#include <float.h>

#define BODY "exponents_body.h"
#include "each_cpu.h"
