// A caching allocator as CUDA's: blocks belong to the stream that they were
// allocated on and are reused there at once when they are freed, since the
// stream's order protects them. A block that recordStream() gave to other
// streams waits for these.
#include "tests/test_device/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "echelon/text/format.h"
#include "tests/test_device/graph.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {
namespace {

constexpr int kMaxDevices = 16;
constexpr size_t kGranule = 512;
constexpr size_t kSegment = size_t{2} << 20;
constexpr size_t kPinnedBytes = size_t{8} << 30;

void install_fault_handler();

/// Pages that are mapped twice.
struct Region {
  uintptr_t base = 0;    // what tensors have
  uintptr_t kernel = 0;  // what kernels use
  size_t bytes = 0;

  Region(size_t size, int rights) : bytes(size) {
    const int file = ::memfd_create("echelon_test_device", 0);
    TORCH_CHECK(
        file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0,
        "test device: cannot make memory of ", bytes, " bytes");
    const auto map = [&](int protection) {
      void* at = ::mmap(
          nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "test device: cannot map memory");
      return reinterpret_cast<uintptr_t>(at);
    };
    base = map(rights);
    kernel = map(PROT_READ | PROT_WRITE);
    ::close(file);
    install_fault_handler();
  }
  bool has(uintptr_t address) const {
    return address >= base && address < base + bytes;
  }
};

// Addresses of a device. They are more than its memory, which consists of
// pages: what is free need not be in one piece.
size_t addresses_of_device() {
  return 8 * static_cast<size_t>(options().memory_bytes);
}

Region& device_region() {
  static auto* const region =
      new Region(addresses_of_device() * kMaxDevices, PROT_NONE);
  return *region;
}

Region& pinned_region() {
  static auto* const region = new Region(kPinnedBytes, PROT_READ | PROT_WRITE);
  return *region;
}

// ------------------------------------------------------------ device memory

/// What memory is reused within: a stream, or a stream of a pool.
struct Arena {
  int pool = 0;  // above 0: a graph's; below 0: a communicator's
  int stream = 0;
  auto operator<=>(const Arena&) const = default;
};

struct Block {
  int device = 0;
  Arena arena;
  uint64_t serial = 0;  // of the allocation; 0: free
  uintptr_t address = 0;
  size_t bytes = 0;
  bool free = true;
  bool segment_begins = false;
  std::set<int> other_streams;
};

/// The blocks of a device.
class Cache {
 public:
  explicit Cache(int device)
      : device_(device),
        limit_(static_cast<size_t>(options().memory_bytes)),
        begin_(
            device_region().base +
            static_cast<size_t>(device) * addresses_of_device()) {}

