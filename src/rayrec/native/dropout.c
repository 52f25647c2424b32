/* Dropout of values, and of their gradients by the same random numbers. */
#include "lanes.h"

#define BODY "dropout_body.h"
#include "each_cpu.h"
