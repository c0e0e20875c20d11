// The file begins with a header: a lock, the host's verdict, the groups, the
// free extents, and a block for each rank. Pages for the ranks' statuses
// follow, then the groups' memory up to `top`. A free piece below `top` is an
// extent, joined with free neighbours; the piece that ends at `top` lowers it.
// Freed pages are given back to the kernel, so memory that is taken always
// reads as zeros.
//
// A process may be killed at any instruction. So each wait for what another
// process writes is bounded, or ends with the verdict.
#include "echelon/comm/shared_memory/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

constexpr uint64_t kSegmentMagic = 0x65636865'6c6f6e31;
constexpr size_t kAddresses = size_t{256} << 30;
constexpr int kMaxGroups = 4096;
constexpr int kMaxExtents = 8192;

size_t pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// FNV-1a, twice with different starts: 128 bits of the group's key.
uint64_t hash(std::string_view key, uint64_t start) {
  uint64_t value = 0xcbf29ce484222325u ^ start;
  for (const unsigned char c : key) {
    value = (value ^ c) * 0x100000001b3u;
  }
  return value;
}

[[noreturn]] void fail_to_share(const char* what) {
  throw CommError(format(
      "[local] cannot share memory between the ranks of this host: {}: {}",
      what, std::strerror(errno)));
}

char* map(int descriptor) {
  void* base = mmap(
      nullptr, kAddresses, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
      descriptor, 0);
  if (base == MAP_FAILED) {
    fail_to_share(
        "mapping 256 GiB of addresses (ulimit -v must be unlimited; memory is "
        "taken only as it is used)");
  }
  return static_cast<char*>(base);
}

void copy_words(
    std::atomic<uint64_t>* to, size_t num_words, std::string_view text) {
  for (size_t i = 0; i * 8 < text.size() && i < num_words; ++i) {
    uint64_t word = 0;
    std::memcpy(
        &word, text.data() + i * 8, std::min<size_t>(8, text.size() - i * 8));
    to[i].store(word, std::memory_order_relaxed);
  }
}

std::string copy_words(const std::atomic<uint64_t>* from, size_t length) {
  std::string text(length, '\0');
  for (size_t i = 0; i * 8 < length; ++i) {
    const uint64_t word = from[i].load(std::memory_order_relaxed);
    std::memcpy(
        text.data() + i * 8, &word, std::min<size_t>(8, length - i * 8));
  }
  return text;
}

}  // namespace

bool idle_step(int& idle) {
  if (idle < kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else if (idle < kSpins + kYields) {
    sched_yield();
  } else {
    return false;
  }
  ++idle;
  return true;
}

// The futex is not FUTEX_PRIVATE, since the sleepers may be other processes.
void Doorbell::sleep(uint32_t seen, std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1000;
  time.tv_nsec = (limit.count() % 1000) * 1000000;
  syscall(
      SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAIT, seen,
      limit.count() > 0 ? &time : nullptr, nullptr, 0);
}

void Doorbell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(
      SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAKE, INT_MAX,
      nullptr, nullptr, 0);
}

bool Verdict::pass(
    Kind what, uint64_t at_sequence, const std::vector<int>& missing_ranks,
    std::string_view why) {
  // The first writer wins. State 1: it is writing; 2: the rest can be read.
  uint32_t none = 0;
  if (!state.compare_exchange_strong(none, 1)) {
    return false;
  }
  why = why.substr(0, sizeof(text));
  kind.store(static_cast<uint32_t>(what), std::memory_order_relaxed);
  sequence.store(at_sequence, std::memory_order_relaxed);
  for (const int r : missing_ranks) {
    missing[r / 64].fetch_or(
        uint64_t{1} << (r % 64), std::memory_order_relaxed);
  }
  length.store(why.size(), std::memory_order_relaxed);
  copy_words(text, std::size(text), why);
  state.store(2, std::memory_order_seq_cst);
  return true;
}

