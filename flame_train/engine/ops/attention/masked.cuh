// What edges, causality and a mask make of a score, of any kind of problem that names them.
#pragma once
#include "backend/cuda/common.cuh"

#define INF __int_as_float(0x7f800000)

// A score after edges, causality and mask; `at` is where the head's mask begins
template <typename P> __device__ __forceinline__ float masked(const P& p, float s, long long at, int query, int key) {
  bool seen = query < p.L && key < p.S && !(p.causal && key > query);
  at += query * p.mask_query + key * p.mask_key;
  if (p.masked == 1) seen = seen && static_cast<const bool*>(p.mask)[at];
  if (p.masked == 2 && seen) s += to_float(static_cast<const T*>(p.mask)[at]);
  return seen ? s : -INF;
}
