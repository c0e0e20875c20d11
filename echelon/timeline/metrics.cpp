// Numbers that JSON lacks are null with a second key, which get() puts together
// again.
#include "echelon/timeline/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::timeline {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kBetweenWritesNs = 50'000'000;

void put(OrderedJson& json, const std::string& key, double value) {
  if (std::isfinite(value)) {
    json[key] = value;
  } else {
    json[key] = nullptr;
    json[key + "_is"] = format_number(value);
  }
}

std::optional<double> get(const OrderedJson& json, const std::string& key) {
  const auto found = json.find(key);
  if (found == json.end()) return std::nullopt;
  if (!found->is_null()) return found->get<double>();
  const auto text = json.value(key + "_is", std::string("nan"));
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

std::string to_line(const StepMetrics& m) {
  OrderedJson json;
  json["step"] = m.step;
  put(json, "epoch", m.epoch);
  if (m.simulated) {
    json["simulated"] = true;
  } else {
    put(json, "loss", m.loss);
  }
  put(json, "samples_per_second", m.samples_per_second);
  if (m.tokens_per_second) {
    put(json, "tokens_per_second", *m.tokens_per_second);
  }
  put(json, "step_seconds", m.step_seconds);
  put(json, "data_seconds", m.data_seconds);
  const auto put_if = [&](const char* key, const std::optional<double>& value) {
    if (value) put(json, key, *value);
  };
  put_if("forward_seconds", m.forward_seconds);
  put_if("backward_seconds", m.backward_seconds);
  put_if("communication_seconds", m.communication_seconds);
  put_if("update_seconds", m.update_seconds);
  put(json, "learning_rate", m.learning_rate);
  put_if("grad_norm", m.grad_norm);
  if (m.slowest_rank) json["slowest_rank"] = *m.slowest_rank;
  put_if("flops_per_second", m.flops_per_second);
  put_if("mfu", m.mfu);
  if (m.peak_memory_bytes) json["peak_memory_bytes"] = *m.peak_memory_bytes;
  put_if("loss_scale", m.loss_scale);
  if (m.skipped_steps) json["skipped_steps"] = *m.skipped_steps;
  if (!m.layer_grad_norms.empty()) {
    OrderedJson norms;
    for (const auto& [layer, norm] : m.layer_grad_norms) {
      put(norms, layer, norm);
    }
    json["layer_grad_norms"] = std::move(norms);
  }
  put_if("expert_imbalance", m.expert_imbalance);
  put_if("dropped_share", m.dropped_share);
  for (const auto& layer : m.expert_loads) {
    json["expert_loads"][layer.layer] = layer.chosen;
  }
  for (const auto& layer : m.expert_loads) {
    if (layer.dropped.empty()) continue;
    json["expert_drops"][layer.layer] = layer.dropped;
  }
  return json.dump() + "\n";
}

std::string to_line(const EvaluationMetrics& m) {
  OrderedJson inner;
  put(inner, "epoch", m.epoch);
  inner["samples"] = m.samples;
  if (m.accuracy) put(inner, "accuracy", *m.accuracy);
  put(inner, "loss", m.loss);
  put(inner, "seconds", m.seconds);
  if (m.tokens) inner["tokens"] = *m.tokens;
  if (m.perplexity) put(inner, "perplexity", *m.perplexity);
  if (!m.own.empty()) {
    OrderedJson own;
    for (const auto& [name, value] : m.own) put(own, name, value);
    inner["metrics"] = std::move(own);
  }
  OrderedJson json;
  json["step"] = m.step;
  json["evaluation"] = std::move(inner);
  return json.dump() + "\n";
}

std::string to_line(const Rebalance& m) {
  OrderedJson inner;
  inner["before"] = m.before;
  inner["seconds"] = m.seconds;
  inner["after"] = m.after;
  if (m.of == Divided::layers) {
    inner["of"] = "layers";
    inner["expected_seconds"] = m.expected_seconds;
  }
  OrderedJson json;
  json["step"] = m.step;
  json["rebalance"] = std::move(inner);
  return json.dump() + "\n";
}

StepMetrics step_from(const OrderedJson& json) {
  StepMetrics m;
  m.step = json.at("step").get<int64_t>();
  m.epoch = get(json, "epoch").value_or(0);
  m.simulated = json.value("simulated", false);
  m.loss = get(json, "loss").value_or(0);
  m.samples_per_second = get(json, "samples_per_second").value_or(0);
  m.tokens_per_second = get(json, "tokens_per_second");
  m.step_seconds = get(json, "step_seconds").value_or(0);
  m.data_seconds = get(json, "data_seconds").value_or(0);
  m.forward_seconds = get(json, "forward_seconds");
  m.backward_seconds = get(json, "backward_seconds");
  m.communication_seconds = get(json, "communication_seconds");
  m.update_seconds = get(json, "update_seconds");
  m.learning_rate = get(json, "learning_rate").value_or(0);
  m.grad_norm = get(json, "grad_norm");
  if (json.contains("slowest_rank")) {
    m.slowest_rank = json["slowest_rank"].get<int32_t>();
  }
  m.flops_per_second = get(json, "flops_per_second");
  m.mfu = get(json, "mfu");
  if (json.contains("peak_memory_bytes")) {
    m.peak_memory_bytes = json["peak_memory_bytes"].get<int64_t>();
  }
  m.loss_scale = get(json, "loss_scale");
  if (json.contains("skipped_steps")) {
    m.skipped_steps = json["skipped_steps"].get<int64_t>();
  }
  if (const auto found = json.find("layer_grad_norms"); found != json.end()) {
    for (const auto& [layer, value] : found->items()) {
      if (value.is_string()) continue;  // what a null is
      m.layer_grad_norms.emplace_back(layer, get(*found, layer).value_or(0));
    }
  }
  m.expert_imbalance = get(json, "expert_imbalance");
  m.dropped_share = get(json, "dropped_share");
  if (const auto found = json.find("expert_loads"); found != json.end()) {
    const auto drops = json.value("expert_drops", OrderedJson::object());
    for (const auto& [layer, loads] : found->items()) {
      m.expert_loads.push_back(
          {layer, loads.get<std::vector<int64_t>>(),
           drops.value(layer, std::vector<int64_t>())});
    }
  }
  return m;
}

EvaluationMetrics evaluation_from(const OrderedJson& json) {
  const OrderedJson& inner = json.at("evaluation");
  EvaluationMetrics m;
  m.step = json.at("step").get<int64_t>();
  m.epoch = get(inner, "epoch").value_or(0);
  m.samples = inner.value("samples", int64_t{0});
  m.accuracy = get(inner, "accuracy");
  m.loss = get(inner, "loss").value_or(0);
  m.seconds = get(inner, "seconds").value_or(0);
  if (inner.contains("tokens")) m.tokens = inner["tokens"].get<int64_t>();
  m.perplexity = get(inner, "perplexity");
  if (const auto found = inner.find("metrics"); found != inner.end()) {
    for (const auto& [name, value] : found->items()) {
      if (value.is_string()) continue;  // what a null is
      m.own.emplace_back(name, get(*found, name).value_or(0));
    }
  }
  return m;
}

Rebalance rebalance_from(const OrderedJson& json) {
  const OrderedJson& inner = json.at("rebalance");
  return {
      .step = json.at("step").get<int64_t>(),
      .before = inner.at("before").get<std::vector<int64_t>>(),
      .seconds = inner.at("seconds").get<std::vector<double>>(),
      .after = inner.at("after").get<std::vector<int64_t>>(),
      .of = inner.value("of", "samples") == "layers" ? Divided::layers
                                                     : Divided::samples,
      .expected_seconds = inner.value("expected_seconds", 0.0)};
}

// Readers rely on a positive number for each rank.
bool is_whole(const Rebalance& one) {
  return !one.after.empty() && one.before.size() == one.after.size() &&
         (one.of == Divided::layers ? !one.seconds.empty()
                                    : one.seconds.size() == one.after.size()) &&
         std::ranges::min(one.before) > 0 && std::ranges::min(one.after) > 0;
}

// The step of what a line holds; empty: it holds nothing that has one.
std::optional<int64_t> step_of(const MetricsFile& line) {
  if (!line.steps.empty()) return line.steps[0].step;
  if (!line.evaluations.empty()) return line.evaluations[0].step;
  if (!line.rebalances.empty()) return line.rebalances[0].step;
  return std::nullopt;
}

// Calls `take` with what each whole line holds, one step, one evaluation, one
// division of the batch or nothing (a roll-back), and with its text. A line
// that is not metrics goes to `wrong`, with its number and the reason. Returns
// where the last whole line ends.
template <typename Take, typename Wrong>
size_t
each_line(const std::string& text, const Take& take, const Wrong& wrong) {
  size_t begin = 0;
  for (int64_t number = 1; begin < text.size(); ++number) {
    const size_t newline = text.find('\n', begin);
    if (newline == std::string::npos) break;
    const auto written =
        std::string_view(text).substr(begin, newline + 1 - begin);
    MetricsFile line;
    try {
      const auto json = OrderedJson::parse(written);
      if (json.contains("evaluation")) {
        line.evaluations.push_back(evaluation_from(json));
      } else if (json.contains("rebalance")) {
        Rebalance one = rebalance_from(json);
        if (is_whole(one)) line.rebalances.push_back(std::move(one));
      } else if (!json.contains("rollback")) {
        line.steps.push_back(step_from(json));
      }
    } catch (const nlohmann::json::exception& error) {
      wrong(number, json_reason(error));
      begin = newline + 1;
      continue;
    }
    take(std::move(line), written);
    begin = newline + 1;
  }
  return begin;
}

[[noreturn]] void
fail(const std::filesystem::path& path, int error, int64_t lines) {
  throw Error(format(
      "[metrics] cannot write {}: {}; the {} lines that this run wrote before "
      "are kept",
      path.string(), std::strerror(error), lines));
}

// The first name beside the file that is free.
std::filesystem::path damaged_path(const std::filesystem::path& path) {
  const auto name = "damaged-" + path.filename().string();
  auto free = path.parent_path() / name;
  std::error_code error;
  for (int copy = 2;
       std::filesystem::exists(std::filesystem::symlink_status(free, error));
       ++copy) {
    free = path.parent_path() / format("{}-{}", name, copy);
  }
  return free;
}

}  // namespace

