#include "echelon/comm/local/local.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstring>

#include "echelon/comm/shared_memory/arena.h"

namespace echelon::local {
namespace {

// Allocates CPU tensors of Arena::kMinBytes and more in the arena, smaller ones
// as before. LibTorch's raw_allocate (oneDNN's scratch memory, say) requires
// that the data pointer is the context, and one deleter for all blocks.
class ArenaAllocator : public c10::Allocator {
 public:
  ArenaAllocator() { small() = c10::GetCPUAllocator(); }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes >= Arena::kMinBytes) {
      data = Arena::of_process().allocate(bytes);
      if (data != nullptr) report(data, 1);
    }
    if (data == nullptr) {
      data = small()->raw_allocate(bytes);
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static c10::Allocator*& small() {
    static c10::Allocator* allocator = nullptr;
    return allocator;
  }
  // Reports to the profiler of this thread's memory; `small` reports by itself.
  static void report(void* data, int64_t sign) {
    using c10::ThreadLocalDebugInfo;
    if (ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) ==
        nullptr) {
      return;
    }
    const Arena& arena = Arena::of_process();
    const size_t used = arena.used_bytes();
    c10::reportMemoryUsageToProfiler(
        data, sign * static_cast<int64_t>(arena.size_of(data)), used, used,
        c10::Device(c10::kCPU));
  }
  static void release(void* data) {
    if (Arena::of_process().contains(data)) {
      report(data, -1);
      Arena::of_process().release(data);
    } else {
      small()->raw_deallocate(data);
    }
  }
};

void install_arena() {
  static auto* allocator = [] {
    auto* made = new ArenaAllocator;  // tensors may outlive everything
    c10::SetCPUAllocator(made, 100);
    return made;
  }();
  (void)allocator;
}

}  // namespace

std::shared_ptr<Host> join_processes(
    c10::intrusive_ptr<c10d::Store> store, const std::string& job_key, int rank,
    int size, const JoinOptions& options) {
  Rendezvous rendezvous;
  rendezvous.set = [&](const std::string& key, const std::string& value) {
    store->set(key, value);
  };
  rendezvous.get = [&](const std::string& key,
                       std::chrono::milliseconds timeout) {
    store->wait({key}, timeout);
    return store->get_to_str(key);
  };
  auto host = join_processes(rendezvous, job_key, rank, size, options);
  if (options.share_tensors) {
    install_arena();
  }
  return host;
}

}  // namespace echelon::local
