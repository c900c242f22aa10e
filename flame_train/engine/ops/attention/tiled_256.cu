// Attention for heads of at most 256.
#define HEAD 256
#include "ops/attention/tiled.cuh"
