// What the storage refused.
#pragma once

#include <string>
#include <utility>

#include "echelon/error.h"

namespace echelon::storage {

/// The storage refused a request, or did not answer: bucket and key, what was
/// done, status, the storage's code and message, way out.
class StorageError : public Error {
 public:
  StorageError(const std::string& message, int status, std::string code)
      : Error(message, ExitCode::data),
        status_(status),
        code_(std::move(code)) {}
  int status() const { return status_; }             // 0: no answer
  const std::string& code() const { return code_; }  // "NoSuchBucket"

 private:
  int status_;
  std::string code_;
};

/// The code of an error of ours: bytes that came are not those that were put.
inline constexpr const char* kDamaged = "BadDigest";

}  // namespace echelon::storage
