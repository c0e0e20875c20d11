#include "echelon/checkpoint/remote/remote_index.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr std::string_view kWriter = "writer ";
constexpr size_t kMark = 8;  // digits

bool is_hex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

std::string
remote_name(int64_t step, const std::string& writer, int64_t count) {
  return format("{}-{}-{}", folder_files::step_name(step), writer, count);
}

std::optional<int64_t> step_of_remote(std::string_view name) {
  const size_t count = name.rfind('-');
  if (count == std::string_view::npos || count < kMark + 1) return {};
  const size_t mark = count - kMark;
  const auto digits = name.substr(count + 1);
  const bool good =
      name[mark - 1] == '-' && is_hex(name.substr(mark, kMark)) &&
      !digits.empty() &&
      digits.find_first_not_of("0123456789") == std::string_view::npos;
  if (!good) return {};
  return folder_files::step_of(name.substr(0, mark - 1));
}

std::string to_text(const RemoteIndex& index) {
  std::string text;
  for (const auto& one : index.checkpoints) {
    text += one.name;
    if (one.metric) text += format(" {}", *one.metric);
    text += "\n";
  }
  return text + std::string(kWriter) + index.writer + "\n";
}

std::optional<RemoteIndex> parse_remote_index(const std::string& text) {
  RemoteIndex index;
  if (!text.ends_with('\n')) return {};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!index.writer.empty()) return {};  // its line is the last one
    if (line.starts_with(kWriter)) {
      index.writer = line.substr(kWriter.size());
      continue;
    }
    const size_t space = std::min(line.find(' '), line.size());
    RemoteCheckpoint one{.name = line.substr(0, space)};
    const auto step = step_of_remote(one.name);
    if (!step) return {};
    one.step = *step;
    if (space < line.size()) {
      double metric = 0;
      const char* end = line.data() + line.size();
      const auto read = std::from_chars(line.data() + space + 1, end, metric);
      if (read.ec != std::errc() || read.ptr != end) return {};
      one.metric = metric;
    }
    index.checkpoints.push_back(std::move(one));
  }
  if (index.writer.empty()) return {};
  return index;
}

void add(RemoteIndex& index, RemoteCheckpoint added, const KeepRule& rule) {
  auto& all = index.checkpoints;
  if (added.metric && !std::isfinite(*added.metric)) added.metric.reset();
  all.insert(all.begin(), std::move(added));
  const RemoteCheckpoint* best = nullptr;
  for (const auto& one : all) {
    if (rule.best.empty() || !one.metric) continue;
    const bool better =
        best == nullptr || (rule.best_is_largest ? *one.metric > *best->metric
                                                 : *one.metric < *best->metric);
    if (better) best = &one;
  }
  const auto newest = static_cast<size_t>(std::max<int64_t>(2, rule.newest));
  std::vector<RemoteCheckpoint> kept;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i < newest || &all[i] == best) kept.push_back(all[i]);
  }
  all = std::move(kept);
}

}  // namespace echelon