void Verdict::read(
    Kind& what, uint64_t& at_sequence, std::vector<int>& missing_ranks,
    std::string& why) const {
  // A writer that was killed half way leaves state 1, so the wait is bounded.
  for (int i = 0; state.load(std::memory_order_acquire) == 1 && i < 10000;
       ++i) {
    sched_yield();
  }
  what = static_cast<Kind>(kind.load(std::memory_order_relaxed));
  at_sequence = sequence.load(std::memory_order_relaxed);
  missing_ranks.clear();
  for (int r = 0; r < kMaxRanks; ++r) {
    if (missing[r / 64].load(std::memory_order_relaxed) >> (r % 64) & 1) {
      missing_ranks.push_back(r);
    }
  }
  why = copy_words(text, std::min<size_t>(length.load(), sizeof(text)));
}

void StatusPage::publish(std::string_view line) {
  line = line.substr(0, sizeof(words));
  // This is a seqlock: the version is odd while the words change, and a reader
  // that sees an odd or a changed version reads again.
  version.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  length.store(line.size(), std::memory_order_relaxed);
  copy_words(words, kWords, line);
  version.fetch_add(1, std::memory_order_release);
}

std::string StatusPage::read() const {
  std::string line;
  uint64_t last = 0;
  // A writer that died half way leaves an odd version for good: then the page
  // is shown as it is.
  for (int unchanged = 0; unchanged < 1000; ++unchanged) {
    const uint64_t before = version.load(std::memory_order_acquire);
    line = copy_words(
        words, std::min<size_t>(
                   length.load(std::memory_order_relaxed), sizeof(words)));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint64_t after = version.load(std::memory_order_relaxed);
    if (before % 2 == 0 && after == before) {
      break;
    }
    if (after != last) {
      unchanged = 0;
    }
    last = after;
    sched_yield();
  }
  return line;
}

struct Segment::Header {
  struct Group {
    uint64_t key[2];
    uint64_t offset, bytes;
    int32_t members, joined, left;
  };
  struct Extent {
    uint64_t offset, bytes;
  };

  uint64_t magic;
  int32_t size;
  uint64_t status_offset;
  alignas(128) std::atomic<uint32_t> lock;
  uint64_t top;
  int32_t num_groups;   // entries in use or used before
  int32_t num_extents;  // free pieces below top
  Verdict verdict;
  Group groups[kMaxGroups];
  Extent extents[kMaxExtents];
  alignas(128) RankBlock ranks[];
};

// The lock is held for microseconds. When its holder is killed, a verdict is
// passed and the others stop waiting.
class Segment::Lock {
 public:
  explicit Lock(Header& header) : word_(header.lock) {
    int idle = 0;
    uint32_t free = 0;
    while (!word_.compare_exchange_weak(free, 1, std::memory_order_acquire)) {
      free = 0;
      if (!idle_step(idle)) {
        sched_yield();
        if (header.verdict.passed()) {
          throw CommError("[local] the job on this host has already failed");
        }
      }
    }
  }
  ~Lock() { word_.store(0, std::memory_order_release); }

 private:
  std::atomic<uint32_t>& word_;
};

std::shared_ptr<Segment> Segment::create(int size) {
  if (size < 1 || size > kMaxRanks) {
    throw ConfigError(format(
        "[local] {} ranks on one host; 1 to {} are possible", size, kMaxRanks));
  }
  const int descriptor = memfd_create("echelon-local", MFD_CLOEXEC);
  if (descriptor < 0) {
    fail_to_share("memfd_create");
  }
  if (ftruncate(descriptor, kAddresses) != 0) {
    close(descriptor);
    fail_to_share("sizing the memory file");
  }
  std::shared_ptr<Segment> segment(new Segment(descriptor, map(descriptor)));
  Header& header = segment->header();
  header.size = size;
  header.status_offset = pages(sizeof(Header) + size * sizeof(RankBlock));
  header.top = header.status_offset + size * sizeof(StatusPage);
  header.magic = kSegmentMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int descriptor) {
  struct stat info {};
  if (fstat(descriptor, &info) != 0 ||
      static_cast<size_t>(info.st_size) != kAddresses) {
    throw CommError("[local] rank 0's memory file is not one of ours");
  }
  std::shared_ptr<Segment> segment(new Segment(descriptor, map(descriptor)));
  if (segment->header().magic != kSegmentMagic) {
    throw CommError("[local] rank 0's memory file is not one of ours");
  }
  return segment;
}

