#include "echelon/timeline/rollback.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::timeline {
namespace {

nlohmann::ordered_json place_json(const Rollback::Place& place) {
  return {{"epoch", place.epoch}, {"sample", place.sample}};
}

Rollback::Place place_from(const nlohmann::ordered_json& json) {
  return {json.at("epoch").get<int64_t>(), json.at("sample").get<int64_t>()};
}

}  // namespace

std::string samples_text(const Rollback& rollback) {
  const auto& first = rollback.first;
  const auto& end = rollback.end;
  if (first.epoch == end.epoch) {
    return format(
        "samples {} to {} of epoch {}", first.sample, end.sample - 1,
        first.epoch);
  }
  return format(
      "all from sample {} of epoch {} to before sample {} of epoch {}",
      first.sample, first.epoch, end.sample, end.epoch);
}

std::string to_text(const Rollback& rollback) {
  return format(
      "went back from step {} to step {}, without {}: {}", rollback.from_step,
      rollback.step, samples_text(rollback), rollback.why);
}

std::string to_line(const Rollback& rollback) {
  const nlohmann::ordered_json json = {
      {"step", rollback.step},
      {"rollback",
       {{"from_step", rollback.from_step},
        {"why", rollback.why},
        {"first", place_json(rollback.first)},
        {"end", place_json(rollback.end)}}}};
  return json.dump(
             -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

std::vector<Rollback> parse_rollbacks(const std::string& text) {
  std::vector<Rollback> all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    // Steps are the many; only a few lines are worth parsing.
    if (line.find("\"rollback\"") == std::string::npos) continue;
    try {
      const auto json = nlohmann::ordered_json::parse(line);
      const auto& inner = json.at("rollback");
      all.push_back(
          {.from_step = inner.at("from_step").get<int64_t>(),
           .step = json.at("step").get<int64_t>(),
           .why = inner.value("why", std::string()),
           .first = place_from(inner.at("first")),
           .end = place_from(inner.at("end"))});
    } catch (const nlohmann::json::exception&) {
      // Readers of metrics say so.
    }
  }
  return all;
}

std::vector<Rollback> read_rollbacks(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {};
  return parse_rollbacks(read_text_file(path));
}

void append_rollback(
    const std::filesystem::path& path, const Rollback& rollback) {
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const std::string line = to_line(rollback);
  std::string_view rest = line;
  int error = file < 0 ? errno : write_all(file, rest);
  if (error == 0 && ::fsync(file) != 0) error = errno;
  if (file >= 0 && ::close(file) != 0 && error == 0) error = errno;
  if (error != 0) {
    throw Error(format(
        "[metrics] cannot write {}: {}; without that line, a run that is "
        "resumed would not leave out the same samples",
        path.string(), std::strerror(error)));
  }
}

}  // namespace echelon::timeline
