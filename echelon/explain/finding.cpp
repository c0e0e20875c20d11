#include "echelon/explain/finding.h"

#include <algorithm>
#include <utility>

namespace echelon {

std::string_view to_string(Fault fault) {
  switch (fault) {
    case Fault::data_loading:
      return "data loading";
    case Fault::exposed_communication:
      return "communication not overlapped";
    case Fault::bubble:
      return "bubble of the pipeline";
    case Fault::stage_imbalance:
      return "uneven stages";
    case Fault::rank_imbalance:
      return "uneven ranks";
    case Fault::straggler:
      return "straggler";
    case Fault::memory_pressure:
      return "memory near its limit";
    case Fault::recompute:
      return "recompute that is not needed";
    case Fault::small_batch:
      return "small batches";
  }
  return "";
}

std::string to_text(const std::vector<std::string>& settings) {
  std::string text;
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    text += (text.empty() ? "" : ", ") + setting.substr(0, equals) + " = " +
            setting.substr(equals + 1);
  }
  return text;
}

std::string to_tables(const std::vector<std::string>& settings) {
  std::vector<std::pair<std::string, std::string>> tables;  // in their order
  for (const std::string& setting : settings) {
    const size_t dot = setting.find('.');
    const size_t equals = setting.find('=');
    if (dot == std::string::npos || equals == std::string::npos) continue;
    const std::string table = setting.substr(0, dot);
    const std::string line = setting.substr(dot + 1, equals - dot - 1) + " = " +
                             setting.substr(equals + 1) + "\n";
    const auto found = std::ranges::find(
        tables, table, &std::pair<std::string, std::string>::first);
    if (found == tables.end()) {
      tables.emplace_back(table, line);
    } else {
      found->second += line;
    }
  }
  std::string text;
  for (const auto& [name, lines] : tables) {
    text += (text.empty() ? "[" : "\n[") + name + "]\n" + lines;
  }
  return text;
}

}  // namespace echelon
