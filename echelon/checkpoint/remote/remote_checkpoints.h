// A run's checkpoints on S3-compatible storage.
//
//   s3://BUCKET/PREFIX/checkpoints/
//     LATEST                       the index (remote_index.h)
//     step-00000040-1f3ac27b-2/    rank files, metrics.jsonl, manifest.json
//
// Each upload has a folder of its own, so nothing that can be read is ever
// written over. A checkpoint exists when LATEST names it. LATEST is put last,
// on condition that nobody has put it since: of two runs that write there one
// wins, and the other is told. A crash at any request leaves the checkpoints
// that LATEST names, and remains that the next one removes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/remote/remote_index.h"
#include "echelon/storage/settings.h"

namespace echelon {

class RemoteCheckpoints {
 public:
  /// `url`: "s3://bucket/prefix". Throws ConfigError for another address, or
  /// without keys. Sends nothing.
  explicit RemoteCheckpoints(const std::string& url);
  /// Parts of files must be a multiple of kChecksumBlockBytes.
  RemoteCheckpoints(
      const std::string& url, const storage::S3Settings& settings);
  ~RemoteCheckpoints();
  RemoteCheckpoints(const RemoteCheckpoints&) = delete;
  RemoteCheckpoints& operator=(const RemoteCheckpoints&) = delete;

  // What follows throws CheckpointError where the storage refuses or does not
  // answer.

  /// Lists, puts and removes a small object. Throws ConfigError where one of
  /// these fails, or where LATEST is not of this program.
  void check();

  /// The checkpoints, the newest first.
  std::vector<RemoteCheckpoint> list();

  /// Makes this process the only one that may publish there, and returns its
  /// mark. Removes unfinished uploads.
  std::string claim();

  /// Uploads a file into the checkpoint of that name. Any process may.
  void upload(const std::filesystem::path& file, const std::string& name);

  /// After claim(), when all files of the checkpoint `from` are uploaded: puts
  /// `metrics`, where there is such a file, and the manifest, then LATEST.
  /// Removes the checkpoints that the rule does not keep, and what crashes
  /// left; a failure of that is a warning.
  ///
  /// Throws CheckpointError for which is_taken_over() holds when another
  /// process has claimed the place since.
  void publish(
      const std::string& name, const std::filesystem::path& from,
      const KeepRule& rule, const std::filesystem::path& metrics);

  /// After claim(): leaves out checkpoints of later steps. Throws as publish().
  void discard_after(int64_t step);

  /// Removes all checkpoints of the run.
  void clear();

  /// Copies the newest checkpoint, unless it is older than or the same as the
  /// newest in RUN/checkpoints, and metrics.jsonl, where the run has none. Each
  /// block is compared with its checksum; a damaged checkpoint is left out with
  /// a warning in favour of the one before. Needs the right to write into the
  /// run's folder. Throws CheckpointError when all are damaged.
  std::optional<CheckpointPlace> fetch_newest(const std::filesystem::path& run);

  /// Ends requests that run, with an error.
  void cancel();

  /// "s3://bucket/prefix"
  const std::string& url() const { return url_; }

 private:
  struct State;
  struct Read;

  Read read_index();
  void write_index(const RemoteIndex& index);
  void remove_others();
  std::string
  fetch(const RemoteCheckpoint& one, const std::filesystem::path& run);

  const std::string url_;
  std::unique_ptr<State> state_;
};

/// Whether a message is that of a process whose place another one has taken.
bool is_taken_over(const std::string& message);

}  // namespace echelon
