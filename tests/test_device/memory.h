// Memory of the test devices and pinned memory of the host.
//
// Both are mapped twice. The first address is what tensors have; the second,
// kernel_address(), is what kernels use. The first mapping of device memory has
// no rights. That of pinned memory loses them while a copy is under way.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <utility>

namespace echelon::test_device {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

/// The device of an address; -1 for memory of the host.
int device_of_address(const void* address);
bool is_pinned(const void* address);
/// Where kernels find the memory of `address`: itself for other host memory.
void* kernel_address(const void* address);

/// The block of `data` is used by `stream` as well: it is not reused before the
/// work that is queued there now is over.
void record_stream(const c10::DataPtr& data, int stream);

/// What is allocated from here by captured streams is the pool's (graph.h).
void begin_pool(int pool);
/// Nothing is replayed with the pool's memory any more. What is still allocated
/// goes back when it is freed.
void end_pool(int pool);
/// While it lives, what this thread allocates outside of captures is the
/// pool's: one of a communicator, whose number is below 0.
class PoolScope {
 public:
  explicit PoolScope(int pool);
  ~PoolScope();
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;

 private:
  const int outer_;
};
/// The pool of the allocation at an address of a device (0: none), and its
/// number among all allocations; number 0 when it is free.
std::pair<int, uint64_t> allocation_of(uintptr_t address);

}  // namespace echelon::test_device
