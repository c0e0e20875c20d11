#include "echelon/monitoring/run_status.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::monitoring {
namespace {

using StatusJson = nlohmann::ordered_json;

constexpr size_t kMostStatusBytes = 4 << 20;

void put(
    StatusJson& json, const char* key, const std::optional<double>& value) {
  if (value) json[key] = *value;
}

std::optional<double> number_in(const StatusJson& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

StatusJson json_of(const RankStatus& rank) {
  StatusJson json = {
      {"rank", rank.rank},
      {"pid", rank.pid},
      {"up", rank.up},
      {"phase", rank.phase},
      {"progress", rank.progress}};
  put(json, "idle_seconds", rank.idle_seconds);
  put(json, "resident_bytes", rank.resident_bytes);
  if (rank.gpu) json["gpu"] = *rank.gpu;
  put(json, "gpu_busy", rank.gpu_busy);
  put(json, "gpu_memory_used", rank.gpu_memory_used);
  put(json, "gpu_memory_total", rank.gpu_memory_total);
  return json;
}

RankStatus rank_from(const StatusJson& json) {
  RankStatus rank;
  rank.rank = json.at("rank").get<int>();
  rank.pid = json.value("pid", 0);
  rank.up = json.value("up", false);
  rank.phase = json.value("phase", std::string());
  rank.progress = json.value("progress", uint64_t{0});
  rank.idle_seconds = number_in(json, "idle_seconds");
  rank.resident_bytes = number_in(json, "resident_bytes");
  if (json.contains("gpu")) rank.gpu = json["gpu"].get<int>();
  rank.gpu_busy = number_in(json, "gpu_busy");
  rank.gpu_memory_used = number_in(json, "gpu_memory_used");
  rank.gpu_memory_total = number_in(json, "gpu_memory_total");
  return rank;
}

}  // namespace

std::string process_name(pid_t pid) {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(boot, boot_id);
  std::ifstream file(format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  // The name, in parentheses, may hold anything. The start is field 22, and
  // the first one behind the name is number 3. A zombie has ended.
  const size_t behind = stat.rfind(") ");
  if (behind == std::string::npos) return "";
  std::istringstream fields(stat.substr(behind + 2));
  std::string field, state;
  for (int i = 3; i <= 22 && fields >> field; ++i) {
    if (i == 3) state = field;
  }
  if (state == "Z" || state == "X") return "";
  return format("{} {} {}", boot_id, pid, field);
}

std::string to_json(const RunStatus& status) {
  StatusJson json = {
      {"version", 1},
      {"host", status.host},
      {"pid", status.pid},
      {"process", status.process},
      {"beat", status.beat},
      {"time", status.time},
      {"started", status.started},
      {"coordinates", status.coordinates},
      {"world_size", status.world_size},
      {"hosts", status.num_hosts},
      {"generation", status.generation},
      {"restarts", status.restarts}};
  if (!status.failure.empty()) json["failure"] = status.failure;
  if (status.exit_code) json["exit_code"] = *status.exit_code;
  if (status.lost) json["lost"] = true;
  json["ranks"] = StatusJson::array();
  for (const auto& rank : status.ranks) json["ranks"].push_back(json_of(rank));
  return json.dump(-1, ' ', false, StatusJson::error_handler_t::replace) + "\n";
}

std::optional<RunStatus> parse_status(const std::string& text) {
  try {
    const auto json = StatusJson::parse(text);
    RunStatus status;
    status.host = json.at("host").get<std::string>();
    status.pid = json.at("pid").get<int>();
    status.process = json.value("process", std::string());
    status.beat = json.value("beat", uint64_t{0});
    status.time = json.at("time").get<double>();
    status.started = json.value("started", 0.0);
    status.coordinates = json.value("coordinates", true);
    status.world_size = json.value("world_size", 0);
    status.num_hosts = json.value("hosts", 1);
    status.generation = json.value("generation", 0);
    status.restarts = json.value("restarts", uint64_t{0});
    status.failure = json.value("failure", std::string());
    if (json.contains("exit_code")) {
      status.exit_code = json["exit_code"].get<int>();
    }
    status.lost = json.value("lost", false);
    for (const auto& rank : json.at("ranks")) {
      status.ranks.push_back(rank_from(rank));
    }
    return status;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::vector<RunStatus> read_statuses(const std::filesystem::path& run) {
  namespace fs = std::filesystem;
  std::vector<RunStatus> all;
  std::error_code error;
  fs::directory_iterator entries(run / kStatusFolder, error);
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (!name.starts_with("rank-") || !name.ends_with(".json")) continue;
    std::error_code ignored;
    if (!entries->is_regular_file(ignored) ||
        entries->file_size(ignored) > kMostStatusBytes) {
      continue;
    }
    try {
      auto status = parse_status(read_text_file(entries->path()));
      if (status) all.push_back(std::move(*status));
    } catch (const Error&) {  // it has just been removed
    }
  }
  const auto first = [](const RunStatus& status) {
    return status.ranks.empty() ? 0 : status.ranks.front().rank;
  };
  std::ranges::sort(all, {}, first);
  return all;
}

}  // namespace echelon::monitoring
