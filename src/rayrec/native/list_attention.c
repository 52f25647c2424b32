/* Attention within lists that lie one after the other, without padding, and its gradients. */
#include "lanes.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static const float LOG2_E = 1.44269504f;

static int64_t up_to_multiple(int64_t value, int64_t of) { return (value + of - 1) / of * of; }

#define BODY "list_attention_body.h"
#include "each_cpu.h"
