// A whole-number index, as CuPy reads it: one that is out of range wraps around.
#pragma once

// The test is what nearly every index needs; a remainder in 64 bits costs some hundred instructions.
__device__ __forceinline__ int wrapped(long long i, int rows) {
  if ((unsigned long long)i < (unsigned long long)rows) return (int)i;
  const int rest = (int)(i % rows);
  return rest < 0 ? rest + rows : rest;
}
