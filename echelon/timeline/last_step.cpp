#include "echelon/timeline/last_step.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "echelon/text/text_file.h"

namespace echelon::timeline {
namespace {

constexpr uintmax_t kMostShot = 16 << 20;  // bytes of a file
constexpr size_t kMostShots = 64;
constexpr int32_t kLastRank = 1 << 20;

// The ranks that have a file in the folder of last steps, ascending.
std::vector<int32_t> ranks_in(const std::filesystem::path& folder) {
  std::vector<int32_t> ranks;
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  for (; !error && entries != std::filesystem::directory_iterator();
       entries.increment(error)) {
    std::error_code ignored;
    const std::string name = entries->path().filename().string();
    int32_t rank = -1;
    if (std::sscanf(name.c_str(), "rank-%9d.msgpack", &rank) != 1 || rank < 0 ||
        rank > kLastRank ||
        name != std::filesystem::path(last_step_file(rank)).filename() ||
        entries->file_size(ignored) > kMostShot) {
      continue;
    }
    ranks.push_back(rank);
  }
  std::ranges::sort(ranks);
  if (ranks.size() > kMostShots) ranks.resize(kMostShots);
  return ranks;
}

}  // namespace

std::optional<Timeline> read_last_step(const std::filesystem::path& run) {
  std::vector<RankSpans> ranks;
  for (const int32_t rank : ranks_in(run / kLastStepFolder)) {
    auto one = rank_spans_of(rank, read_text_file(run / last_step_file(rank)));
    // Others are of an earlier job of the run.
    if (one.spans.empty() ||
        (!ranks.empty() &&
         one.spans.front().step != ranks.front().spans.front().step)) {
      continue;
    }
    ranks.push_back(std::move(one));
  }
  if (ranks.empty()) return std::nullopt;
  return merge_spans(std::move(ranks), "");
}

}  // namespace echelon::timeline
