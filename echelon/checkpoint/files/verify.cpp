#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "echelon/checkpoint/files/checked_file.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/files/shared_work.h"

namespace echelon {
namespace {

/// What is wrong with the file's blocks and header.
class FileCheck {
 public:
  FileCheck(CheckedFile& file, int threads) : file_(file), threads_(threads) {}

  std::vector<Damage> run(const std::function<void(int64_t)>& progress) {
    auto outside = file_.open();
    if (!file_.is_open()) return {*outside};
    const auto head = file_.read_unverified_head();
    check_blocks(progress);
    const bool all = static_cast<int64_t>(found_.size()) == file_.num_blocks();
    std::vector<Damage> damages;
    if (outside) damages.push_back(*outside);
    for (auto& [block, damage] : found_) damages.push_back(std::move(damage));
    if (damages.empty() && head) damages.push_back(*head);
    if (!outside && all && found_.size() > 1) {
      damages.front().what +=
          "; no block of the file is the one that was written: it may be of "
          "another rank or another checkpoint";
    }
    file_.close();
    return damages;
  }

 private:
  /// Those that the file has, if it is shorter than it should be.
  void check_blocks(const std::function<void(int64_t)>& progress) {
    int64_t blocks = file_.num_blocks();
    while (blocks > 0 &&
           (blocks - 1) * kChecksumBlockBytes + file_.block_bytes(blocks - 1) >
               file_.bytes_there()) {
      --blocks;
    }
    std::atomic<int64_t> done = 0;
    share_work(
        blocks, threads_,
        [&](int64_t block) {
          thread_local std::vector<std::byte> buffer;
          const auto bytes = static_cast<size_t>(file_.block_bytes(block));
          if (buffer.size() < bytes) buffer.resize(bytes);
          if (auto damage =
                  file_.read_block(block, {std::span(buffer).first(bytes)})) {
            const std::lock_guard lock(mutex_);
            found_.emplace(block, std::move(*damage));
          }
          done += file_.block_bytes(block);
        },
        [&] {
          if (progress) progress(done);
        });
  }

  CheckedFile& file_;
  const int threads_;
  std::mutex mutex_;
  std::map<int64_t, Damage> found_;
};

}  // namespace

std::vector<Damage> verify_checkpoint(
    const std::string& folder, const std::function<void(int64_t)>& progress,
    int threads) {
  const CheckpointManifest manifest = read_manifest(folder);
  threads = num_threads(threads);
  std::vector<Damage> damages;
  int64_t before = 0;
  const auto files = checked_files(folder, manifest);
  for (size_t i = 0; i < files.size(); ++i) {
    FileCheck check(*files[i], threads);
    const auto found = check.run([&](int64_t done) {
      if (progress) progress(before + done);
    });
    damages.insert(damages.end(), found.begin(), found.end());
    before += manifest.files[i].bytes;
    if (progress) progress(before);
  }
  return damages;
}

}  // namespace echelon