  Block* allocate(size_t wanted, const Arena& arena) {
    const size_t bytes = (wanted + kGranule - 1) / kGranule * kGranule;
    std::unique_lock lock(mutex_);
    free_waiting(lock);
    Block* block = find(bytes, arena);
    if (block == nullptr && grow(bytes, arena)) block = find(bytes, arena);
    // While a graph is captured, nothing may wait for the device.
    if (block == nullptr && arena.pool <= 0) {
      // As cudaMalloc's retry: give all cached segments back.
      lock.unlock();
      device_of(device_).synchronize("out of memory: cached blocks are freed");
      lock.lock();
      free_waiting(lock);
      flush();
      if (grow(bytes, arena)) block = find(bytes, arena);
    }
    if (block == nullptr) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false,
          "CUDA out of memory. (test device) Tried to ", "allocate ", wanted,
          " bytes; device ", device_, " has ", limit_, " bytes, of which ",
          in_use_, " are allocated");
    }
    split(*block, bytes);
    free_[block->arena].erase({block->bytes, block->address});
    block->free = false;
    block->serial = ++serial_;
    in_use_ += block->bytes;
    count(true);
    return block;
  }

  void release(Block* block) {
    std::vector<std::pair<int, MarkPtr>> marks;
    Device& device = device_of(device_);
    for (const int stream : block->other_streams) {
      marks.emplace_back(stream, device.mark(stream));
    }
    std::unique_lock lock(mutex_);
    in_use_ -= block->bytes;
    block->serial = 0;
    count(false);
    block->other_streams.clear();
    if (marks.empty()) {
      put_back(block);
    } else {
      waiting_.emplace_back(block, std::move(marks));
    }
  }

  void use_on(Block* block, int stream) {
    std::lock_guard lock(mutex_);
    if (stream != block->arena.stream) block->other_streams.insert(stream);
  }

  // cudaFree waits for the device.
  void emptied() {
    device_of(device_).synchronize("cached blocks are freed");
    std::unique_lock lock(mutex_);
    free_waiting(lock);
    flush();
  }
  void set_live(int pool, bool live) {
    const std::lock_guard lock(mutex_);
    if (live) {
      live_pools_.insert(pool);
    } else {
      live_pools_.erase(pool);
    }
  }
  size_t reserved() {
    const std::lock_guard lock(mutex_);
    return reserved_;
  }
  std::pair<int, uint64_t> allocation_of(uintptr_t address) {
    const std::lock_guard lock(mutex_);
    auto at = blocks_.upper_bound(address);
    if (at == blocks_.begin()) return {0, 0};
    const Block& block = std::prev(at)->second;
    return {block.arena.pool, block.serial};
  }

 private:
  using Key = std::pair<size_t, uintptr_t>;

  void count(bool allocation) {
    Device& device = device_of(device_);
    std::lock_guard lock(device.mutex());
    if (allocation) ++device.counts.allocations;
    device.in_use = static_cast<int64_t>(in_use_);
    device.counts.peak_bytes =
        std::max(device.counts.peak_bytes, device.in_use);
  }

  Block* find(size_t bytes, const Arena& arena) {
    auto& sizes = free_[arena];
    const auto found = sizes.lower_bound({bytes, 0});
    return found == sizes.end() ? nullptr : &blocks_.at(found->second);
  }

  // Takes a segment of the device's memory for `arena`.
  bool grow(size_t bytes, const Arena& arena) {
    const size_t size = (bytes + kSegment - 1) / kSegment * kSegment;
    if (reserved_ + size > limit_) return false;
    auto hole = std::ranges::find_if(
        holes_, [&](const auto& one) { return one.second >= size; });
    uintptr_t address = 0;
    if (hole != holes_.end()) {
      address = hole->first;
      const size_t rest = hole->second - size;
      holes_.erase(hole);
      if (rest > 0) holes_[address + size] = rest;
    } else {
      if (used_ + size > addresses_of_device()) return false;
      address = begin_ + used_;
      used_ += size;
    }
    reserved_ += size;
    blocks_[address] = {
        .device = device_,
        .arena = arena,
        .address = address,
        .bytes = size,
        .segment_begins = true};
    free_[arena].insert({size, address});
    return true;
  }

  void split(Block& block, size_t bytes) {
    if (block.bytes - bytes < kGranule) return;
    free_[block.arena].erase({block.bytes, block.address});
    const size_t rest = block.bytes - bytes;
    block.bytes = bytes;
    free_[block.arena].insert({bytes, block.address});
    const uintptr_t address = block.address + bytes;
    blocks_[address] = {
        .device = device_,
        .arena = block.arena,
        .address = address,
        .bytes = rest};
    free_[block.arena].insert({rest, address});
  }

  void put_back(Block* block) {
    block->free = true;
    auto at = blocks_.find(block->address);
    const auto join = [&](auto first, auto second) {
      free_[second->second.arena].erase({second->second.bytes, second->first});
      free_[first->second.arena].erase({first->second.bytes, first->first});
      first->second.bytes += second->second.bytes;
      blocks_.erase(second);
    };
    const auto fits = [&](auto first, auto second) {
      return !second->second.segment_begins && first->second.free &&
             second->second.free &&
             first->second.arena == second->second.arena &&
             first->first + first->second.bytes == second->first;
    };
    if (const auto next = std::next(at);
        next != blocks_.end() && fits(at, next)) {
      join(at, next);
    }
    if (at != blocks_.begin()) {
      if (const auto before = std::prev(at); fits(before, at)) {
        join(before, at);
        at = before;
      }
    }
    free_[at->second.arena].insert({at->second.bytes, at->first});
  }

  // Blocks whose other streams are done. `lock` holds mutex_.
  void free_waiting(std::unique_lock<std::mutex>& lock) {
    std::vector<Block*> done;
    std::vector<VectorClock> known;
    std::erase_if(waiting_, [&](const auto& one) {
      for (const auto& [stream, mark] : one.second) {
        if (!mark->reached()) return false;
      }
      for (const auto& [stream, mark] : one.second) {
        known.push_back(mark->clock());
      }
      done.push_back(one.first);
      return true;
    });
    for (Block* block : done) put_back(block);
    if (known.empty()) return;
    lock.unlock();
    for (const auto& clock : known) device_of(device_).learn(clock);
    lock.lock();
  }

  // Gives segments that are wholly free back to the device.
  void flush() {
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      const auto next = std::next(at);
      const bool whole =
          at->second.free && at->second.segment_begins &&
          !live_pools_.contains(at->second.arena.pool) &&
          (next == blocks_.end() || next->second.segment_begins ||
           next->first != at->first + at->second.bytes);
      if (whole) {
        free_[at->second.arena].erase({at->second.bytes, at->first});
        holes_[at->first] = at->second.bytes;
        reserved_ -= at->second.bytes;
        at = blocks_.erase(at);
      } else {
        ++at;
      }
    }
    for (auto hole = holes_.begin(); hole != holes_.end();) {
      const auto next = std::next(hole);
      if (next != holes_.end() && hole->first + hole->second == next->first) {
        hole->second += next->second;
        holes_.erase(next);
      } else {
        ++hole;
      }
    }
  }

  const int device_;
  const size_t limit_;
  const uintptr_t begin_;
  std::mutex mutex_;
  size_t used_ = 0;      // of the addresses, by segments and holes
  size_t reserved_ = 0;  // of the memory, by segments
  size_t in_use_ = 0;    // by blocks that are allocated
  std::map<uintptr_t, Block> blocks_;
  uint64_t serial_ = 0;  // of the last allocation
  std::set<int> live_pools_;
  std::map<Arena, std::set<Key>> free_;
  std::map<uintptr_t, size_t> holes_;
  std::vector<std::pair<Block*, std::vector<std::pair<int, MarkPtr>>>> waiting_;
};

