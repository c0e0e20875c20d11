// A rank's report of the error that ended it, in a file that the launcher
// reads. comm/ and users' programs link it too, so it is a library of its own.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

namespace echelon {

/// The error that ended a rank.
struct ErrorReport {
  std::string message;  // the exception's text, without a backtrace
  std::string type;     // "std::runtime_error"
  int exit_code = 1;
  int64_t time_ns = 0;  // steady clock: comparable among ranks of one host
  int rank = -1;        // -1 when RANK is not set
  /// True when this rank failed because a peer did (every CommError): the
  /// launcher shows such an error only when no rank has another one.
  bool consequence = false;
};

/// After this call, an exception that leaves main or a thread writes its report
/// to $ECHELON_ERROR_FILE (when set), prints its text to stderr once, and ends
/// the process with Error::exit_code(), or 1 for other types. Signals, and a
/// std::terminate without an exception, still abort and dump core.
/// World::from_environment calls this; a second call has no effect.
void install_error_reporter();

/// Where this process computes, "cuda:1 of node-3": it is added to the errors
/// of libraries, devices and communication, which do not say it.
/// World::from_environment sets it for devices.
void set_error_place(const std::string& place);

/// The same report for a program that catches in main; returns the exit code:
///   try { … } catch (const std::exception& e) { return report_error(e); }
int report_error(const std::exception& error) noexcept;

/// The report in `path`; nothing when the file is missing or is not a report.
std::optional<ErrorReport> read_error_report(const std::string& path);

/// The text of a report without the backtrace that LibTorch appends.
std::string without_backtrace(const std::string& text);

}  // namespace echelon