std::string to_text(const EvaluationMetrics& metrics) {
  std::string first;
  if (metrics.perplexity)
    first = format("perplexity {:.2f}, ", *metrics.perplexity);
  const std::string loss = format("loss {:.4f}", metrics.loss);
  first += metrics.accuracy
               ? format("accuracy {:.2f} %", 100 * *metrics.accuracy)
               : loss;
  std::string text = format(
      "{} on {} held-out {}", first, metrics.tokens.value_or(metrics.samples),
      metrics.tokens ? "tokens" : "samples");
  if (metrics.accuracy) text += ", " + loss;
  for (const auto& [name, value] : metrics.own) {
    text += format(", {} {:.4f}", name, value);
  }
  return text;
}

MetricsWriter::MetricsWriter(
    const std::filesystem::path& path, std::function<int64_t()> now_ns)
    : path_(path), now_ns_(std::move(now_ns)) {
  if (const int error = file_.open(path); error != 0) fail(path, error, 0);
}

MetricsWriter::~MetricsWriter() {
  try {
    flush();
  } catch (...) {  // another error may be on its way
  }
}

void MetricsWriter::append(const StepMetrics& metrics) {
  kept_.push_back(metrics);
  if (!written_ns_ || now_ns_() - *written_ns_ >= kBetweenWritesNs) flush();
}