Cache& cache_of(int device) {
  static std::mutex mutex;
  static auto* const caches = new std::map<int, std::unique_ptr<Cache>>;
  std::lock_guard lock(mutex);
  auto& cache = (*caches)[device];
  if (!cache) cache = std::make_unique<Cache>(device);
  return *cache;
}

// Without the copy of all counts that counts() makes.
size_t allocated_bytes(int index) {
  Device& device = device_of(index);
  std::lock_guard lock(device.mutex());
  return static_cast<size_t>(device.in_use);
}

// As CUDA's allocator tells what counts memory.
void report(const Block& block, bool allocated) {
  const auto bytes = static_cast<int64_t>(block.bytes);
  const size_t now = allocated_bytes(block.device);
  c10::reportMemoryUsageToProfiler(
      reinterpret_cast<void*>(block.address), allocated ? bytes : -bytes, now,
      now,
      c10::Device(
          c10::DeviceType::PrivateUse1,
          static_cast<c10::DeviceIndex>(block.device)));
}

thread_local int pool_of_thread = 0;

void free_block(void* context) {
  auto* const block = static_cast<Block*>(context);
  report(*block, false);
  cache_of(block->device).release(block);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    cache_of(current_device()).emptied();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats
  getDeviceStats(c10::DeviceIndex index) override {
    const auto reserved = static_cast<int64_t>(cache_of(index).reserved());
    Device& device = device_of(index);
    std::lock_guard lock(device.mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.reserved_bytes[0].current = reserved;
    stats.allocated_bytes[0].current = device.in_use;
    stats.allocated_bytes[0].peak = device.counts.peak_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard lock(device.mutex());
    device.counts.peak_bytes = device.in_use;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto total = static_cast<size_t>(options().memory_bytes);
    return {total - cache_of(index).reserved(), total};
  }
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device device(
        c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) return {nullptr, device};
    const int stream = current_stream(index);
    const auto capture = device_of(index).capture_of(stream);
    Block* const block = cache_of(index).allocate(
        bytes,
        {.pool = capture ? capture->pool() : pool_of_thread, .stream = stream});
    report(*block, true);
    return {
        reinterpret_cast<void*>(block->address), block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "test device: copy_data of the allocator");
  }
};

