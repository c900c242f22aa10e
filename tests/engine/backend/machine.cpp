// What kernels need of CUDA, as C++ has it: a block's threads are coroutines that take turns at barriers and shuffles,
// and so are those of blocks that wait for each other. Such kernels have dynamic shared memory alone, a block its own.
#include <cmath>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static const
using std::isfinite;
struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;
template <typename N> static N min(N a, N b) { return b < a ? b : a; }
template <typename N> static N max(N a, N b) { return a < b ? b : a; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#define ROUNDED(name, text) \
  static float __f##name##_rn(float a, float b) { return text; } \
  static double __d##name##_rn(double a, double b) { return text; }
ROUNDED(add, a + b)
ROUNDED(sub, a - b)
ROUNDED(mul, a * b)
ROUNDED(div, a / b)
static float __fsqrt_rn(float a) { return sqrtf(a); }
static double __dsqrt_rn(double a) { return sqrt(a); }
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf
#define __ffs __builtin_ffs
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
// A thread's place in the code while others run. ucontext's switches would each ask the kernel for signal masks.
// Blocks that wait for each other are there at once. Of a block's waiting, rounds and votes the first is its own, the
// others are its warps'.
enum { BLOCKS = 6, THREADS = 1024, GROUPS = 1 + THREADS / 32, ALL = BLOCKS * THREADS };
static jmp_buf places[ALL], scheduler;
static char stacks[ALL][1 << 16];
static bool ended[ALL];
static float lanes[ALL];
static int waiting[BLOCKS][GROUPS], rounds[BLOCKS][GROUPS];
static unsigned votes[BLOCKS][GROUPS];
static float dynamic[BLOCKS][58112];
static int current, running, made;
static void (*body)(void**);
static void** arguments;
static int here() { return current / blockDim.x; }
static int warp() { return 1 + threadIdx.x / 32; }
static void others() { if (!_setjmp(places[current])) _longjmp(scheduler, 1); }
static void barrier(int group, int members) {
  int block = here(), round = rounds[block][group];
  if (++waiting[block][group] == members) { waiting[block][group] = 0; rounds[block][group]++; }
  while (rounds[block][group] == round) others();
}
static void __syncthreads() { barrier(0, blockDim.x); }
static float __shfl_xor_sync(unsigned, float v, int offset) {
  int me = current;
  lanes[me] = v;
  barrier(warp(), 32);
  float theirs = lanes[me - threadIdx.x + (threadIdx.x ^ offset)];
  barrier(warp(), 32);
  return theirs;
}
static unsigned sum_of(unsigned v, int group, int members) {
  unsigned& all = votes[here()][group];
  all += v;
  barrier(group, members);
  unsigned sum = all;
  barrier(group, members);
  all -= v;
  return sum;
}
static unsigned __ballot_sync(unsigned, bool v) { return sum_of((unsigned)v << threadIdx.x % 32, warp(), 32); }
static bool __syncthreads_or(bool v) { return sum_of(v, 0, blockDim.x); }
static void thread() { for (;;) { others(); body(arguments); ended[current] = true; running--; } }
static void resume() { if (!_setjmp(scheduler)) _longjmp(places[current], 1); }
static void make() {
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = stacks[current];
  begin.uc_stack.ss_size = sizeof stacks[current];
  makecontext(&begin, thread, 0);
  if (!_setjmp(scheduler)) setcontext(&begin);
}
static unsigned came_before(unsigned* counter, unsigned top) {
  unsigned before = *counter;
  *counter = before < top ? before + 1 : 0;
  return before;
}
static void all_here(unsigned* barrier) {
  __syncthreads();
  if (threadIdx.x == 0 && gridDim.x > 1) {
    unsigned before = *barrier;
    *barrier += blockIdx.x ? 1u : 0x80000000u - (gridDim.x - 1);
    while (!((before ^ *barrier) & 0x80000000u)) others();
  }
  __syncthreads();
}
static unsigned drawn(unsigned a, unsigned b) { return (a * 2654435761u ^ (b + 1) * 2246822519u) * 3266489917u >> 20; }
// Some copies are there at once, the others not before they are waited for.
struct Copy { void* to; const void* from; size_t bytes; unsigned group; };
static std::deque<Copy> copies[ALL];
static unsigned groups_ended[ALL];
template <typename P> static void copy_async(P* to, const P* from) {
  static unsigned asked;
  if (drawn(asked++, 7) % 3) copies[current].push_back({to, from, sizeof(P), groups_ended[current]});
  else *to = *from;
}
static void copies_end() { groups_ended[current]++; }
template <int LEFT> static void copies_wait() {
  std::deque<Copy>& all = copies[current];
  for (; !all.empty() && (int)(groups_ended[current] - all[0].group) > LEFT; all.pop_front())
    memcpy(all[0].to, all[0].from, all[0].bytes);
}
static void blocks(int count, int threads, bool together) {
  if (!together) {
    for (int t = 0; t < threads; t++) { threadIdx = {(unsigned)t, 0, 0}; body(arguments); }
    return;
  }
  int all = count * threads;
  if (all > ALL) abort();
  for (; made < all; made++) { current = made; make(); }
  memset(ended, 0, sizeof ended);
  running = all;
  for (unsigned turn = 0; running; turn++)
    for (current = 0; current < all; current++) {
      unsigned block = current / threads;
      if (ended[current] || (count > 1 && drawn(turn, block) % 3)) continue;  // each block at a pace of its own
      threadIdx.x = current % threads;
      if (count > 1) blockIdx = {block % gridDim.x, block / gridDim.x, 0};
      resume();
    }
}
static void launch(const int* grid, int threads, void (*kernel)(void**), void** a, bool together, bool resident) {
  body = kernel, arguments = a;
  gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
  blockDim = {(unsigned)threads, 1, 1};
  if (resident) return blocks(grid[0] * grid[1], threads, together);
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x++) {
        blockIdx = {(unsigned)x, (unsigned)y, (unsigned)z};
        blocks(1, threads, together);
      }
}

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
static float to_float(float x) { return x; }
static float to_float(bool x) { return x ? 1.f : 0.f; }
static float to_float(int x) { return (float)x; }
static float to_float(long long x) { return (float)x; }
static float to_float(bf16 x) { unsigned u = (unsigned)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
static void from_float(float x, float& y) { y = x; }
static void from_float(float x, bool& y) { y = x != 0.f; }
static void from_float(float x, long long& y) { y = (long long)x; }
static void from_float(float x, bf16& y) {
  unsigned u; memcpy(&u, &x, 4);
  y.bits = x != x ? 0x7fff : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
template <typename S> static void from_two(float a, float b, S* y) { from_float(a, y[0]); from_float(b, y[1]); }
