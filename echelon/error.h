// The error types: few, and named after what the caller can do next.
//
// A message states place, values, rule and way out, for example
//   [layout] dp=3 * tp=4 = 12, but 16 ranks; tp=4 allows dp 4, 2 or 1
#pragma once

#include <stdexcept>
#include <string>

namespace echelon {

/// The exit codes of a process, for scripts and schedulers.
enum class ExitCode : int {
  done = 0,
  failure = 1,          // a rank, a link, or a bug of Echelon
  configuration = 2,    // the user can fix it before any rank starts
  data = 3,             // an input file is missing, broken or does not fit
  numeric = 4,          // NaN or overflow
  preempted = 75,       // queue again
  do_not_requeue = 93,  // queueing again would fail the same way
  interrupted = 130,    // stopped by the user
};

/// Base of all errors that Echelon throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::failure)
      : std::runtime_error(message), code_(code) {}
  /// The exit code of the process when nobody catches this.
  ExitCode exit_code() const { return code_; }

 private:
  ExitCode code_;
};

/// An invariant of Echelon does not hold: a bug (ECHELON_CHECK).
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& message)
      : Error("a bug of Echelon, please report it: " + message) {}
};

/// A setting or an argument is wrong: the user can fix it.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message)
      : Error(message, ExitCode::configuration) {}
};

/// A peer or a link failed, or ranks called different things.
class CommError : public Error {
 public:
  explicit CommError(const std::string& message) : Error(message) {}
};

/// This rank's device failed while it computed, as a GPU with an ECC error
/// does.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message) : Error(message) {}
};

/// An input file or a sample is missing, broken or does not fit.
class DataError : public Error {
 public:
  explicit DataError(const std::string& message)
      : Error(message, ExitCode::data) {}
};

/// A checkpoint on disk, or one that is to be written, cannot be trusted.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message)
      : Error(message, ExitCode::data) {}
};

/// A NaN or an overflow where a finite number must be.
class NumericError : public Error {
 public:
  explicit NumericError(const std::string& message)
      : Error(message, ExitCode::numeric) {}
};

}  // namespace echelon
