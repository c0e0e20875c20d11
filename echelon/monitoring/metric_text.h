// Metrics as the text that Prometheus reads (exposition format 0.0.4).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/monitoring/job_board.h"

namespace echelon::monitoring {

/// What a page of such text says that it is.
inline constexpr const char* kMetricsType =
    "text/plain; version=0.0.4; charset=utf-8";

struct Metric {
  std::string_view name;
  std::string_view type;    // counter, gauge or histogram
  std::string_view labels;  // besides those of the whole page: "rank, host"
  std::string_view help;
};

/// Names and values. Any bytes may be a value.
using Labels = std::vector<std::pair<std::string_view, std::string>>;

class MetricText {
 public:
  /// `known`: all that the page may have, and what outlives this object. Every
  /// line has the labels `common`.
  MetricText(std::span<const Metric> known, const Labels& common);

  /// The values that follow are this metric's. Without one it is left out.
  void begin(std::string_view name);
  void value(double value, const Labels& labels = {});
  void value(std::optional<double> maybe, const Labels& labels = {});
  void value(const Durations& durations, const Labels& labels = {});

  /// One metric with one value.
  template <typename Value>
  void one(std::string_view name, const Value& given) {
    begin(name);
    value(given);
  }

  std::string take() { return std::move(text_); }

 private:
  void
  line(std::string_view suffix, const Labels& labels, const std::string& value);

  const std::span<const Metric> known_;
  std::string common_;  // as they are written
  const Metric* metric_ = nullptr;
  bool said_ = false;
  std::string text_;
};

}  // namespace echelon::monitoring