void MetricsWriter::append(const EvaluationMetrics& metrics) {
  take_kept();
  unwritten_ += to_line(metrics);
  write();
}

void MetricsWriter::append(const Rebalance& rebalance) {
  take_kept();
  unwritten_ += to_line(rebalance);
  write();
}

void MetricsWriter::flush() {
  take_kept();
  write();
}

void MetricsWriter::take_kept() {
  for (const auto& metrics : std::exchange(kept_, {})) {
    unwritten_ += to_line(metrics);
  }
}

// After an error unwritten_ has the lines that the file lacks.
void MetricsWriter::write() {
  const int error = file_.append(unwritten_);
  if (error != 0) fail(path_, error, file_.num_lines());
  written_ns_ = now_ns_();
}

std::optional<double> median_of(
    const std::vector<StepMetrics>& steps,
    const std::function<double(const StepMetrics&)>& value) {
  std::vector<double> values;
  for (const auto& step : steps) {
    if (std::isfinite(value(step))) values.push_back(value(step));
  }
  if (values.empty()) return std::nullopt;
  const auto middle =
      values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

void RecentSteps::Sum::add(const Sum& other, double sign) {
  loss += sign * other.loss;
  samples += sign * other.samples;
  tokens += sign * other.tokens;
  seconds += sign * other.seconds;
  losses += sign * other.losses;
}

void RecentSteps::add(const StepMetrics& step) {
  const bool finite = std::isfinite(step.loss);
  steps_.push_back(
      {.loss = finite ? step.loss : 0,
       .losses = finite ? 1.0 : 0.0,
       .samples = step.samples_per_second * step.step_seconds,
       .tokens = step.tokens_per_second.value_or(0) * step.step_seconds,
       .seconds = step.step_seconds});
  sum_.add(steps_.back(), 1);
  if (static_cast<int64_t>(steps_.size()) > most_) {
    sum_.add(steps_.front(), -1);
    steps_.pop_front();
  }
  // A huge loss costs the sum digits. Once it has left, the sum starts anew.
  if (++added_ % most_ != 0) return;
  sum_ = {};
  for (const auto& one : steps_) sum_.add(one, 1);
}

double final_loss(const std::vector<StepMetrics>& steps) {
  RecentSteps recent(kFinalSteps);
  for (size_t i = steps.size() - std::min(kFinalSteps, steps.size());
       i < steps.size(); ++i) {
    recent.add(steps[i]);
  }
  return recent.loss();
}

MetricsFile parse_metrics(const std::string& lines) {
  MetricsFile all;
  each_line(
      lines,
      [&](MetricsFile line, std::string_view) {
        for (auto& step : line.steps) all.steps.push_back(std::move(step));
        for (auto& one : line.evaluations) all.evaluations.push_back(one);
      },
      [](int64_t, const std::string&) {});
  return all;
}

MetricsFile read_metrics(const std::filesystem::path& path) {
  const std::string text = read_text_file(path);
  MetricsFile file;
  const size_t end = each_line(
      text,
      [&](MetricsFile line, std::string_view) {
        for (auto& step : line.steps) file.steps.push_back(step);
        for (auto& one : line.evaluations) file.evaluations.push_back(one);
        for (auto& one : line.rebalances) file.rebalances.push_back(one);
      },
      [&](int64_t number, const std::string& reason) {
        throw DataError(format(
            "{}:{}: no line of metrics ({}); remove the line to read the rest",
            path.string(), number, reason));
      });
  file.truncated = end < text.size();
  return file;
}

std::string truncate_metrics(const std::filesystem::path& path, int64_t step) {
  const std::string text = read_text_file(path);
  std::string kept;
  std::vector<int64_t> wrong;
  bool cut = false;    // a later step has come
  bool moved = false;  // a roll-back behind it stays
  each_line(
      text,
      [&](const MetricsFile& line, std::string_view written) {
        const auto of_line = step_of(line);
        if (!of_line) {
          moved |= cut;
          kept += written;
          return;
        }
        cut |= *of_line > step;
        if (!cut) kept += written;
      },
      [&](int64_t number, const std::string&) {
        if (!cut) wrong.push_back(number);
      });
  if (wrong.empty() && moved) {
    write_file_atomically(path, kept);
    return "";
  }
  if (wrong.empty()) {
    if (kept.size() < text.size() &&
        ::truncate(path.c_str(), static_cast<off_t>(kept.size())) != 0) {
      fail(path, errno, 0);
    }
    return "";
  }
  const auto damaged = damaged_path(path);
  std::error_code error;
  if (!std::filesystem::copy_file(path, damaged, error)) {
    fail(damaged, error.value(), 0);
  }
  write_file_atomically(path, kept);
  return format(
      "{}:{}: no line of metrics{}; left out, and the file as it was is now {}",
      path.string(), wrong[0],
      wrong.size() == 1
          ? ""
          : format(", like {} after it", counted(wrong.size() - 1, "line")),
      damaged.filename().string());
}

}  // namespace echelon::timeline
