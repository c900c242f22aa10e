// What kernels need of CUDA, as C++ has it: a block's threads are coroutines that take turns at barriers and shuffles,
// and so are those of blocks that wait for each other, which a cluster's or the whole grid's do. Such kernels have dynamic
// shared memory alone, a block its own. What is wrong with a launch is kept in `wrong`.
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
#define __cluster_dims__(...)
#define __grid_constant__
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
static unsigned __byte_perm(unsigned a, unsigned b, unsigned order) {  // byte i of the result: byte order[i] of b, a
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned made = 0;
  for (int i = 0; i < 4; i++) made |= (unsigned)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
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
#define __popc __builtin_popcount
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
// A thread's place in the code while others run. ucontext's switches would each ask the kernel for signal masks.
// Blocks that wait for each other are there at once. Of a block's waiting, rounds and votes the first is its own, the
// others are its warps' and, at last, those that it has names for.
enum { BLOCKS = 8, THREADS = 1024, GROUPS = 1 + THREADS / 32 + 16, ALL = BLOCKS * THREADS };
static jmp_buf places[ALL], scheduler;
static char stacks[ALL][1 << 16];
static bool ended[ALL];
static float lanes[ALL];
static int waiting[BLOCKS][GROUPS], rounds[BLOCKS][GROUPS];
static unsigned votes[BLOCKS][GROUPS];
alignas(1024) static float dynamic[BLOCKS][1 << 16];
static int current, running, made, cluster[2];
static unsigned room;  // bytes of it that a block has
static bool apart;     // whether warps go at paces of their own
static unsigned turn, moved;  // the last turn in which a wait ended
static const char* wrong;
static void (*body)(void**);
static void** arguments;
static int here() { return current / blockDim.x; }
static int warp() { return 1 + threadIdx.x / 32; }
static void others() { if (!_setjmp(places[current])) _longjmp(scheduler, 1); }
static void come(int group, int members) {
  int block = here();
  if (++waiting[block][group] == members) { waiting[block][group] = 0, moved = turn, rounds[block][group]++; }
}
static void barrier(int group, int members) {
  int& round = rounds[here()][group], now = round;
  come(group, members);
  while (round == now) others();
}
static void tell_others();
static void __syncthreads() { tell_others(), barrier(0, blockDim.x); }
static float __shfl_xor_sync(unsigned, float v, int offset) {
  int me = current;
  lanes[me] = v;
  barrier(warp(), 32);
  float theirs = lanes[me - threadIdx.x + (threadIdx.x ^ offset)];
  barrier(warp(), 32);
  return theirs;
}
static unsigned __shfl_xor_sync(unsigned all, unsigned v, int offset) {
  return __float_as_uint(__shfl_xor_sync(all, __uint_as_float(v), offset));
}
// The value of the thread `to` of the warp.
static float __shfl_sync(unsigned all, float v, int to) { return __shfl_xor_sync(all, v, threadIdx.x % 32 ^ to); }
static unsigned __shfl_sync(unsigned all, unsigned v, int to) { return __shfl_xor_sync(all, v, threadIdx.x % 32 ^ to); }
// That of the thread `by` before this one, its own for the first.
static float __shfl_up_sync(unsigned all, float v, int by) {
  int lane = threadIdx.x % 32;
  return __shfl_sync(all, v, lane < by ? lane : lane - by);
}
static unsigned __shfl_up_sync(unsigned all, unsigned v, int by) {
  return __float_as_uint(__shfl_up_sync(all, __uint_as_float(v), by));
}
static unsigned atomicAdd(unsigned* to, unsigned v) { return (*to += v) - v; }
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
static bool __any_sync(unsigned, bool v) { return sum_of(v, warp(), 32); }
static void __syncwarp() { barrier(warp(), 32); }
static bool __syncthreads_or(bool v) { return sum_of(v, 0, blockDim.x); }
static void end_of_thread();
static int left_in[BLOCKS];  // threads that have not ended
static void thread() {
  for (;;) {
    others();
    body(arguments);
    end_of_thread();
    ended[current] = true, moved = turn, running--;
    if (!--left_in[here()]) memset(dynamic[here()], 0xff, sizeof dynamic[0]);  // no block has it any more
  }
}
static void resume() { if (!_setjmp(scheduler)) _longjmp(places[current], 1); }
static void make() {
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = stacks[current];
  begin.uc_stack.ss_size = sizeof stacks[current];
  makecontext(&begin, thread, 0);
  if (!_setjmp(scheduler)) setcontext(&begin);
}
static unsigned drawn(unsigned a, unsigned b) { return (a * 2654435761u ^ (b + 1) * 2246822519u) * 3266489917u >> 20; }
static void begin_of_blocks(int count), meanwhile(), end_of_blocks();
// The threads of a cluster, or of a block that needs none, whose first block is `first`.
static void blocks(Place first, int threads, bool together) {
  if (!together) {
    blockIdx = first;
    for (int t = 0; t < threads; t++) { threadIdx = {(unsigned)t, 0, 0}; body(arguments); }
    return;
  }
  int count = cluster[0] * cluster[1], all = count * threads;
  if (all > ALL) abort();
  for (; made < all; made++) { current = made; make(); }
  memset(ended, 0, sizeof ended);
  memset(waiting, 0, sizeof waiting);
  begin_of_blocks(count);
  for (int block = 0; block < count; block++) left_in[block] = threads;
  running = all;
  for (turn = moved = 0; running; turn++, meanwhile()) {
    if (turn - moved > 5000) { wrong = "threads wait for ever", made = 0; break; }
    for (current = 0; current < all; current++) {
      unsigned block = current / threads;
      if (ended[current] || (count > 1 && drawn(turn, block) % 3)) continue;  // each block at a pace of its own
      if (apart && drawn(turn, 99 + current / 32) % 2) continue;
      threadIdx.x = current % threads;
      blockIdx = {first.x + block % cluster[0], first.y + block / cluster[0], first.z};
      resume();
    }
  }
  end_of_blocks();
}
// Of a grid of shape[0] x shape[1] x shape[2] in clusters of shape[3] x shape[4], a block having shape[5] threads and
// shape[6] bytes; what is wrong with it, or null.
static const char* launch(const int* shape, void (*kernel)(void**), void** a, bool together) {
  body = kernel, arguments = a, wrong = nullptr, apart = false;
  gridDim = {(unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2]};
  blockDim = {(unsigned)shape[5], 1, 1};
  cluster[0] = shape[3], cluster[1] = shape[4], room = shape[6];
  for (unsigned z = 0; z < gridDim.z; z++)
    for (unsigned y = 0; y < gridDim.y; y += cluster[1])
      for (unsigned x = 0; x < gridDim.x; x += cluster[0]) blocks({x, y, z}, shape[5], together);
  return wrong;
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
