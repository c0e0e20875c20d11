// Requests to one bucket: signed, sent, tried again, and what a failure means.
// Private to this folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "echelon/storage/digests.h"
#include "echelon/storage/s3_text.h"
#include "echelon/storage/settings.h"

namespace echelon::storage {

struct Request {
  std::string method;
  std::string key;
  std::string query;
  std::vector<std::string> headers;
  Bytes body;
  bool file = false;          // the body is part of a file
  std::span<std::byte> into;  // where the answer's body goes
};

struct Answer {
  int status = 0;         // 0: none came
  std::string transport;  // then why
  std::string body;       // of an error, or where into is empty
  size_t filled = 0;      // of into
  std::map<std::string, std::string> headers;  // names in lower case
  bool lost = false;  // an earlier attempt may have been done

  std::string code() const { return element(body, "Code"); }
  std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? "" : found->second;
  }
  bool is_good() const { return status >= 200 && status < 300; }
  bool may_pass() const {
    return status == 0 || status == 408 || status == 429 ||
           (status >= 500 && status != 501) ||
           (status == 409 && code() == "ConditionalRequestConflict") ||
           (status == 400 && code() == "RequestTimeout");
  }
};

/// Several threads may use it at once.
class Client {
 public:
  Client(std::string bucket, S3Settings settings);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  /// Tries again after a failure that may pass; returns the last answer.
  Answer perform(const Request& request);
  /// Throws StorageError unless the answer is good.
  Answer perform_or_fail(const Request& request);
  /// Tries once.
  Answer attempt(const Request& request);
  /// Throws the StorageError of an answer.
  [[noreturn]] void fail(const Request& request, const Answer& answer) const;

  /// Waits after so many failures.
  void back_off(int failures) const;
  /// Whether one more attempt is allowed after so many.
  bool may_try_again(int tried) const {
    return tried < settings_.attempts && !cancelled_;
  }

  void cancel() { cancelled_ = true; }
  bool is_cancelled() const { return cancelled_; }

  const S3Settings& settings() const { return settings_; }
  /// "s3://BUCKET/KEY"
  std::string url(const std::string& key) const;

 private:
  struct Connections;

  std::string way_out(const Request& request, const Answer& answer) const;
  std::string address(const Request& request) const;

  const std::string bucket_;
  const S3Settings settings_;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<Connections> connections_;
};

}  // namespace echelon::storage
