// A record is its size (8 bytes), the masked CRC of these, the event, and its
// masked CRC; all little-endian. Steps that were undone leave the file, which
// is then replaced: TensorBoard would show both.
#include "echelon/timeline/event_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/recorder.h"

namespace echelon::timeline {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kBetweenEventsNs = 1'000'000'000;
constexpr size_t kHead = 12, kFoot = 4;  // of a record
constexpr std::string_view kPrefix = "events.out.tfevents.";
// Marks the events of evaluations.
constexpr std::string_view kEvaluation = "evaluation/";

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
    }
    table[byte] = crc;
  }
  return table;
}

// As TFRecord stores it, so that a CRC of bytes that hold CRCs is a good one.
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

template <class Number>
void put_fixed(std::string& text, Number number) {
  char bytes[sizeof number];
  std::memcpy(bytes, &number, sizeof number);
  text.append(bytes, sizeof number);
}

void put_varint(std::string& text, uint64_t number) {
  for (; number >= 0x80; number >>= 7) {
    text += static_cast<char>(number | 0x80);
  }
  text += static_cast<char>(number);
}

// A field of protobuf: 0 varint, 1 eight bytes, 2 bytes with their number, 5
// four bytes.
void put_tag(std::string& text, int field, int kind) {
  text += static_cast<char>(field << 3 | kind);
}

void put_bytes(std::string& text, int field, std::string_view bytes) {
  put_tag(text, field, 2);
  put_varint(text, bytes.size());
  text += bytes;
}

std::string head_of_event(double wall_time) {
  std::string event;
  put_tag(event, 1, 1);
  put_fixed(event, wall_time);
  return event;
}

std::string event_of(double wall_time, int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [name, value] : scalars) {
    std::string one;
    put_bytes(one, 1, name);
    put_tag(one, 2, 5);
    put_fixed(one, static_cast<float>(value));
    put_bytes(summary, 1, one);
  }
  std::string event = head_of_event(wall_time);
  put_tag(event, 2, 0);
  put_varint(event, static_cast<uint64_t>(step));
  put_bytes(event, 5, summary);
  return event;
}

std::string framed(std::string_view event) {
  std::string record;
  put_fixed(record, static_cast<uint64_t>(event.size()));
  put_fixed(record, masked_crc(record));
  record += event;
  put_fixed(record, masked_crc(event));
  return record;
}

// The first record of each file.
std::string version_record(double wall_time) {
  std::string event = head_of_event(wall_time);
  put_bytes(event, 3, "brain.Event:2");
  return framed(event);
}

double wall_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

struct Record {
  size_t begin = 0, end = 0;  // in the file
  int64_t step = 0;           // 0: the version
  bool evaluation = false;
};

// The step of an event as event_of() writes it.
int64_t step_of(std::string_view event) {
  constexpr size_t kStep = 9;  // behind the time
  if (event.size() <= kStep || event[kStep] != (2 << 3)) return 0;
  uint64_t step = 0;
  int shift = 0;
  for (size_t i = kStep + 1; i < event.size() && shift < 63; ++i, shift += 7) {
    step |= static_cast<uint64_t>(event[i] & 0x7f) << shift;
    if ((event[i] & 0x80) == 0) break;
  }
  return static_cast<int64_t>(step);
}

// The whole and sound records from the beginning of the file.
std::vector<Record> records_in(std::string_view text) {
  std::vector<Record> all;
  size_t at = 0;
  while (text.size() - at >= kHead + kFoot) {
    uint64_t size = 0;
    std::memcpy(&size, text.data() + at, sizeof size);
    uint32_t crc = 0;
    std::memcpy(&crc, text.data() + at + 8, sizeof crc);
    if (crc != masked_crc(text.substr(at, 8)) ||
        size > text.size() - at - kHead - kFoot) {
      break;
    }
    const auto event = text.substr(at + kHead, size);
    std::memcpy(&crc, event.data() + size, sizeof crc);
    if (crc != masked_crc(event)) break;
    const size_t end = at + kHead + size + kFoot;
    all.push_back(
        {at, end, step_of(event), event.find(kEvaluation) != event.npos});
    at = end;
  }
  return all;
}

std::filesystem::path newest_in(const std::filesystem::path& folder) {
  std::filesystem::path newest;
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  for (; !error && entries != std::filesystem::directory_iterator();
       entries.increment(error)) {
    const auto& path = entries->path();
    const std::string name = path.filename().string();
    if (name.starts_with(kPrefix) && name.find(".part-") == name.npos) {
      newest = std::max(newest, path);
    }
  }
  return newest;
}

std::string new_name() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return format(
      "{}{:010}.{}.{}.0", kPrefix, static_cast<int64_t>(wall_now()), host,
      ::getpid());
}

[[noreturn]] void fail_events(const std::filesystem::path& path, int error) {
  throw Error(format(
      "[tensorboard] cannot write {}: {}", path.string(),
      std::strerror(error)));
}

