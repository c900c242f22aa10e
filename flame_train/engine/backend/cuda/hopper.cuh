// What compute capability 9.0 moves tiles with: barriers that count bytes, tiles fetched and sent by descriptor (TMA),
// blocks of a cluster that tell each other, and operands of warpgroup products. After PTX ISA 8.0, sections on mbarrier,
// cp.async.bulk.tensor and wgmma.
#pragma once
#include "backend/cuda/fragments.cuh"

typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 words[16]; };

// Which of COUNT places comes next, and which of its uses this is.
template <int COUNT> struct Place {
  u32 stage = 0, phase = 0;
  __device__ void next() {
    if (++stage == COUNT) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void begin_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(phase) : "memory");
}
// Tells a block of the cluster. The release that this implies is the block's own. One of the whole cluster costs a fence of
// the device. What was read here is read by warpgroup products, which are over.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block) : "memory");
}
// Tells this block.
__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Four floats of another block's shared memory in the cluster, at the address they have in this one's.
__device__ __forceinline__ float4 four_of(u32 own, int block) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(own), "r"(block));
  return v;
}
__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ void warpgroup_sync(int name) { asm volatile("bar.sync %0, 128;" ::"r"(name) : "memory"); }

// A tile at column x, row y of what `map` describes; what lies outside comes as zeros and is not written.
__device__ __forceinline__ void fetch(u32 to, const TensorMap& map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
// The same of one of several items.
__device__ __forceinline__ void fetch_item(u32 to, const TensorMap& map, u32 barrier, int x, int y, int item) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(item) : "memory");
}
// A tile of a head's rows, of what has its batches and heads apart.
__device__ __forceinline__ void fetch(u32 to, const TensorMap& map, u32 barrier, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(head), "r"(batch) : "memory");
}
// What lies together, a multiple of 16 bytes.
__device__ __forceinline__ void fetch_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier) : "memory");
}
// To the same place of both blocks of a cluster, and counted by the barrier of each.
__device__ __forceinline__ void fetch_for_both(u32 to, const TensorMap& map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<short>(3))
      : "memory");
}
__device__ __forceinline__ void send(const TensorMap& map, u32 from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void send(const TensorMap& map, u32 from, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map), "r"(from), "r"(0), "r"(row), "r"(head), "r"(batch) : "memory");
}
// Until all but the last `left` tiles sent by this thread have been read.
template <int left> __device__ __forceinline__ void sent() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}
__device__ __forceinline__ void show_to_sender() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices from registers as products leave them to shared memory, each lane naming a row of one.
__device__ __forceinline__ void put4(u32 row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3]) : "memory");
}

// An operand in shared memory: rows of 128 bytes, swizzled by 128, eights of rows one after another. `next` is the distance
// to the next 64 columns of an operand that is read across its rows.
__device__ __forceinline__ u64 operand(u32 at, u32 next = 16) {
  return static_cast<u64>((at & 0x3FFFF) >> 4) | static_cast<u64>(next >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 |
         static_cast<u64>(1) << 62;
}
// One that is read across its rows of 16 columns, 32 bytes swizzled by as many, eights of rows one after another. `next`
// is as above, to the next 16.
__device__ __forceinline__ u64 strip_operand(u32 at, u32 next) {
  return static_cast<u64>((at & 0x3FFFF) >> 4) | static_cast<u64>(next >> 4) << 16 | static_cast<u64>(256 >> 4) << 32 |
         static_cast<u64>(3) << 62;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left> __device__ __forceinline__ void products_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
