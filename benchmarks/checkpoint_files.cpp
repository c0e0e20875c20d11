// What a checkpoint's file costs over its bytes alone: write_rank_file against
// write and fsync, CheckpointReader (all checksums verified) against pread by
// as many threads, with the file in the system's memory and without.
// Alternates; prints medians, in brackets the least and the most, and the
// processors' time besides, which other programs disturb less.
//
//   checkpoint_files --folder PATH [--mib 400] [--rounds 5] [--threads 0]
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>

#include "benchmarks/arguments.h"
#include "benchmarks/times.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/files/shared_work.h"

namespace {

using namespace echelon;

constexpr int64_t kRows = 512, kColumns = 1536;  // 3 MiB of F32

void print(const char* name, const Times& times, int64_t bytes) {
  const auto [least, most] = std::ranges::minmax_element(times.seconds);
  std::printf(
      "%-24s %6.3f s (%.3f to %.3f)  %5.2f GB/s  processors %.3f s (%.3f)\n",
      name, Times::median(times.seconds), *least, *most,
      static_cast<double>(bytes) / Times::median(times.seconds) / 1e9,
      Times::median(times.processor_seconds),
      *std::ranges::min_element(times.processor_seconds));
}

/// Memory of which no page was touched.
struct FreshMemory {
  explicit FreshMemory(size_t size)
      : bytes(static_cast<std::byte*>(::mmap(
            nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
            -1, 0))),
        size(size) {}
  ~FreshMemory() { ::munmap(bytes, size); }
  std::byte* bytes;
  size_t size;
};

void must(bool holds, const char* what) {
  if (!holds) throw Error(std::string(what) + ": " + std::strerror(errno));
}

void plain_write(
    const std::string& path, const std::vector<SliceBytes>& slices) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  must(fd >= 0, "open");
  for (const auto& slice : slices) {
    must(
        ::write(fd, slice.bytes.data(), slice.bytes.size()) ==
            static_cast<ssize_t>(slice.bytes.size()),
        "write");
  }
  must(::fsync(fd) == 0, "fsync");
  ::close(fd);
}

void plain_read(const std::string& path, int threads, std::byte* to) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  must(fd >= 0, "open");
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
  share_work(
      (bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes, threads,
      [&](int64_t block) {
        const int64_t begin = block * kChecksumBlockBytes;
        const int64_t size = std::min(kChecksumBlockBytes, bytes - begin);
        must(
            ::pread(fd, to + begin, static_cast<size_t>(size), begin) == size,
            "pread");
      });
  ::close(fd);
}

void verified_read(const std::string& folder, int threads, std::byte* to) {
  CheckpointReader reader(folder, threads);
  std::vector<BoxRead> reads;
  for (const auto& tensor : reader.manifest().tensors) {
    reads.push_back({&tensor, whole_box(tensor.shape), to, {}});
    to += whole_box(tensor.shape).numel() * 4;
  }
  reader.read(reads);
}

void forget(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  must(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "fadvise");
  ::close(fd);
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  arguments.allow({"--folder", "--mib", "--rounds", "--threads"});
  const auto number = [&](const char* name, int64_t otherwise) {
    return arguments.has(name) ? std::stoll(arguments.text(name)) : otherwise;
  };
  const std::string folder = arguments.text("--folder") + "/checkpoint_files";
  const int threads = num_threads(static_cast<int>(number("--threads", 0)));
  const int64_t count = std::max<int64_t>(1, number("--mib", 400) / 3);
  std::filesystem::create_directories(folder);

  const int64_t tensor_bytes = kRows * kColumns * 4;
  std::vector<std::byte> memory(static_cast<size_t>(count * tensor_bytes));
  std::mt19937_64 random(1);
  for (size_t i = 0; i < memory.size(); i += 8) {
    const uint64_t bits = random();
    std::memcpy(memory.data() + i, &bits, 8);
  }
  std::vector<SliceBytes> slices;
  for (int64_t i = 0; i < count; ++i) {
    slices.push_back(
        {"tensor" + std::to_string(i),
         SavedKind::parameter,
         "F32",
         {kRows, kColumns},
         whole_box({kRows, kColumns}),
         std::span(memory).subspan(
             static_cast<size_t>(i * tensor_bytes),
             static_cast<size_t>(tensor_bytes))});
  }
  const auto bytes = static_cast<int64_t>(memory.size());
  const std::string name = rank_file_name(0), path = folder + "/" + name;
  Times write_plain, write_file, warm_plain, warm, cold_plain, cold;
  for (int64_t round = 0; round < number("--rounds", 5); ++round) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    ::sync();
    write_plain.take([&] { plain_write(folder + "/plain", slices); });
    std::filesystem::remove(folder + "/plain");
    ::sync();
    RankPart part;
    write_file.take([&] { part = write_rank_file(folder, name, slices); });
    CheckpointManifest manifest;
    manifest.config_hash = checksum("", 0);
    add_parts(manifest, {part});
    std::ofstream(folder + "/manifest.json") << to_json(manifest);
    for (const bool in_memory : {false, true}) {
      for (int i = 0; i < (in_memory ? 3 : 1); ++i) {
        if (!in_memory) forget(path);
        FreshMemory to(memory.size() + kChecksumBlockBytes);
        (in_memory ? warm_plain : cold_plain).take([&] {
          plain_read(path, threads, to.bytes);
        });
        if (!in_memory) forget(path);
        FreshMemory verified(memory.size());
        (in_memory ? warm : cold).take([&] {
          verified_read(folder, threads, verified.bytes);
        });
        if (std::memcmp(verified.bytes, memory.data(), memory.size()) != 0) {
          throw Error("what was read is not what was written");
        }
      }
    }
  }
  std::filesystem::remove_all(folder);
  std::printf(
      "%lld bytes, %d threads\n", static_cast<long long>(bytes), threads);
  print("write and fsync", write_plain, bytes);
  print("write_rank_file", write_file, bytes);
  print("pread, from the disk", cold_plain, bytes);
  print("verified, from the disk", cold, bytes);
  print("pread, from memory", warm_plain, bytes);
  print("verified, from memory", warm, bytes);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