Segment::~Segment() {
  munmap(base_, kAddresses);
  close(descriptor_);
}

Segment::Header& Segment::header() const {
  return *reinterpret_cast<Header*>(base_);
}

int Segment::size() const {
  return header().size;
}

RankBlock& Segment::rank(int r) const {
  return header().ranks[r];
}

StatusPage& Segment::status(int r) const {
  return reinterpret_cast<StatusPage*>(base_ + header().status_offset)[r];
}

Verdict& Segment::verdict() const {
  return header().verdict;
}

void Segment::ring_all() const {
  for (int r = 0; r < size(); ++r) {
    rank(r).engine.ring();
    rank(r).waiters.ring();
  }
}

GroupSlot
Segment::join_group(const std::string& key, int members, size_t bytes) {
  const uint64_t first = hash(key, 0);
  const uint64_t second = hash(key, 0x9e3779b97f4a7c15u);
  Lock lock(header());
  int index = header().num_groups;
  for (int i = 0; i < header().num_groups; ++i) {
    auto& group = header().groups[i];
    if (group.members != 0 && group.key[0] == first && group.key[1] == second) {
      ++group.joined;
      return {group.offset, i};
    }
    if (group.members == 0) {
      index = std::min(index, i);
    }
  }
  if (index == kMaxGroups) {
    throw CommError(format(
        "[local] more than {} groups alive on this host; destroy some before "
        "making more",
        kMaxGroups));
  }
  const uint64_t offset = take(bytes);
  header().num_groups = std::max(header().num_groups, index + 1);
  header().groups[index] = {{first, second}, offset, pages(bytes),
                            members,         1,      0};
  return {offset, index};
}

void Segment::leave_group(
    const GroupSlot& slot, const std::function<void()>& on_last) {
  auto& group = header().groups[slot.index];
  {
    Lock lock(header());
    if (++group.left < group.members) {
      return;
    }
  }
  on_last();
  release(group.offset, group.bytes);
  Lock lock(header());
  group = {};
}

uint64_t Segment::allocate(size_t bytes) {
  Lock lock(header());
  return take(bytes);
}

uint64_t Segment::take(size_t bytes) {
  bytes = pages(bytes);
  for (int i = 0; i < header().num_extents; ++i) {
    auto& extent = header().extents[i];
    if (extent.bytes >= bytes) {
      const uint64_t offset = extent.offset;
      extent.offset += bytes;
      extent.bytes -= bytes;
      if (extent.bytes == 0) {
        extent = header().extents[--header().num_extents];
      }
      return offset;
    }
  }
  if (header().top + bytes > kAddresses) {
    throw CommError(
        "[local] the groups of this host need more than 256 GiB of addresses; "
        "destroy some before making more");
  }
  header().top += bytes;
  return header().top - bytes;
}

void Segment::release(uint64_t offset, size_t bytes) {
  bytes = pages(bytes);
  // Gives the memory back and zeroes it for the next user.
  madvise(base_ + offset, bytes, MADV_REMOVE);
  Lock lock(header());
  for (int i = 0; i < header().num_extents;) {
    auto& extent = header().extents[i];
    const bool before = extent.offset + extent.bytes == offset;
    if (!before && offset + bytes != extent.offset) {
      ++i;
      continue;
    }
    offset = before ? extent.offset : offset;
    bytes += extent.bytes;
    extent = header().extents[--header().num_extents];
    // The joined piece may touch one that was passed already.
    i = 0;
  }
  if (offset + bytes == header().top) {
    header().top = offset;
  } else if (header().num_extents < kMaxExtents) {
    header().extents[header().num_extents++] = {offset, bytes};
  }
}

}  // namespace echelon::local
