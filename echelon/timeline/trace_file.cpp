// Identifiers are hexadecimal, integers of 64 bits are strings, and enums are
// numbers, which is where OTLP/JSON differs from protobuf's JSON.
#include "echelon/timeline/trace_file.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/timeline/recorder.h"

namespace echelon::timeline {
namespace {

constexpr int64_t kBetweenTracesNs = 1'000'000'000;
// Readers of lines have limits: the OpenTelemetry Collector's is 1 MiB.
constexpr size_t kMostOfLine = 256 << 10;
constexpr int kTraceIdBytes = 16, kSpanIdBytes = 8;
constexpr const char* kInternal = "1";  // SPAN_KIND_INTERNAL

// Texts are put together piece by piece: a run has six spans a step, and steps
// of a millisecond.
template <class... Pieces>
void put(std::string& text, const Pieces&... pieces) {
  (text.append(pieces), ...);
}

std::string string_text(const std::string& text) {
  const bool plain = std::ranges::all_of(text, [](char c) {
    return c >= ' ' && c <= '~' && c != '"' && c != '\\';
  });
  if (plain) return '"' + text + '"';
  using nlohmann::json;
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string number_text(double value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  return format("{}", value);
}

void put_value(
    std::string& list, const char* key, const char* kind,
    const std::string& value) {
  put(list, list.empty() ? "" : ",", R"({"key":")", key, R"(","value":{")",
      kind, R"(":)", value, "}}");
}

void put_attribute(std::string& list, const char* key, double value) {
  put_value(list, key, "doubleValue", number_text(value));
}

void put_attribute(std::string& list, const char* key, int64_t value) {
  put_value(list, key, "intValue", '"' + std::to_string(value) + '"');
}

void put_attribute(
    std::string& list, const char* key, const std::string& value) {
  put_value(list, key, "stringValue", string_text(value));
}

template <class Value>
void put_attribute(
    std::string& list, const char* key, const std::optional<Value>& value) {
  if (value) put_attribute(list, key, *value);
}

std::string list_of(const Attributes& attributes) {
  std::string list;
  for (const auto& [key, value] : attributes) {
    std::visit(
        [&](const auto& one) { put_attribute(list, key.c_str(), one); }, value);
  }
  return list;
}

std::string attributes_of(const StepMetrics& step) {
  std::string list;
  put_attribute(list, "echelon.step", step.step);
  put_attribute(list, "echelon.epoch", step.epoch);
  put_attribute(list, "echelon.loss", step.loss);
  put_attribute(list, "echelon.step_seconds", step.step_seconds);
  put_attribute(
      list, "echelon.communication_seconds", step.communication_seconds);
  put_attribute(list, "echelon.samples_per_second", step.samples_per_second);
  put_attribute(list, "echelon.tokens_per_second", step.tokens_per_second);
  put_attribute(list, "echelon.learning_rate", step.learning_rate);
  put_attribute(list, "echelon.grad_norm", step.grad_norm);
  put_attribute(list, "echelon.mfu", step.mfu);
  if (step.slowest_rank) {
    put_attribute(list, "echelon.slowest_rank", int64_t{*step.slowest_rank});
  }
  return list;
}

int64_t wall_offset_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() -
         steady_now_ns();
}

}  // namespace

TraceFile::TraceFile(
    const std::filesystem::path& path, const Attributes& resource,
    const std::string& version)
    : path_(path),
      head_(format(
          R"({{"resourceSpans":[{{"resource":{{"attributes":[{}]}},)"
          R"("scopeSpans":[{{"scope":{{"name":"echelon","version":{}}},)"
          R"("spans":[)",
          list_of(resource), string_text(version))),
      random_([] {
        std::random_device device;
        return (uint64_t{device()} << 32) ^ device();
      }()),
      wall_offset_ns_(wall_offset_now()) {
  if (const int error = file_.open(path); error != 0) {
    throw Error(format(
        "[otlp] cannot write {}: {}", path_.string(), std::strerror(error)));
  }
}

TraceFile::~TraceFile() {
  try {
    flush();
  } catch (...) {  // another error may be on its way
  }
}

void TraceFile::append(
    const StepMetrics& step, Phase time, const std::vector<Phase>& parts) {
  close_step();
  const int64_t now = steady_now_ns();
  const bool due = !written_ns_ || now - *written_ns_ >= kBetweenTracesNs;
  if (due) {
    end_line();
    wall_offset_ns_ = wall_offset_now();  // it may have been set
  }
  step_ = OpenStep{
      new_id(kTraceIdBytes), new_id(kSpanIdBytes), step, std::move(time)};
  for (const Phase& part : parts) append(part);
  if (due) write_lines();
}

void TraceFile::append(const Phase& phase, const Attributes& attributes) {
  std::string list = list_of(attributes);
  put_attribute(list, "echelon.seconds", phase.seconds);
  const std::string rest =
      list.empty() ? "" : R"(,"attributes":[)" + list + "]";
  const std::string span = new_id(kSpanIdBytes);
  if (step_) {
    add_span(step_->trace, span, step_->span, phase, rest);
    Phase& all = step_->time;
    all.begin_ns = std::min(all.begin_ns, phase.begin_ns);
    all.end_ns = std::max(all.end_ns, phase.end_ns);
  } else {
    add_span(new_id(kTraceIdBytes), span, "", phase, rest);
  }
}

void TraceFile::flush() {
  close_step();
  end_line();
  write_lines();
}

std::string TraceFile::new_id(int bytes) {
  std::string id;
  for (int i = 0; i < bytes; i += 8) {
    uint64_t number = 0;
    while (number == 0) number = random_();  // an identifier is not zero
    for (int shift = 60; shift >= 0; shift -= 4) {
      id += "0123456789abcdef"[(number >> shift) & 15];
    }
  }
  return id;
}

void TraceFile::add_span(
    const std::string& trace, const std::string& span,
    const std::string& parent, const Phase& time, const std::string& rest) {
  put(spans_, spans_.empty() ? "" : ",", R"({"traceId":")", trace,
      R"(","spanId":")", span);
  if (!parent.empty()) put(spans_, R"(","parentSpanId":")", parent);
  put(spans_, R"(","name":)", string_text(time.name), R"(,"kind":)", kInternal,
      R"(,"startTimeUnixNano":")",
      std::to_string(time.begin_ns + wall_offset_ns_),
      R"(","endTimeUnixNano":")", std::to_string(time.end_ns + wall_offset_ns_),
      "\"", rest, "}");
  if (spans_.size() > kMostOfLine) end_line();
}

void TraceFile::close_step() {
  if (!step_) return;
  const OpenStep step = *std::exchange(step_, std::nullopt);
  std::string rest = R"(,"attributes":[)" + attributes_of(step.metrics) + "]";
  if (!std::isfinite(step.metrics.loss)) {
    // STATUS_CODE_ERROR
    rest += R"(,"status":{"code":2,"message":"the loss is not finite"})";
  }
  add_span(step.trace, step.span, "", step.time, rest);
}

void TraceFile::end_line() {
  if (spans_.empty()) return;
  // What a disk that is full for long has no room for is lost.
  if (unwritten_.size() < kMostKept) {
    unwritten_ += head_ + spans_ + "]}]}]}\n";
  }
  spans_.clear();
}

void TraceFile::write_lines() {
  written_ns_ = steady_now_ns();  // where it fails, too: a second later again
  if (const int error = file_.append(unwritten_); error != 0) {
    throw Error(format(
        "[otlp] cannot write {}: {}", path_.string(), std::strerror(error)));
  }
}

}  // namespace echelon::timeline
