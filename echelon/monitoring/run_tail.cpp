#include "echelon/monitoring/run_tail.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/error.h"
#include "echelon/monitoring/growing_file.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::monitoring {
namespace {

using nlohmann::json;

constexpr size_t kMostLines = 4096;           // that are known by their text
constexpr int64_t kMostOfBefore = 256 << 10;  // of what was there at first

// JSON has no NaN: such a figure is null, and KEY_is says which it is.
std::optional<double> get(const json& line, const std::string& key) {
  const auto found = line.find(key);
  if (found == line.end()) return std::nullopt;
  if (found->is_number()) return found->get<double>();
  const auto is = line.find(key + "_is");
  const std::string text =
      is != line.end() && is->is_string() ? is->get<std::string>() : "nan";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "inf") return kInfinity;
  if (text == "-inf") return -kInfinity;
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

RunTail::RunTail(std::filesystem::path folder) : folder_(std::move(folder)) {
  figures_.step_seconds = Durations(
      {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
       25, 50, 100});
  std::error_code error;
  const auto size =
      std::filesystem::file_size(folder_ / "metrics.jsonl", error);
  if (!error) before_ = static_cast<int64_t>(size);
  poll();
}

void RunTail::poll() {
  look_at_checkpoints();
  const FileDescriptor file(
      ::open((folder_ / "metrics.jsonl").c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0) return;
  const auto size = static_cast<int64_t>(status.st_size);
  forget_lost_lines(file.fd(), size);
  // Of a long run that goes on, only the end.
  if (lines_.empty() && read_ == 0 && before_ > kMostOfBefore) {
    const int64_t begin = before_ - kMostOfBefore;
    const auto text = read_at(file.fd(), begin, kMostOfBefore);
    const size_t line = text.find('\n');
    read_ = line == std::string::npos ? before_
                                      : begin + static_cast<int64_t>(line) + 1;
  }
  read_ = read_lines(
      file.fd(), read_, size, [&](int64_t begin, std::string_view lines) {
        read_ = begin;
        take(lines);
      });
}

void RunTail::forget_lost_lines(int file, int64_t size) {
  const bool any = !lines_.empty();
  while (!lines_.empty()) {
    const Line& last = lines_.back();
    if (last.begin + last.size <= size &&
        std::hash<std::string>()(read_at(file, last.begin, last.size)) ==
            last.hash) {
      break;
    }
    if (last.step) {
      ++figures_.lost_steps;
      --newest_;
    }
    if (last.counts) figures_.kept_seconds -= last.seconds;
    read_ = last.begin;
    before_ = std::min(before_, read_);
    lines_.pop_back();
  }
  if (any && lines_.empty() && read_ > 0) {
    // More lines are gone than are known: those before them are read again.
    skipped_to_ = newest_;
    read_ = before_ = 0;
  }
}

void RunTail::take(std::string_view text) {
  while (!text.empty()) {
    const size_t size = text.find('\n') + 1;
    take_line(text.substr(0, size));
    text.remove_prefix(size);
  }
}

void RunTail::take_line(std::string_view text) {
  Line line{
      .begin = read_,
      .size = static_cast<int64_t>(text.size()),
      .hash = std::hash<std::string>()(std::string(text))};
  read_ += line.size;
  const json value = json::parse(text, nullptr, false);
  line.step = value.is_object() && value.contains("loss") &&
              value.contains("step") && value["step"].is_number_integer();
  if (line.step) {
    newest_ = value["step"].get<int64_t>();
    line.seconds = get(value, "step_seconds").value_or(0);
    line.counts = line.begin >= before_ && newest_ > skipped_to_;
    figures_.step = newest_;
    figures_.loss = get(value, "loss");
    figures_.grad_norm = get(value, "grad_norm");
    figures_.learning_rate = get(value, "learning_rate");
    figures_.samples_per_second = get(value, "samples_per_second");
    figures_.tokens_per_second = get(value, "tokens_per_second");
    figures_.newest_seconds = get(value, "step_seconds");
    figures_.skipped_steps.reset();
    if (const auto skipped = get(value, "skipped_steps")) {
      figures_.skipped_steps = static_cast<int64_t>(*skipped);
    }
  }
  if (line.counts) {
    skipped_to_ = -1;
    ++figures_.steps;
    figures_.step_seconds.add(line.seconds);
    for (size_t i = 0; i < kStepPhases.size(); ++i) {
      figures_.phase_seconds[i] +=
          get(value, std::string(kStepPhases[i]) + "_seconds").value_or(0);
    }
    figures_.kept_seconds += line.seconds;
  }
  lines_.push_back(line);
  if (lines_.size() > kMostLines) lines_.pop_front();
}

void RunTail::look_at_checkpoints() {
  std::optional<CheckpointPlace> newest;
  try {
    newest = latest_checkpoint(folder_ / "checkpoints");
  } catch (const Error&) {
    return;  // it cannot be read now
  }
  if (!newest) return;
  struct statx times {};
  // The folder was made when the save began, and its last file is the one that
  // makes it whole.
  if (::statx(
          AT_FDCWD, newest->path.c_str(), 0, STATX_MTIME | STATX_BTIME,
          &times) != 0) {
    return;
  }
  using std::chrono::nanoseconds;
  using std::chrono::seconds;
  const auto since_epoch = [](const statx_timestamp& time) {
    return seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
  };
  const nanoseconds end = since_epoch(times.stx_mtime);
  figures_.checkpoint = std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(end));
  figures_.checkpoint_seconds.reset();
  if ((times.stx_mask & STATX_BTIME) == 0) return;
  const std::chrono::duration<double> took = end - since_epoch(times.stx_btime);
  if (took.count() >= 0) figures_.checkpoint_seconds = took.count();
}

}  // namespace echelon::monitoring
