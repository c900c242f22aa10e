// Attention with dropout for heads of at most 64.
#define HEAD 64
#include "ops/attention/mma_forward.cuh"
#include "ops/attention/mma_gradients.cuh"
