// Attention with dropout for heads of at most 128.
#define HEAD 128
#include "ops/attention/mma_forward.cuh"
#include "ops/attention/mma_gradients.cuh"
