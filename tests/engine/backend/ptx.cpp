// Instructions over machine.cpp, each by its name in PTX and with its operands in PTX's order.
//
// What is asked for is done as late as it may be, or at once, as drawn: a tile lands while others run, and its place holds
// NaN until then; a tile leaves when it must have been read; products read what lies in shared memory, and write their sums,
// a warp at a time and when they are waited for. So a wait or a barrier that is missing shows in the values. Shared memory's
// addresses are 18 bits of place, above them the block of the cluster.
#include <algorithm>
#include <functional>
#include <vector>
typedef unsigned u32;
typedef unsigned long long u64;
enum { PLACE = 18, NAMED = 16 };
static unsigned char* window(u32 at, u32 bytes) {
  static unsigned char nowhere[1 << PLACE];
  u32 block = at >> PLACE, place = at & ((1 << PLACE) - 1);
  if (place + bytes > room) { wrong = "shared memory is read or written beyond its end"; return nowhere; }
  return reinterpret_cast<unsigned char*>(dynamic[block]) + place;
}
static u32 of_block(u32 at, u32 block) { return (at & ((1 << PLACE) - 1)) | block << PLACE; }
static u32 own(u32 at) { return of_block(at, here()); }
template <typename P> static u32 __cvta_generic_to_shared(P* p) {
  return (const unsigned char*)p - reinterpret_cast<unsigned char*>(dynamic[here()]);
}

// Blocks that count as they come, and wait for each other.
static void atom_acq_rel_gpu_global_inc_u32(u32& before, u32* counter, u32 top) {
  before = *counter;
  *counter = before < top ? before + 1 : 0;
}
static void atom_add_release_gpu_global_u32(u32& before, u32* counter, u32 more) { before = *counter, *counter += more; }
static void ld_acquire_gpu_global_u32(u32& now, u32* counter) {
  others();
  now = *counter;
}

// Copies that a thread waits for by groups of its own.
struct Copy { u32 to; const void* from; int group; };
static std::deque<Copy> copies[ALL];
static int groups_ended[ALL];
static unsigned asked;
static void cp_async_cg_shared_global(u32 to, const void* from, int bytes) {
  to = own(to);
  if (drawn(asked++, 7) % 3) copies[current].push_back({to, from, groups_ended[current]});
  else memcpy(window(to, bytes), from, bytes);
}
static void cp_async_cg_shared_global(u32 to, const void* from, int bytes, int there) {
  static const unsigned char zeros[16] = {};
  cp_async_cg_shared_global(to, there ? from : zeros, bytes);
}
static void cp_async_commit_group() { apart = true, groups_ended[current]++; }
static void cp_async_wait_group(int left) {
  std::deque<Copy>& all = copies[current];
  for (; !all.empty() && groups_ended[current] - all[0].group > left; all.pop_front())
    memcpy(window(all[0].to, 16), all[0].from, 16);
}

// Barriers that count arrivals and bytes. What comes for one use of it comes at once, by and by, or late, as drawn.
enum When { AT_ONCE, BY_AND_BY, LATE };
struct Barrier { unsigned char begun, arrivals, pending, phase : 1, when : 2; int bytes; };
static Barrier& barrier_at(u32 at) {
  Barrier& b = *reinterpret_cast<Barrier*>(window(at, sizeof(Barrier)));
  if (b.begun != 1) wrong = "a barrier is used that has not begun";
  return b;
}
static void settle(Barrier& b) {
  if (!b.pending && !b.bytes) moved = turn, b.phase ^= 1, b.pending = b.arrivals;
}
static void arrive(Barrier& b, int bytes) {
  if (!b.pending) wrong = "more arrive at a barrier than it expects";
  b.bytes += bytes, b.pending--;
  settle(b);
}
static void mbarrier_init_shared_cta_b64(u32 at, u32 arrivals) {
  apart = true;
  *reinterpret_cast<Barrier*>(window(own(at), sizeof(Barrier))) = {1, (unsigned char)arrivals, (unsigned char)arrivals, 0, 0, 0};
}
static void fence_mbarrier_init_release_cluster() {}
static void mbarrier_arrive_expect_tx_shared_cta_b64(u32 at, u32 bytes) {
  Barrier& b = barrier_at(own(at));
  b.when = drawn(asked++, 3) % 3;
  arrive(b, bytes);
}
static void mbarrier_arrive_shared_cta_b64(u32 at) { arrive(barrier_at(own(at)), 0); }
static void mapa_shared_cluster_u32_and_mbarrier_arrive_shared_cluster_b64(u32 at, u32 block) {
  arrive(barrier_at(of_block(at, block)), 0);
}
static void mbarrier_try_wait_parity_shared_cta_b64(u32 at, u32 parity) {
  while (barrier_at(own(at)).phase == (parity & 1)) others();
}
// What stmatrix has written is read by senders and products, to which a fence has to show it before others are told.
static bool unshown[ALL];
static void fence_proxy_async_shared_cta() { unshown[current] = false; }
static void tell_others() {
  if (unshown[current]) wrong = "what was written is not shown to what sends it or multiplies";
}
static void bar_sync(u32 name, int members) { tell_others(), barrier(GROUPS - NAMED + name, members); }
static void bar_arrive(u32 name, int members) { come(GROUPS - NAMED + name, members); }
static int in_cluster, cluster_rounds;
static void barrier_cluster_arrive_release_aligned_and_barrier_cluster_wait_acquire_aligned() {
  int now = cluster_rounds;
  if (++in_cluster == (int)(cluster[0] * cluster[1] * blockDim.x)) in_cluster = 0, moved = turn, cluster_rounds++;
  while (now == cluster_rounds) others();
}

