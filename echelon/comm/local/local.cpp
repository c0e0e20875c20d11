#include "echelon/comm/local/local.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "echelon/comm/local/arena.h"

namespace echelon::local {
namespace {

// CPU tensors of Arena::kMinBytes and more in the arena, smaller ones as
// before. LibTorch wants the data pointer to be the context too.
class ArenaAllocator : public c10::Allocator {
 public:
  ArenaAllocator() : small_(c10::GetCPUAllocator()) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes >= Arena::kMinBytes) {
      data = Arena::of_process().allocate(bytes);
    }
    if (data == nullptr) {
      return small_->allocate(bytes);
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void release(void* data) { Arena::of_process().release(data); }

  c10::Allocator* small_;
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
    c10::intrusive_ptr<c10d::Store> store,
    const std::string& job_key,
    int rank,
    int size,
    const JoinOptions& options) {
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
