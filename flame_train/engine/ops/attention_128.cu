// Attention for heads of at most 128.
#define HEAD 128
#include "attention.cuh"
