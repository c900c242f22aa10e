// Philox4x32-10, bit for bit that of engine/random.py: the four words of the counter c0 to c3, whose low word is the block.
#pragma once

// A seed's key of each round. As a kernel's argument it takes no registers.
struct Keys {
  unsigned even[10], odd[10];
};
__device__ __forceinline__ Keys keys_of(long long seed) {
  Keys keys = {{(unsigned)seed}, {(unsigned)(seed >> 32)}};
#pragma unroll
  for (int i = 1; i < 10; i++) keys.even[i] = keys.even[i - 1] + 0x9E3779B9u, keys.odd[i] = keys.odd[i - 1] + 0xBB67AE85u;
  return keys;
}

__device__ __forceinline__ uint4 philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, const Keys& keys) {
#pragma unroll
  for (int i = 0; i < 10; i++) {
    unsigned long long p0 = c0 * 0xD2511F53ull, p1 = c2 * 0xCD9E8D57ull;
    c0 = (unsigned)(p1 >> 32) ^ c1 ^ keys.even[i];
    c1 = (unsigned)p1;
    c2 = (unsigned)(p0 >> 32) ^ c3 ^ keys.odd[i];
    c3 = (unsigned)p0;
  }
  return make_uint4(c0, c1, c2, c3);
}