void add_if(
    Scalars& scalars, const char* name, const std::optional<double>& value,
    double factor = 1) {
  if (value) scalars.emplace_back(name, *value * factor);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

Scalars scalars_of(const StepMetrics& step, int ranks) {
  const double share = 1.0 / std::max(1, ranks);
  Scalars scalars;
  if (!step.simulated) {
    scalars.emplace_back("loss_metrics/global_avg_loss", step.loss);
  }
  add_if(scalars, "throughput(tps)", step.tokens_per_second, share);
  add_if(scalars, "tflops", step.flops_per_second, share * 1e-12);
  add_if(scalars, "mfu(%)", step.mfu, 100);
  if (step.peak_memory_bytes) {
    scalars.emplace_back(
        "memory/max_reserved(GiB)",
        static_cast<double>(*step.peak_memory_bytes) / (1 << 30));
  }
  scalars.emplace_back("time_metrics/end_to_end(s)", step.step_seconds);
  scalars.emplace_back("time_metrics/data_loading(s)", step.data_seconds);
  if (step.step_seconds > 0) {
    scalars.emplace_back(
        "time_metrics/data_loading(%)",
        100 * step.data_seconds / step.step_seconds);
  }
  add_if(scalars, "time_metrics/forward(s)", step.forward_seconds);
  add_if(scalars, "time_metrics/backward(s)", step.backward_seconds);
  add_if(scalars, "time_metrics/communication(s)", step.communication_seconds);
  add_if(scalars, "time_metrics/optimizer(s)", step.update_seconds);
  scalars.emplace_back("lr", step.learning_rate);
  add_if(scalars, "grad_norm", step.grad_norm);
  scalars.emplace_back("samples_per_second", step.samples_per_second);
  scalars.emplace_back("epoch", step.epoch);
  add_if(scalars, "loss_scale", step.loss_scale);
  if (step.skipped_steps) {
    scalars.emplace_back(
        "skipped_steps", static_cast<double>(*step.skipped_steps));
  }
  add_if(scalars, "expert_imbalance", step.expert_imbalance);
  add_if(scalars, "dropped_share", step.dropped_share);
  for (const auto& [layer, norm] : step.layer_grad_norms) {
    scalars.emplace_back("layer_grad_norms/" + layer, norm);
  }
  return scalars;
}

Scalars scalars_of(const EvaluationMetrics& evaluation) {
  Scalars scalars = {{std::string(kEvaluation) + "loss", evaluation.loss}};
  if (evaluation.accuracy) {
    scalars.emplace_back(
        std::string(kEvaluation) + "accuracy", *evaluation.accuracy);
  }
  for (const auto& [name, value] : evaluation.own) {
    scalars.emplace_back(std::string(kEvaluation) + name, value);
  }
  if (evaluation.perplexity) {
    scalars.emplace_back(
        std::string(kEvaluation) + "perplexity", *evaluation.perplexity);
  }
  return scalars;
}

EventFile::EventFile(const std::filesystem::path& folder, int ranks)
    : ranks_(ranks) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  path_ = newest_in(folder);
  if (path_.empty()) path_ = folder / new_name();
  open();
}

EventFile::~EventFile() {
  try {
    flush();
  } catch (...) {  // another error may be on its way
  }
  if (file_ >= 0) ::close(file_);
}

void EventFile::open() {
  if (file_ >= 0) ::close(file_);
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) fail_events(path_, errno);
  const auto records = records_in(read_text_file(path_));
  size_ = records.empty() ? 0 : static_cast<int64_t>(records.back().end);
  last_step_ = last_evaluation_ = 0;
  for (const Record& one : records) {
    int64_t& last = one.evaluation ? last_evaluation_ : last_step_;
    last = std::max(last, one.step);
  }
  if (size_ == 0) unwritten_ = version_record(wall_now());
}

void EventFile::go_on_from(
    const std::vector<StepMetrics>& steps,
    const std::vector<EvaluationMetrics>& evaluations) {
  truncate(steps.empty() ? 0 : steps.back().step);
  // When those that are missing ended is known from how long each took.
  double left = 0;
  for (const auto& step : steps) {
    if (step.step > last_step_) left += step.step_seconds;
  }
  const double now = wall_now();
  for (const auto& step : steps) {
    if (step.step <= last_step_) continue;
    left -= step.step_seconds;
    add(now - left, step.step, scalars_of(step, ranks_), false);
  }
  for (const auto& one : evaluations) {
    if (one.step > last_evaluation_) {
      add(now, one.step, scalars_of(one), true);
    }
  }
  flush();
}

void EventFile::append(const StepMetrics& step) {
  add(wall_now(), step.step, scalars_of(step, ranks_), false);
  if (!written_ns_ || steady_now_ns() - *written_ns_ >= kBetweenEventsNs) {
    write();
  }
}

void EventFile::append(const EvaluationMetrics& evaluation) {
  add(wall_now(), evaluation.step, scalars_of(evaluation), true);
  write();
}

void EventFile::truncate(int64_t step) {
  flush();
  if (std::max(last_step_, last_evaluation_) <= step) return;
  const std::string text = read_text_file(path_);
  std::string kept;
  for (const Record& one : records_in(text)) {
    if (one.step <= step) {
      kept.append(text, one.begin, one.end - one.begin);
    }
  }
  write_file_atomically(path_, kept);
  open();
}

void EventFile::flush() {
  if (!unwritten_.empty()) write();
}

void EventFile::add(
    double wall_time, int64_t step, const Scalars& scalars, bool evaluation) {
  unwritten_ += framed(event_of(wall_time, step, scalars));
  (evaluation ? last_evaluation_ : last_step_) = step;
}

void EventFile::write() {
  written_ns_ = steady_now_ns();  // where it fails, too: a second later again
  struct stat status {};
  if (::fstat(file_, &status) != 0) fail_events(path_, errno);
  // Part of a record, of an earlier process or a full disk.
  if (status.st_size > size_ && ::ftruncate(file_, size_) != 0) {
    fail_events(path_, errno);
  }
  std::string_view rest = unwritten_;
  const int error = write_all(file_, rest);
  if (error != 0) {
    (void)!::ftruncate(file_, size_);
    fail_events(path_, error);
  }
  size_ += static_cast<int64_t>(unwritten_.size());
  unwritten_.clear();
}

}  // namespace echelon::timeline
