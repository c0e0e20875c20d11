// What lets the text of our GPU kernels compile as C++ for the host. A test
// includes a .cu file inside of this namespace, after this header:
//
//   namespace echelon::host_kernels {
//   #include "echelon/kernels/vocab_loss.cu"
//   }
#pragma once

#include <torch/types.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace echelon::host_kernels {

struct Index {
  int x = 0;
};
inline thread_local Index threadIdx;
inline Index blockIdx;
inline Index blockDim;
inline std::unique_ptr<std::barrier<>> threads_of_block;

inline void __syncthreads() {
  threads_of_block->arrive_and_wait();
}
inline void atomicMax(unsigned* to, unsigned value) {
  const std::atomic_ref<unsigned> shared(*to);
  unsigned seen = shared;
  while (seen < value && !shared.compare_exchange_weak(seen, value)) {
  }
}
/// As CUDA's: after `most` comes 0.
inline unsigned atomicInc(unsigned* to, unsigned most) {
  const std::atomic_ref<unsigned> shared(*to);
  unsigned seen = shared;
  while (!shared.compare_exchange_weak(seen, seen >= most ? 0 : seen + 1)) {
  }
  return seen;
}
inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline float half_to_float(unsigned short bits) {
  return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
}
inline unsigned short float_to_half(float value) {
  return c10::Half(value).x;
}

/// The order in which blocks end. A GPU promises none.
enum class BlockOrder { forwards, backwards };

/// Block number `block` of a launch. Its threads are threads here.
inline void
launch_block(int64_t block, int threads, const std::function<void()>& kernel) {
  threads_of_block = std::make_unique<std::barrier<>>(threads);
  blockDim.x = threads;
  blockIdx.x = static_cast<int>(block);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      threadIdx.x = thread;
      kernel();
    });
  }
  for (auto& one : all) one.join();
}

/// A launch of `blocks` blocks of `threads` threads, one block after the other.
inline void launch(
    int64_t blocks, int threads, const std::function<void()>& kernel,
    BlockOrder order = BlockOrder::forwards) {
  for (int64_t i = 0; i < blocks; ++i) {
    launch_block(
        order == BlockOrder::forwards ? i : blocks - 1 - i, threads, kernel);
  }
}

/// The same of a kernel whose threads do not wait for each other: they run one
/// after the other. The first block is number `first`.
inline void launch_in_turn(
    int64_t blocks, int threads, const std::function<void()>& kernel,
    int64_t first = 0) {
  blockDim.x = threads;
  for (int64_t block = first; block < first + blocks; ++block) {
    blockIdx.x = static_cast<int>(block);
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
  }
}

/// Where a tensor begins whose element number `index` is at `data`. A kernel
/// takes it as a huge tensor, as long as it touches nothing before `data`.
template <class T>
T* begin_of_huge(T* data, int64_t index) {
  return reinterpret_cast<T*>(
      reinterpret_cast<uintptr_t>(data) -
      static_cast<uintptr_t>(index) * sizeof(T));
}

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __shared__ static
#include "echelon/kernels/numbers.cu"

}  // namespace echelon::host_kernels
