// Roll-backs of a run, each a line of metrics.jsonl:
//
//   {"step":4,"rollback":{"from_step":8,"why":"…",
//     "first":{"epoch":0,"sample":48},"end":{"epoch":0,"sample":96}}}
//
// They stay in the file when it is truncated: whoever resumes the run leaves
// out the same samples.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace echelon::timeline {

/// Training went back to an earlier state, and left out samples.
struct Rollback {
  /// A place in the order of an epoch's samples.
  struct Place {
    int64_t epoch = 0;
    int64_t sample = 0;
    bool operator==(const Place&) const = default;
  };

  int64_t from_step = 0;  // whose loss or gradients were not finite
  int64_t step = 0;       // whose state training went back to
  std::string why;
  // The samples that were left out: from `first` to before `end`.
  Place first, end;

  bool operator==(const Rollback&) const = default;
};

/// "samples 48 to 95 of epoch 0"; "all from sample 48 of epoch 0 to sample 11
/// of epoch 1".
std::string samples_text(const Rollback& rollback);
/// "went back from step 8 to step 4, without samples 48 to 95 of epoch 0: the
/// loss of rank 1 is not a finite number".
std::string to_text(const Rollback& rollback);

/// A line of metrics.jsonl, with its newline.
std::string to_line(const Rollback& rollback);
/// Those in a text of such lines, in their order. Other lines are left out.
std::vector<Rollback> parse_rollbacks(const std::string& text);
/// Those of a file; none where there is no file. Throws DataError when it
/// cannot be read.
std::vector<Rollback> read_rollbacks(const std::filesystem::path& path);
/// Adds a line at the end of the file, which no MetricsWriter has open, and
/// syncs it. Throws Error with the path and the system's reason.
void append_rollback(
    const std::filesystem::path& path, const Rollback& rollback);

}  // namespace echelon::timeline