// Tiles by descriptor. What is not there comes as zeros and is not written.
// Bytes are described as pairs, and `narrow`: the first coordinate counts bytes.
struct Described { u64 at; unsigned short rank, narrow; u32 swizzle; u64 sizes[4], strides[3], box[4]; };
static u32 swizzled(u32 at, u32 swizzle) { return at ^ ((at >> 7 & ((1 << swizzle) - 1)) << 4); }
template <typename F> static void each_element(const Described& map, const int* first, u32 to, F f) {
  u32 count = 1, bytes = 2;
  for (u32 d = 0; d < map.rank; d++) count *= map.box[d];
  for (u32 i = 0; i < count; i++, to += bytes) {
    u64 rest = i, from = map.at;
    bool there = true;
    for (u32 d = 0; d < map.rank; d++) {
      int place = first[d] + (int)(rest % map.box[d]);
      there &= place >= 0 && place < (int)map.sizes[d];
      from += place * (d ? map.strides[d - 1] : bytes), rest /= map.box[d];
    }
    f(reinterpret_cast<unsigned short*>(there ? from : 0), swizzled(to, map.swizzle));
  }
}
static int bytes_of(const Described& map) {
  int bytes = 2;
  for (u32 d = 0; d < map.rank; d++) bytes *= map.box[d];
  return bytes;
}
static std::vector<std::function<void()>> coming, late;
static std::deque<std::function<void()>> leaving[ALL];
static void come_later(u32 to, u32 bytes, u32 barrier, std::function<void()> land) {
  memset(window(to, bytes), 0xff, bytes);
  unsigned when = barrier_at(barrier).when;
  if (when == AT_ONCE) land();
  else (when == LATE ? late : coming).push_back(land);
}
static void told(u32 barrier, int bytes) {
  Barrier& b = barrier_at(barrier);
  b.bytes -= bytes;
  settle(b);
}
template <int RANK> static void fetch_tile(u32 to, const void* given, std::vector<int> first, u32 barrier) {
  const Described& map = *static_cast<const Described*>(given);
  if (map.rank != RANK) wrong = "a tile's coordinates are as many as its description has not";
  if (map.narrow) first[0] /= 2;
  if (to % (map.swizzle == 1 ? 256 : 1024)) wrong = "a tile begins where its swizzle does not";
  come_later(to, bytes_of(map), barrier, [=] {
    each_element(map, first.data(), to, [](unsigned short* from, u32 at) {
      *reinterpret_cast<unsigned short*>(window(at, 2)) = from ? *from : 0;
    });
    told(barrier, bytes_of(map));
  });
}
#define FETCH(rank) cp_async_bulk_tensor_##rank##d_shared_cluster_global_mbarrier_complete_tx_bytes
static void FETCH(2)(u32 to, const void* map, int x, int y, u32 barrier) { fetch_tile<2>(own(to), map, {x, y}, own(barrier)); }
static void FETCH(3)(u32 to, const void* map, int x, int y, int z, u32 barrier) {
  fetch_tile<3>(own(to), map, {x, y, z}, own(barrier));
}
static void FETCH(4)(u32 to, const void* map, int x, int y, int z, int w, u32 barrier) {
  fetch_tile<4>(own(to), map, {x, y, z, w}, own(barrier));
}
static void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 to, const void* map, int x, int y, u32 barrier, short blocks) {
  for (int b = 0; b < 16; b++)
    if (blocks >> b & 1) fetch_tile<2>(of_block(to, b), map, {x, y}, of_block(barrier, b));
}
static void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  to = own(to), barrier = own(barrier);
  if (to % 16 || (u64)from % 16 || bytes % 16) wrong = "bytes are copied that are no whole sixteens";
  come_later(to, bytes, barrier, [=] { memcpy(window(to, bytes), from, bytes), told(barrier, bytes); });
}
static void send_tile(const void* given, std::vector<int> first, u32 from) {
  Described map = *static_cast<const Described*>(given);
  leaving[current].push_back([=] {
    each_element(map, first.data(), from, [](unsigned short* to, u32 at) {
      if (to) *to = *reinterpret_cast<unsigned short*>(window(at, 2));
    });
  });
}
#define SEND(rank) cp_async_bulk_tensor_##rank##d_global_shared_cta_bulk_group_and_cp_async_bulk_commit_group
static void SEND(2)(const void* map, int x, int y, u32 from) { send_tile(map, {x, y}, own(from)); }
static void SEND(4)(const void* map, int x, int y, int z, int w, u32 from) { send_tile(map, {x, y, z, w}, own(from)); }
static void leave_but(std::deque<std::function<void()>>& tiles, unsigned left) {
  for (; tiles.size() > left; tiles.pop_front()) tiles[0]();
}
static void cp_async_bulk_wait_group_read(int left) { leave_but(leaving[current], left); }
// Between turns something that is on its way comes, or leaves. What is late comes when all wait.
static void meanwhile() {
  std::vector<std::function<void()>>& from = turn - moved > 60 ? late : coming;
  if (!from.empty() && drawn(turn, 5) % 2) {
    std::swap(from[drawn(turn, 6) % from.size()], from.back());
    from.back()();
    from.pop_back();
  }
  std::deque<std::function<void()>>& tiles = leaving[drawn(turn, 8) % ALL];
  leave_but(tiles, tiles.empty() ? 0 : tiles.size() - 1);
}
static void end_of_thread() {
  if (!leaving[current].empty()) wrong = "a thread ends before its tiles have left";
}
static void end_of_blocks() {
  if (coming.size() + late.size()) wrong = "a block ends before its tiles have come";
}

