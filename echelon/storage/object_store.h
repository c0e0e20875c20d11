// A bucket of S3-compatible storage, through libcurl, which signs each request
// (AWS Signature Version 4). Every request is tried again, with growing random
// waits, after a lost connection, 408, 429 or 5xx; other answers are final.
//
//   ObjectStore store("models", read_settings());
//   store.upload_file("rank-00000.safetensors", "runs/first/rank-00000");
//   auto put = store.put("runs/first/LATEST", text, {.if_match = etag});
//   if (!put) …  // somebody else has written it
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "echelon/storage/settings.h"

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

struct ObjectInfo {
  std::string key;
  int64_t bytes = 0;
  std::string etag;  // changes with the content; with its quotes
  /// MD5 of the content in hexadecimal, where the storage says it.
  std::string md5;
};

struct ObjectText {
  std::string text;
  std::string etag;
};

/// When an object may be written.
struct PutCondition {
  bool if_absent = false;
  std::string if_match;  // the etag that it must still have
};

class ObjectStore {
 public:
  ObjectStore(std::string bucket, S3Settings settings);
  ~ObjectStore();
  ObjectStore(const ObjectStore&) = delete;
  ObjectStore& operator=(const ObjectStore&) = delete;

  // All of these throw StorageError, and several threads may call them at once.

  /// The objects whose keys begin with `prefix`, by key. at_most 0: all.
  std::vector<ObjectInfo> list(const std::string& prefix, int at_most = 0);
  /// Nothing when there is no such object.
  std::optional<ObjectInfo> find(const std::string& key);
  std::optional<ObjectText> get(const std::string& key);
  /// Bytes from `offset` on of the object with that etag; throws when it has
  /// changed.
  void read(const ObjectInfo& object, int64_t offset, std::span<std::byte> to);

  /// Returns the new etag; nothing when the condition does not hold. An attempt
  /// whose answer was lost counts as done when the object has this content.
  std::optional<std::string>
  put(const std::string& key, const std::string& text,
      const PutCondition& condition = {});
  /// No error when there is no such object.
  void remove(const std::string& key);

  /// In parts, several at once, when it is large. Each part has a checksum,
  /// which the storage compares, or returns what it has for a comparison here.
  /// The object appears when it is complete.
  void upload_file(const std::filesystem::path& file, const std::string& key);
  /// Ends uploads in parts, below `prefix`, that were never completed.
  void remove_unfinished(const std::string& prefix);

  /// Whether the bytes at an offset are right; a multiple of part_bytes.
  using IsIntact =
      std::function<bool(int64_t offset, std::span<const std::byte>)>;
  /// Writes the object into an open file, in parts, several at once. A part
  /// that is not intact is read again.
  void
  download(const ObjectInfo& object, int file, const IsIntact& is_intact = {});

  /// Ends the requests that run, with an error, and all later ones.
  void cancel() { cancelled_ = true; }

  const S3Settings& settings() const { return settings_; }
  /// "s3://BUCKET/KEY"
  std::string url(const std::string& key) const;

 private:
  struct Request;
  struct Answer;
  struct Connections;

  Answer perform(const Request& request);
  Answer perform_or_fail(const Request& request);
  Answer attempt(const Request& request);
  [[noreturn]] void fail(const Request& request, const Answer& answer) const;
  std::string way_out(const Request& request, const Answer& answer) const;
  std::string address(const Request& request) const;
  void back_off(int attempt) const;
  void check_stored(
      const Request& request, const Answer& answer,
      std::span<const std::byte> bytes, const std::string& crc) const;
  std::string upload_part(
      const std::string& key, const std::string& query,
      std::span<const std::byte> bytes, std::string& crc);
  void complete(
      const std::string& key, const std::string& upload, const std::string& xml,
      int64_t bytes);
  void for_parts(
      int64_t bytes, int64_t part_bytes,
      const std::function<
          void(int64_t number, int64_t offset, std::span<std::byte>)>& work);

  const std::string bucket_;
  const S3Settings settings_;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<Connections> connections_;
};

}  // namespace echelon::storage
