#include "echelon/monitoring/metric_text.h"

#include <algorithm>
#include <cmath>

#include "echelon/text/check.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"

namespace echelon::monitoring {
namespace {

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return format("{}", value);
}

// A quoted label. Bytes that are not UTF-8 would spoil the whole page.
std::string label_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : plain(text)) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

void add_labels(std::string& text, const Labels& labels) {
  for (const auto& [name, label] : labels) {
    if (!text.empty()) text += ",";
    text += format("{}={}", name, label_text(label));
  }
}

}  // namespace

MetricText::MetricText(std::span<const Metric> known, const Labels& common)
    : known_(known) {
  add_labels(common_, common);
}

void MetricText::begin(std::string_view name) {
  const auto found = std::ranges::find(known_, name, &Metric::name);
  ECHELON_CHECK(found != known_.end(), "metrics() lacks {}", name);
  metric_ = &*found;
  said_ = false;
}

void MetricText::value(double value, const Labels& labels) {
  line("", labels, number(value));
}

void MetricText::value(std::optional<double> maybe, const Labels& labels) {
  if (maybe) value(*maybe, labels);
}

void MetricText::value(const Durations& durations, const Labels& labels) {
  uint64_t sum = 0;
  for (size_t i = 0; i < durations.numbers.size(); ++i) {
    sum += durations.numbers[i];
    const bool last = i == durations.bounds.size();
    Labels all = labels;
    all.emplace_back("le", last ? "+Inf" : number(durations.bounds[i]));
    line("_bucket", all, format("{}", sum));
  }
  line("_sum", labels, number(durations.sum));
  line("_count", labels, format("{}", sum));
}

void MetricText::line(
    std::string_view suffix, const Labels& labels, const std::string& value) {
  if (!std::exchange(said_, true)) {
    text_ += format(
        "# HELP {} {}\n# TYPE {} {}\n", metric_->name, metric_->help,
        metric_->name, metric_->type);
  }
  std::string all = common_;
  add_labels(all, labels);
  text_ += metric_->name;
  text_ += suffix;
  if (!all.empty()) text_ += "{" + all + "}";
  text_ += format(" {}\n", value);
}

}  // namespace echelon::monitoring
