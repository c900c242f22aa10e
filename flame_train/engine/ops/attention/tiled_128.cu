// Attention for heads of at most 128.
#define HEAD 128
#include "ops/attention/tiled.cuh"