// Four floats, pairs and matrices of a warp.
static void mapa_shared_cluster_u32_and_ld_shared_cluster_v4_f32(u32 at, u32 block, float& x, float& y, float& z, float& w) {
  const float* from = reinterpret_cast<float*>(window(of_block(at, block), 16));
  x = from[0], y = from[1], z = from[2], w = from[3];
}
static void ld_shared_v2_f32(float& x, float& y, u32 at) {
  const float* from = reinterpret_cast<float*>(window(own(at), 8));
  x = from[0], y = from[1];
}
static u32 rows[ALL];
// The two elements that a thread has of an m-th matrix, whose rows the m-th eight threads name.
static u32& pair_of(int m) {
  int lane = threadIdx.x % 32;
  return *reinterpret_cast<u32*>(window(own(rows[current - lane + m * 8 + lane / 4]), 16) + lane % 4 * 4);
}
static void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 row, u32 a, u32 b, u32 c, u32 d) {
  rows[current] = row;
  barrier(warp(), 32);
  pair_of(0) = a, pair_of(1) = b, pair_of(2) = c, pair_of(3) = d;
  unshown[current] = true;
  barrier(warp(), 32);
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 row) {
  rows[current] = row;
  barrier(warp(), 32);
  a = pair_of(0), b = pair_of(1), c = pair_of(2), d = pair_of(3);
  barrier(warp(), 32);
}

static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 row) {
  rows[current] = row;
  barrier(warp(), 32);
  u32* found[4] = {&a, &b, &c, &d};
  int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; m++) {
    unsigned short two[2];
    for (int i = 0; i < 2; i++) memcpy(two + i, window(own(rows[current - lane + m * 8 + lane % 4 * 2 + i]), 16) + lane / 4 * 2, 2);
    memcpy(found[m], two, 4);
  }
  barrier(warp(), 32);
}

