#include "echelon/error_report.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <typeinfo>

#include "echelon/error.h"

namespace echelon {
namespace {

// A thread that fails after another one waits this long for the process to end.
// What ends it may itself be waiting for the thread, as the end of an NCCL
// group waits for its watchdog.
constexpr unsigned kEndSeconds = 3;

std::atomic<bool> reported{false};
std::atomic<int> exit_code{1};  // of the error that was reported
std::atomic<bool> installed{false};
std::terminate_handler previous_handler = nullptr;
std::string error_place;  // set before other threads are started

int64_t steady_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return status == 0 && name ? name.get() : type.name();
}

constexpr const char* kProcessLimits =
    "`ulimit -u` and the container's pids limit set how many threads and "
    "processes there may be";

// std::thread says no more than "Resource temporarily unavailable".
bool lacks_threads(const std::exception& error) {
  const auto* of_system = dynamic_cast<const std::system_error*>(&error);
  return of_system != nullptr &&
         of_system->code() == std::errc::resource_unavailable_try_again;
}

ErrorReport describe(const std::exception& error) {
  ErrorReport report;
  report.message = without_backtrace(error.what());
  report.type = type_name(typeid(error));
  const auto* ours = dynamic_cast<const Error*>(&error);
  if (lacks_threads(error)) {
    report.message +=
        std::string(": no thread could be started; ") + kProcessLimits;
  }
  if (ours) report.exit_code = static_cast<int>(ours->exit_code());
  report.consequence = dynamic_cast<const CommError*>(&error) != nullptr;
  const bool of_device = dynamic_cast<const DeviceError*>(&error) != nullptr;
  if ((!ours || of_device || report.consequence) && !error_place.empty()) {
    const size_t line =
        std::min(report.message.find('\n'), report.message.size());
    report.message.insert(line, " (" + error_place + ")");
  }
  return report;
}

// Writes the report to a draft and renames it, so that no reader sees a part.
void write_report(const ErrorReport& report) {
  const char* path = std::getenv("ECHELON_ERROR_FILE");
  if (path == nullptr || *path == '\0') {
    return;
  }
  const nlohmann::json json = {
      {"message", report.message},     {"type", report.type},
      {"exit_code", report.exit_code}, {"time_ns", report.time_ns},
      {"rank", report.rank},           {"consequence", report.consequence}};
  const std::string text =
      json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::string draft = std::string(path) + ".new";
  const int fd =
      open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) {
    return;
  }
  const bool whole =
      write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  if (!whole || std::rename(draft.c_str(), path) != 0) {
    unlink(draft.c_str());
  }
}

void publish(ErrorReport report) {
  const char* rank = std::getenv("RANK");
  report.rank = rank != nullptr ? std::atoi(rank) : -1;
  report.time_ns = steady_ns();
  exit_code = report.exit_code;
  write_report(report);
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", report.message.c_str());
  std::fflush(stderr);
}

// The first thread that fails reports; the others wait for it to end the
// process.
void claim_or_wait() {
  if (!reported.exchange(true)) return;
  for (unsigned left = kEndSeconds; left > 0;) left = sleep(left);
  _exit(exit_code);
}

[[noreturn]] void on_terminate() {
  claim_or_wait();
  const std::exception_ptr current = std::current_exception();
  if (current) {
    ErrorReport report;
    try {
      std::rethrow_exception(current);
    } catch (const std::exception& error) {
      report = describe(error);
    } catch (...) {
      const std::type_info* type = abi::__cxa_current_exception_type();
      report.type = type != nullptr ? type_name(*type) : "unknown";
      report.message =
          "an exception of type " + report.type + ", which has no text";
    }
    publish(report);
    _exit(report.exit_code);
  }
  ErrorReport report;
  report.type = "std::terminate";
  report.exit_code = 134;
  report.message =
      std::string(
          "std::terminate without an exception; a joinable std::thread that "
          "is destroyed does this, perhaps because another one could not be "
          "started: ") +
      kProcessLimits;
  publish(report);
  if (previous_handler != nullptr) {
    previous_handler();
  }
  std::abort();
}

}  // namespace

void install_error_reporter() {
  if (!installed.exchange(true)) {
    previous_handler = std::set_terminate(on_terminate);
  }
}

void set_error_place(const std::string& place) {
  error_place = place;
}

int report_error(const std::exception& error) noexcept {
  int code = 1;
  try {
    const ErrorReport report = describe(error);
    code = report.exit_code;
    if (!reported.exchange(true)) {
      publish(report);
    }
  } catch (...) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return code;
}

std::optional<ErrorReport> read_error_report(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return std::nullopt;
  }
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object()) {
    return std::nullopt;
  }
  try {
    ErrorReport report;
    json.at("message").get_to(report.message);
    json.at("type").get_to(report.type);
    json.at("exit_code").get_to(report.exit_code);
    json.at("time_ns").get_to(report.time_ns);
    json.at("rank").get_to(report.rank);
    json.at("consequence").get_to(report.consequence);
    return report;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string without_backtrace(const std::string& text) {
  std::string result = text.substr(0, text.find("\nException raised from "));
  while (!result.empty() && (result.back() == '\n' || result.back() == ' ')) {
    result.pop_back();
  }
  return result;
}

}  // namespace echelon
