// A bucket of S3-compatible storage, through libcurl, which signs each request
// (AWS Signature Version 4). Every request is tried again, with growing random
// waits, after a lost connection, 408, 429 or 5xx; other answers are final.
//
//   ObjectStore store("models", read_settings());
//   store.upload_file("rank-00000.safetensors", "runs/first/rank-00000");
//   auto put = store.put("runs/first/LATEST", text, {.if_match = etag});
//   if (!put) …  // somebody else has written it
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "echelon/storage/settings.h"
#include "echelon/storage/storage_error.h"

namespace echelon::storage {

/// Requests, signed and tried again.
class Client;

struct ObjectInfo {
  std::string key;
  int64_t bytes = 0;
  std::string etag;  // changes with the content; with its quotes
  // What follows is of find() alone, and empty or 0 where the storage does not
  // say it.
  std::string md5;           // of the content, in hexadecimal
  std::time_t modified = 0;  // when it was put, in seconds since 1970
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
  void cancel();

  const S3Settings& settings() const;
  /// "s3://BUCKET/KEY"
  std::string url(const std::string& key) const;

 private:
  std::unique_ptr<Client> client_;
};

}  // namespace echelon::storage