// Products of warpgroups, m64 n k16, and of bytes k32, with whole sums.
static float of_bf16(unsigned short bits) { u32 u = (u32)bits << 16; float f; memcpy(&f, &u, 4); return f; }
static float of_f16(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return h; }
struct Asked {
  int columns = 0, group = 0;
  float (*value)(unsigned short) = nullptr;
  std::vector<int> numbers;      // whether to add, 0, 1, 1, then which operands are read across
  std::vector<u64> described;    // operands in shared memory
  float* sums[32] = {};          // a thread's
  std::vector<u32> held[32];     // a thread's part of the left operand, or none
  int taken = 0;
  void take(int lane, float& sum) { if (!taken++) sums[lane] = &sum; }
  void take(int lane, const u32& part) { held[lane].push_back(part); }
  void take(int lane, u64 operand) { if (!lane) described.push_back(operand); }
  void take(int lane, int number) { if (!lane) numbers.push_back(number); }
  bool whole = false;
  void take_whole(int lane, int& sum) { if (!taken++) sums[lane] = reinterpret_cast<float*>(&sum); }
  void take_whole(int lane, u64 operand) { take(lane, operand); }
};
static std::deque<Asked> products[ALL / 32];
static unsigned issued[ALL], done[ALL / 32];
static int committed[ALL], finished[ALL / 32];
static bool fenced[ALL];  // since products were last waited for, after which registers are a thread's own
// Element (i, k) of an operand: i along its rows as they lie, or `across` them.
static unsigned short element(u64 operand, int i, int k, bool across) {
  u32 at = (operand & 0x3fff) << 4, next = (operand >> 16 & 0x3fff) << 4, eights = (operand >> 32 & 0x3fff) << 4;
  u32 swizzle = 4 - (operand >> 62), width = 16 << swizzle, wide = width / 2;
  u32 place = across ? i / wide * next + k / 8 * eights + k % 8 * width + i % wide * 2
                     : i / 8 * eights + i % 8 * width + k * 2;
  return *reinterpret_cast<unsigned short*>(window(own(swizzled(at + place, swizzle)), 2));
}
__attribute__((optimize("O2"))) static void make_whole(const Asked& p) {
  int left[16][32], right[32][256], first = threadIdx.x % 128 / 32 * 16;
  const auto byte = [](u64 operand, int i, int k) { return (signed char)(element(operand, i, k / 2, false) >> k % 2 * 8); };
  for (int k = 0; k < 32; k++) {
    for (int r = 0; r < 16; r++) left[r][k] = byte(p.described[0], first + r, k);
    for (int c = 0; c < p.columns; c++) right[k][c] = byte(p.described[1], c, k);
  }
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < p.columns; c++) {
      int& sum = reinterpret_cast<int*>(p.sums[r % 8 * 4 + c % 8 / 2])[c / 8 * 4 + r / 8 * 2 + c % 2];
      if (!p.numbers[0]) sum = 0;
      for (int k = 0; k < 32; k++) sum += left[r][k] * right[k][c];
    }
}
__attribute__((optimize("O2"))) static void make(const Asked& p) {
  if (p.whole) return make_whole(p);
  float left[16][16], right[16][256];
  int first = threadIdx.x % 128 / 32 * 16;
  bool held = p.held[0].size(), across = p.numbers.back(), turned = !held && p.numbers[4];
  for (int k = 0; k < 16; k++) {
    for (int r = 0; r < 16; r++)
      left[r][k] = p.value(held ? (unsigned short)(p.held[r % 8 * 4 + k % 8 / 2][k / 8 * 2 + r / 8] >> k % 2 * 16)
                                : element(p.described[0], first + r, k, turned));
    for (int c = 0; c < p.columns; c++) right[k][c] = p.value(element(p.described.back(), c, k, across));
  }
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < p.columns; c++) {
      float& sum = p.sums[r % 8 * 4 + c % 8 / 2][c / 8 * 4 + r / 8 * 2 + c % 2];
      if (!p.numbers[0]) sum = 0.f;
      for (int k = 0; k < 16; k++) sum += left[r][k] * right[k][c];
    }
}
template <int COLUMNS, typename Take> static void asked_product(Take take) {
  int of = current / 32;
  if (!fenced[current]) wrong = "products are asked for without a fence for the registers";
  unsigned n = issued[current]++ - done[of];
  if (n == products[of].size()) products[of].emplace_back();
  Asked& p = products[of][n];
  p.columns = COLUMNS, p.group = committed[current], p.taken = 0;
  take(p, threadIdx.x % 32);
  if (p.taken != COLUMNS / 2) wrong = "a product has other sums than its columns";
}
template <int COLUMNS, typename... Operands> static void ask_product(float (*value)(unsigned short), Operands&&... operands) {
  asked_product<COLUMNS>([&](Asked& p, int lane) { p.value = value, (p.take(lane, operands), ...); });
}
template <int COLUMNS, typename... Operands>
static void setp_ne_b32_and_wgmma_mma_async_sync_aligned_m64k32_s32_s8_s8(int more, int, Operands&&... operands) {
  asked_product<COLUMNS>([&](Asked& p, int lane) { p.whole = true, p.take(lane, more), (p.take_whole(lane, operands), ...); });
}
#define PRODUCT(type) setp_ne_b32_and_wgmma_mma_async_sync_aligned_m64k16_f32_##type##_##type
template <int COLUMNS, typename... O> static void PRODUCT(bf16)(O&&... o) { ask_product<COLUMNS>(of_bf16, o...); }
template <int COLUMNS, typename... O> static void PRODUCT(f16)(O&&... o) { ask_product<COLUMNS>(of_f16, o...); }
// All groups of products of a warp but the last `left`, once all its threads have asked for them.
static void make_but(int left) {
  int of = current / 32;
  barrier(warp(), 32);
  if (threadIdx.x % 32 == 0) {
    for (; !products[of].empty() && products[of][0].group < committed[current] - left; done[of]++) {
      make(products[of][0]);
      products[of].pop_front();
    }
    finished[of] = std::max(finished[of], committed[current] - left);
  }
  barrier(warp(), 32);
}
static void wgmma_fence_sync_aligned() { fenced[current] = true; }
static void wgmma_commit_group_sync_aligned() {
  if (drawn(++committed[current], current / 32) % 3 == 0) make_but(0);
}
// One warp's word stands for all four (so do CUTLASS's pipelines have it): products are a warpgroup's.
static void wgmma_wait_group_sync_aligned(int left) {
  fenced[current] = false;
  make_but(left);
  for (int w = 0, first = (current - threadIdx.x % 128) / 32; w < 4; w++)
    while (finished[first + w] < committed[current] - left) others();
}