// ------------------------------------------------------------ pinned memory

/// Blocks of whole pages. A freed block is reused when no queued copy uses it;
/// until then its pages have no rights, so it is simply not handed out again
/// within a run: the region is large and its pages cost nothing untouched.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    std::lock_guard lock(mutex_);
    Region& region = pinned_region();
    TORCH_CHECK(
        used_ + size <= region.bytes, "test device: out of pinned memory");
    auto* const address = reinterpret_cast<void*>(region.base + used_);
    used_ += size;
    return {address, address, &no_free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &no_free; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }

 private:
  static void no_free(void*) {}
  std::mutex mutex_;
  size_t used_ = 0;
};

// ------------------------------------------------------------- host accesses

struct sigaction previous_action;

void write_text(const std::string& text) {
  (void)!::write(STDERR_FILENO, text.data(), text.size());
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (device_region().has(address)) {
    const int device = device_of_address(info->si_addr);
    write_text(format(
        "test device: the host touches memory of device {}:\n{}", device,
        CallStack::here().text()));
    ::signal(SIGSEGV, SIG_DFL);
    ::abort();
  }
  if (pinned_region().has(address)) {
    for (int device = 0; device < num_devices(); ++device) {
      std::string text;
      if (device_of(device).host_touched(address, text)) {
        if (!text.empty()) {
          keep_report({Finding::early_host_access, device, std::move(text)});
        }
        return;
      }
    }
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else {
    ::signal(SIGSEGV, SIG_DFL);
  }
}

void install_fault_handler() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return ::sigaction(SIGSEGV, &action, &previous_action) == 0;
  }();
  (void)installed;
}

}  // namespace

c10::Allocator* device_allocator() {
  static auto* const allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

int device_of_address(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const Region& region = device_region();
  if (!region.has(at)) return -1;
  return static_cast<int>((at - region.base) / addresses_of_device());
}

bool is_pinned(const void* address) {
  return pinned_region().has(reinterpret_cast<uintptr_t>(address));
}

void* kernel_address(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Region* region : {&device_region(), &pinned_region()}) {
    if (region->has(at)) {
      return reinterpret_cast<void*>(at - region->base + region->kernel);
    }
  }
  return const_cast<void*>(address);
}

void record_stream(const c10::DataPtr& data, int stream) {
  if (data.get() == nullptr) return;
  auto* const block = static_cast<Block*>(data.get_context());
  cache_of(block->device).use_on(block, stream);
}

PoolScope::PoolScope(int pool) : outer_(std::exchange(pool_of_thread, pool)) {}
PoolScope::~PoolScope() {
  pool_of_thread = outer_;
}

void begin_pool(int pool) {
  cache_of(current_device()).set_live(pool, true);
}

void end_pool(int pool) {
  for (int device = 0; device < num_devices(); ++device) {
    cache_of(device).set_live(pool, false);
  }
}

std::pair<int, uint64_t> allocation_of(uintptr_t address) {
  const int device = device_of_address(reinterpret_cast<void*>(address));
  if (device < 0) return {0, 0};
  return cache_of(device).allocation_of(address);
}

}  // namespace echelon::test_device
