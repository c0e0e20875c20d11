// Predicts every row of a table of measured steps (doc/published.md).
//
//   published_steps TABLE.csv             each file's errors, for people
//   published_steps TABLE.csv --json      every row, and the same errors
//   published_steps TABLE.csv --json --planned
//                                         also what the planner says of each
//                                         layout
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/published/planned.h"
#include "benchmarks/published/predict.h"
#include "benchmarks/published/table_errors.h"
#include "echelon/error.h"
#include "echelon/text/table.h"

namespace echelon {
namespace {

using Json = nlohmann::ordered_json;

Json row_json(const RowPrediction& one) {
  Json json = {{"row", one.row.number}, {"line", one.row.line}};
  if (!one.row.file.empty()) json["file"] = one.row.file;
  if (one.predicted()) {
    json["step_seconds"] = one.step.step_seconds;
    json["memory_gib"] = one.memory_gib();
    json["fits"] = one.step.fits;
  } else {
    json["step_seconds"] = nullptr;
    json["memory_gib"] = nullptr;
    json["excluded"] = one.excluded;
  }
  if (one.row.step_seconds > 0) {
    json["measured_step_seconds"] = one.row.step_seconds;
    if (one.predicted()) json["step_error"] = one.step_error();
  }
  if (one.row.memory_gib > 0) {
    json["measured_memory_gib"] = one.row.memory_gib;
    if (one.predicted()) json["memory_error"] = one.memory_error();
  }
  if (one.predicted()) {
    const auto& parts = one.step.parts;
    double exposed = 0;
    for (const double axis : parts.exposed) exposed += axis;
    json["stack"] = one.strategy.framework;
    json["strategy"] = cost::to_string(one.strategy);
    json["parts"] = {
        {"matrix", parts.matrix},       {"memory", parts.memory},
        {"recompute", parts.recompute}, {"exposed", exposed},
        {"bubble", parts.bubble},       {"optimizer", parts.optimizer},
        {"other", parts.other}};
  }
  return json;
}

void add_planned(const std::vector<RowPrediction>& predictions, Json& rows) {
  const auto seconds = planned_seconds(predictions);
  for (size_t i = 0; i < seconds.size(); ++i) {
    rows[i]["planned_step_seconds"] =
        seconds[i] ? Json(*seconds[i]) : Json(nullptr);
  }
}

Json errors_json(const TableErrors& errors) {
  Json json = {
      {"file", errors.file},
      {"rows", errors.rows},
      {"predicted", errors.predicted},
      {"with_step", errors.with_step},
      {"mean_absolute_error", errors.mean},
      {"median_absolute_error", errors.median},
      {"bias", errors.bias},
      {"with_memory", errors.with_memory},
      {"memory_mean_absolute_error", errors.memory_mean},
      {"memory_bias", errors.memory_bias}};
  json["excluded"] = Json::array();
  for (const auto& [reason, rows] : errors.excluded) {
    json["excluded"].push_back({{"reason", reason}, {"rows", rows}});
  }
  return json;
}

std::string percent(double share, int64_t of, bool sign) {
  if (of == 0) return "";
  char text[32];
  std::snprintf(text, sizeof(text), sign ? "%+.1f %%" : "%.1f %%", 100 * share);
  return text;
}

void print_text(const std::vector<TableErrors>& files) {
  std::vector<std::vector<std::string>> rows = {
      {"file", "rows", "predicted", "mean error", "median", "bias", "memory",
       "bias"}};
  for (const auto& e : files) {
    rows.push_back(
        {e.file.empty() ? "(no file)" : e.file, std::to_string(e.rows),
         std::to_string(e.predicted), percent(e.mean, e.with_step, false),
         percent(e.median, e.with_step, false),
         percent(e.bias, e.with_step, true),
         percent(e.memory_mean, e.with_memory, false),
         percent(e.memory_bias, e.with_memory, true)});
  }
  std::cout << aligned(rows);
  bool first = true;
  for (const auto& e : files) {
    for (const auto& [reason, count] : e.excluded) {
      if (first) std::cout << "\nnot predicted\n";
      first = false;
      std::cout << "  " << (e.file.empty() ? "" : e.file + ", ") << count
                << (count == 1 ? " row: " : " rows: ") << reason << "\n";
    }
  }
}

int predict(const std::string& path, bool json, bool planned) {
  const auto predictions = predict_table(path);
  const auto files = errors_by_file(predictions);
  if (!json) {
    print_text(files);
    return 0;
  }
  Json out = {
      {"table", path}, {"rows", Json::array()}, {"files", Json::array()}};
  for (const auto& one : predictions) out["rows"].push_back(row_json(one));
  if (planned) add_planned(predictions, out["rows"]);
  for (const auto& one : files) out["files"].push_back(errors_json(one));
  std::cout << out.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
  return 0;
}

constexpr const char* kUsage =
    "usage: published_steps TABLE.csv [--json [--planned]]\n";

int run(const std::vector<std::string>& words) {
  std::string table;
  bool json = false;
  bool planned = false;
  for (const auto& word : words) {
    if (word == "--json") {
      json = true;
    } else if (word == "--planned") {
      planned = true;
    } else if (word[0] != '-' && table.empty()) {
      table = word;
    } else {
      throw ConfigError(
          "published_steps: unexpected \"" + word + "\"\n" + kUsage);
    }
  }
  if (table.empty() || (planned && !json)) throw ConfigError(kUsage);
  return predict(table, json, planned);
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) try {
  return echelon::run({argv + 1, argv + argc});
} catch (const echelon::ConfigError& error) {
  std::cerr << error.what() << "\n";
  return 2;
} catch (const echelon::DataError& error) {
  std::cerr << error.what() << "\n";
  return 3;
}