// Products of a warp, m16 n8 k16, whose operands its threads have in registers.
static u32 operands[ALL][6];
__attribute__((optimize("O2"))) static void multiply_rows(float (*value)(unsigned short), float* (&sums)[4], const u32 (&held)[6]) {
  memcpy(operands[current], held, sizeof held);
  barrier(warp(), 32);
  int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 16; k++) {
      int row = lane / 4, column = lane % 4 * 2 + e % 2;
      u32 a = operands[current - lane + row * 4 + k % 8 / 2][k / 8 * 2 + e / 2];
      u32 b = operands[current - lane + column * 4 + k % 8 / 2][4 + k / 8];
      *sums[e] += value(a >> k % 2 * 16) * value(b >> k % 2 * 16);
    }
  barrier(warp(), 32);
}
#define WARP_PRODUCT(type)                                                                                          \
  static void mma_sync_aligned_m16n8k16_row_col_f32_##type##_##type##_f32(                                          \
      float& w, float& x, float& y, float& z, u32 a, u32 b, u32 c, u32 d, u32 e, u32 f, float, float, float, float) { \
    float* sums[4] = {&w, &x, &y, &z};                                                                              \
    multiply_rows(of_##type, sums, {a, b, c, d, e, f});                                                             \
  }
WARP_PRODUCT(bf16)
WARP_PRODUCT(f16)

static void setmaxnreg_dec_sync_aligned_u32(int) {}
static void setmaxnreg_inc_sync_aligned_u32(int) {}
static void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }

static void begin_of_blocks(int count) {
  memset(dynamic, 0xff, count * sizeof dynamic[0]);
  coming.clear(), late.clear(), in_cluster = 0;
  for (int t = 0, all = count * blockDim.x; t < all; t++) {
    leaving[t].clear(), products[t / 32].clear(), copies[t].clear();
    unshown[t] = fenced[t] = false, issued[t] = committed[t] = 0, done[t / 32] = finished[t / 32] = 0;
  }
}
