// Attention for heads of at most 64.
#define HEAD 64
#include "ops/attention/tiled.cuh"
