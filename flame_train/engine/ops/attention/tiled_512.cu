// Attention for heads of at most 512.
#define HEAD 512
#include "ops/attention/tiled.cuh"
