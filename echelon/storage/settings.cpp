#include "echelon/storage/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::storage {
namespace {

constexpr std::string_view kScheme = "s3://";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string first_of(std::initializer_list<std::string> values) {
  for (const auto& value : values) {
    if (!value.empty()) return value;
  }
  return "";
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

using Profile = std::map<std::string, std::string>;

// The keys of one section of an INI file; empty when either is missing.
Profile read_profile(const std::string& path, const std::string& section) {
  Profile profile;
  std::ifstream file(path);
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    // Indented lines belong to a nested key, such as s3 =.
    const bool nested = line.starts_with(" ") || line.starts_with("\t");
    line = trimmed(line);
    if (line.empty() || line[0] == '#' || line[0] == ';' || nested) continue;
    if (line[0] == '[') {
      inside = trimmed(line.substr(1, line.find(']') - 1)) == section;
      continue;
    }
    const size_t equals = line.find('=');
    if (!inside || equals == std::string::npos) continue;
    profile[trimmed(line.substr(0, equals))] = trimmed(line.substr(equals + 1));
  }
  return profile;
}

std::string path_of(const char* name, const char* in_home) {
  const std::string path = variable(name);
  return path.empty() ? variable("HOME") + in_home : path;
}

void read_keys(S3Settings& settings, const std::string& profile) {
  settings.access_key = variable("AWS_ACCESS_KEY_ID");
  settings.secret_key = variable("AWS_SECRET_ACCESS_KEY");
  if (!settings.access_key.empty() && !settings.secret_key.empty()) {
    settings.session_token = variable("AWS_SESSION_TOKEN");
    settings.keys_from = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
    return;
  }
  if (settings.access_key.empty() != settings.secret_key.empty()) {
    throw ConfigError(
        "one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set and the "
        "other is not; set both or none");
  }
  const std::string file =
      path_of("AWS_SHARED_CREDENTIALS_FILE", "/.aws/credentials");
  const std::string config = path_of("AWS_CONFIG_FILE", "/.aws/config");
  const std::string in_config =
      profile == "default" ? profile : "profile " + profile;
  for (const auto& [path, section] :
       {std::pair(file, profile), std::pair(config, in_config)}) {
    auto found = read_profile(path, section);
    settings.access_key = found["aws_access_key_id"];
    settings.secret_key = found["aws_secret_access_key"];
    settings.session_token = found["aws_session_token"];
    if (settings.access_key.empty() || settings.secret_key.empty()) continue;
    settings.keys_from = format("profile {} of {}", profile, path);
    return;
  }
  throw ConfigError(format(
      "there are no keys for S3: set AWS_ACCESS_KEY_ID and "
      "AWS_SECRET_ACCESS_KEY, or write the profile \"{}\" into {} (AWS_PROFILE "
      "names another one)",
      profile, file));
}

void check_endpoint(const std::string& endpoint) {
  const auto begins = [&](std::string_view scheme) {
    return endpoint.starts_with(scheme) && endpoint.size() > scheme.size();
  };
  const bool good = (begins("http://") || begins("https://")) &&
                    endpoint.find_first_of(" \t?#@") == std::string::npos;
  if (endpoint.empty() || good) return;
  throw ConfigError(format(
      "AWS_ENDPOINT_URL=\"{}\": is no address of a storage; write "
      "https://HOST:PORT, without name and password",
      endpoint.find('@') == std::string::npos ? endpoint : "…@…"));
}

}  // namespace

std::string ObjectUrl::text() const {
  return format("{}{}/{}", kScheme, bucket, key);
}

bool is_object_url(std::string_view path) {
  return path.starts_with(kScheme);
}

ObjectUrl parse_object_url(const std::string& url) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(format("{}: {}; write s3://BUCKET/NAME", url, why));
  };
  if (!is_object_url(url)) refuse("does not begin with s3://");
  const std::string rest = url.substr(kScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  ObjectUrl found{
      rest.substr(0, slash), rest.substr(std::min(slash + 1, rest.size()))};
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.';
  };
  if (found.bucket.size() < 3 || found.bucket.size() > 63 ||
      !std::ranges::all_of(found.bucket, allowed)) {
    refuse(format(
        "\"{}\" is no name of a bucket, which has 3 to 63 lower-case letters, "
        "digits, dots and hyphens",
        found.bucket));
  }
  while (found.key.ends_with('/')) found.key.pop_back();
  if (found.key.starts_with('/') || found.key.find("//") != std::string::npos) {
    refuse("has an empty name between two slashes");
  }
  if (found.key.size() > 800) refuse("has a name of more than 800 bytes");
  const auto control = [](char c) {
    return static_cast<unsigned char>(c) < 32;
  };
  if (std::ranges::any_of(found.key, control)) {
    refuse("has a control character");
  }
  return found;
}

S3Settings read_settings() {
  S3Settings settings;
  const std::string profile = first_of(
      {variable("AWS_PROFILE"), variable("AWS_DEFAULT_PROFILE"), "default"});
  read_keys(settings, profile);
  auto config = read_profile(
      path_of("AWS_CONFIG_FILE", "/.aws/config"),
      profile == "default" ? profile : "profile " + profile);
  settings.region = first_of(
      {variable("AWS_REGION"), variable("AWS_DEFAULT_REGION"), config["region"],
       settings.region});
  settings.endpoint = first_of(
      {variable("AWS_ENDPOINT_URL_S3"), variable("AWS_ENDPOINT_URL"),
       config["endpoint_url"]});
  while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
  check_endpoint(settings.endpoint);
  settings.authorities =
      first_of({variable("AWS_CA_BUNDLE"), config["ca_bundle"]});
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || (c >= 'A' && c <= 'Z');
  };
  if (!std::ranges::all_of(settings.region, is_plain)) {
    throw ConfigError(format(
        "AWS_REGION=\"{}\": is no region; one is called like us-east-1",
        settings.region));
  }
  const std::string attempts = variable("AWS_MAX_ATTEMPTS");
  if (!attempts.empty()) {
    const char* end = attempts.data() + attempts.size();
    const auto read = std::from_chars(attempts.data(), end, settings.attempts);
    if (read.ec != std::errc() || read.ptr != end || settings.attempts < 1 ||
        settings.attempts > 100) {
      throw ConfigError(format(
          "AWS_MAX_ATTEMPTS=\"{}\": must be a number from 1 to 100", attempts));
    }
  }
  return settings;
}

}  // namespace echelon::storage
