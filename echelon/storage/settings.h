// Which storage, and with whose keys: as other programs for S3 read it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace echelon::storage {

/// An object, or the beginning of the keys of several: "s3://bucket/key".
struct ObjectUrl {
  std::string bucket;
  std::string key;  // without a leading slash; may be empty

  std::string text() const;
};

/// Whether a path names an object instead of a file.
bool is_object_url(std::string_view path);

/// Throws ConfigError, which begins with the address, for anything but
/// s3://BUCKET/KEY with a possible name of a bucket. A slash at the end of the
/// key is left out.
ObjectUrl parse_object_url(const std::string& url);

struct S3Settings {
  std::string endpoint;  // "https://host:9000"; empty: Amazon's
  std::string region = "us-east-1";
  std::string access_key;
  std::string secret_key;
  std::string session_token;  // empty: the keys are not temporary
  std::string keys_from;      // where they were found, for messages
  std::string authorities;    // file of certificates; empty: the system's
  int attempts = 6;           // of each request
  /// The wait after the first failure is at most this, and doubles with each.
  std::chrono::milliseconds first_wait{200};
  std::chrono::seconds connect_limit{10};
  std::chrono::seconds silence_limit{60};  // of a connection
  int64_t part_bytes = int64_t{16} << 20;  // of large objects; at least 5 MiB
  int connections = 4;                     // at once, for one large object
};

/// From AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else
/// from the profile AWS_PROFILE ("default") in ~/.aws/credentials and
/// ~/.aws/config; and from AWS_REGION, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3,
/// AWS_ENDPOINT_URL, AWS_CA_BUNDLE and AWS_MAX_ATTEMPTS, else region and
/// endpoint_url of that profile. Throws ConfigError when there are no keys or a
/// value is wrong. No message contains a key.
S3Settings read_settings();

}  // namespace echelon::storage
