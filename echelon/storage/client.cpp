// One request is one libcurl transfer on a handle from a pool, so connections
// are used again. Keys are encoded here as S3 wants them, and parameters are
// sorted: then the path and the query that libcurl signs are the canonical
// ones.
#include "echelon/storage/client.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <ctime>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "echelon/error.h"
#include "echelon/storage/curl_library.h"
#include "echelon/storage/storage_error.h"
#include "echelon/text/format.h"

namespace echelon::storage {
namespace {

constexpr auto kLongestWait = std::chrono::milliseconds(10'000);

}  // namespace

struct Client::Connections {
  ~Connections() {
    for (CURL* handle : idle) curl_library().easy_cleanup(handle);
  }
  CURL* take() {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return curl_library().easy_init();
    CURL* handle = idle.back();
    idle.pop_back();
    return handle;
  }
  void give_back(CURL* handle) {
    const std::lock_guard lock(mutex);
    idle.push_back(handle);
  }

  std::mutex mutex;
  std::vector<CURL*> idle;
};

Client::Client(std::string bucket, S3Settings settings)
    : bucket_(std::move(bucket)),
      settings_(std::move(settings)),
      connections_(std::make_unique<Connections>()) {
  curl_library();
}

Client::~Client() = default;

std::string Client::url(const std::string& key) const {
  return ObjectUrl{bucket_, key}.text();
}

// With an endpoint of its own, the bucket is a part of the path: its host may
// have no name below it. So is one with dots, which certificates do not cover.
std::string Client::address(const Request& request) const {
  std::string base;
  if (!settings_.endpoint.empty()) {
    base = format("{}/{}", settings_.endpoint, bucket_);
  } else if (bucket_.find('.') != std::string::npos) {
    base = format("https://s3.{}.amazonaws.com/{}", settings_.region, bucket_);
  } else {
    base = format("https://{}.s3.{}.amazonaws.com", bucket_, settings_.region);
  }
  base += "/" + encoded(request.key, /*keep_slashes=*/true);
  return request.query.empty() ? base : base + "?" + request.query;
}

// -------------------------------------------------------------- one transfer

namespace {

struct Transfer {
  CURL* handle = nullptr;
  std::string* body = nullptr;
  std::span<std::byte> into;
  size_t filled = 0;
  std::map<std::string, std::string>* headers = nullptr;
  const std::atomic<bool>* cancelled = nullptr;
};

size_t on_body(char* data, size_t, size_t size, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  long status = 0;
  curl_library().easy_getinfo(transfer.handle, CURLINFO_RESPONSE_CODE, &status);
  if (transfer.into.empty() || status < 200 || status > 299) {
    constexpr size_t kMostText = size_t{1} << 30;
    if (transfer.body->size() + size > kMostText) return 0;
    transfer.body->append(data, size);
    return size;
  }
  if (transfer.filled + size > transfer.into.size()) return 0;
  std::memcpy(transfer.into.data() + transfer.filled, data, size);
  transfer.filled += size;
  return size;
}

size_t on_header(char* data, size_t, size_t size, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::string_view line(data, size);
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return size;
  std::string name(line.substr(0, colon));
  std::ranges::transform(name, name.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  std::string value(line.substr(colon + 1));
  value.erase(0, value.find_first_not_of(' '));
  while (!value.empty() &&
         std::isspace(static_cast<unsigned char>(value.back()))) {
    value.pop_back();
  }
  (*transfer.headers)[name] = value;
  return size;
}

int on_progress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<Transfer*>(user)->cancelled->load() ? 1 : 0;
}

}  // namespace

Answer Client::attempt(const Request& request) {
  const CurlLibrary& curl = curl_library();
  CURL* handle = connections_->take();
  if (handle == nullptr) throw Error("libcurl has no memory for a transfer");
  curl.easy_reset(handle);
  Answer answer;
  Transfer transfer{
      .handle = handle,
      .body = &answer.body,
      .into = request.into,
      .headers = &answer.headers,
      .cancelled = &cancelled_};
  const auto set = [&](CURLoption option, auto value) {
    curl.easy_setopt(handle, option, value);
  };
  curl_slist* headers = nullptr;
  const auto add_header = [&](const std::string& line) {
    headers = curl.slist_append(headers, line.c_str());
  };
  const std::string where = address(request);
  const std::string signing = format("aws:amz:{}:s3", settings_.region);
  char reason[CURL_ERROR_SIZE] = "";
  set(CURLOPT_URL, where.c_str());
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_ERRORBUFFER, reason);
  set(CURLOPT_AWS_SIGV4, signing.c_str());
  set(CURLOPT_USERNAME, settings_.access_key.c_str());
  set(CURLOPT_PASSWORD, settings_.secret_key.c_str());
  if (!settings_.authorities.empty()) {
    set(CURLOPT_CAINFO, settings_.authorities.c_str());
  }
  set(CURLOPT_CONNECTTIMEOUT,
      static_cast<long>(settings_.connect_limit.count()));
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME,
      static_cast<long>(settings_.silence_limit.count()));
  set(CURLOPT_EXPECT_100_TIMEOUT_MS, 200L);
  set(CURLOPT_BUFFERSIZE, 512L * 1024);
  set(CURLOPT_UPLOAD_BUFFERSIZE, 512L * 1024);
  set(CURLOPT_WRITEFUNCTION, on_body);
  set(CURLOPT_WRITEDATA, &transfer);
  set(CURLOPT_HEADERFUNCTION, on_header);
  set(CURLOPT_HEADERDATA, &transfer);
  set(CURLOPT_NOPROGRESS, 0L);
  set(CURLOPT_XFERINFOFUNCTION, on_progress);
  set(CURLOPT_XFERINFODATA, &transfer);
  if (request.method == "PUT" || request.method == "POST") {
    set(CURLOPT_POSTFIELDSIZE_LARGE,
        static_cast<curl_off_t>(request.body.size()));
    set(CURLOPT_POSTFIELDS,
        request.body.empty()
            ? ""
            : reinterpret_cast<const char*>(request.body.data()));
    add_header("Content-Type: application/octet-stream");
  }
  if (request.method == "HEAD") set(CURLOPT_NOBODY, 1L);
  set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
  for (const auto& header : request.headers) add_header(header);
  // Parts of files have checksums of their own.
  add_header(
      "x-amz-content-sha256: " + (request.file
                                      ? "UNSIGNED-PAYLOAD"
                                      : digest_of(EVP_sha256(), request.body)));
  if (!settings_.session_token.empty()) {
    add_header("x-amz-security-token: " + settings_.session_token);
  }
  set(CURLOPT_HTTPHEADER, headers);
  const CURLcode result = curl.easy_perform(handle);
  long status = 0;
  curl.easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
  curl.slist_free_all(headers);
  if (result == CURLE_OK) {
    answer.status = static_cast<int>(status);
    answer.filled = transfer.filled;
    connections_->give_back(handle);
    return answer;
  }
  answer.transport = reason[0] != 0 ? reason : curl.easy_strerror(result);
  curl.easy_cleanup(handle);
  if (result == CURLE_PEER_FAILED_VERIFICATION ||
      result == CURLE_SSL_CACERT_BADFILE) {
    answer.status = -1;  // no attempt will help
  }
  return answer;
}

void Client::back_off(int failures) const {
  thread_local std::minstd_rand random(std::random_device{}());
  const auto most = std::min<double>(
      static_cast<double>(kLongestWait.count()),
      std::ldexp(
          static_cast<double>(settings_.first_wait.count()), failures - 1));
  const double wait = std::uniform_real_distribution(0.0, most)(random);
  const auto until =
      std::chrono::steady_clock::now() +
      std::chrono::microseconds(static_cast<int64_t>(wait * 1000));
  while (!cancelled_ && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

Answer Client::perform(const Request& request) {
  bool lost = false;
  for (int tried = 1;; ++tried) {
    Answer answer;
    if (cancelled_) {
      answer.transport = "it was cancelled";
    } else {
      answer = attempt(request);
      // A body that ends early, on a connection that was kept.
      if (answer.is_good() && !request.into.empty() &&
          answer.filled != request.into.size()) {
        answer.transport =
            format("{} of {} bytes came", answer.filled, request.into.size());
        answer.status = 0;
      }
    }
    answer.lost = lost;
    if (!answer.may_pass() || !may_try_again(tried)) return answer;
    lost = lost || answer.status == 0 || answer.status >= 500;
    back_off(tried);
  }
}

Answer Client::perform_or_fail(const Request& request) {
  Answer answer = perform(request);
  if (!answer.is_good()) fail(request, answer);
  return answer;
}

// ------------------------------------------------------------------- errors

namespace {

// By how much this host's clock is ahead of the storage's.
std::string skew_text(const std::string& date) {
  std::tm there{};
  if (date.empty() ||
      ::strptime(date.c_str(), "%a, %d %b %Y %H:%M:%S", &there) == nullptr) {
    return "";
  }
  const double seconds = std::difftime(std::time(nullptr), ::timegm(&there));
  return format(
      " (it is {:.0f} minutes {} the storage's)", std::abs(seconds) / 60,
      seconds > 0 ? "ahead of" : "behind");
}

}  // namespace

std::string
Client::way_out(const Request& request, const Answer& answer) const {
  const std::string code = answer.code();
  if (answer.status <= 0) {
    return "check AWS_ENDPOINT_URL and the network between it and this host";
  }
  if (code == "RequestTimeTooSkewed") {
    return format(
        "set this host's clock{}, for example by NTP",
        skew_text(answer.header("date")));
  }
  const std::string home = answer.header("x-amz-bucket-region");
  if (!home.empty() && home != settings_.region) {
    return format("the bucket is in another region: set AWS_REGION={}", home);
  }
  if (code == "PermanentRedirect" || code == "AuthorizationHeaderMalformed" ||
      code == "IllegalLocationConstraintException") {
    const std::string region = element(answer.body, "Region");
    return region.empty() ? "set AWS_REGION to the bucket's region"
                          : "set AWS_REGION=" + region;
  }
  if (code == "NoSuchBucket") {
    return "make the bucket, or correct its name or AWS_ENDPOINT_URL";
  }
  if (code == "ExpiredToken" || code == "InvalidToken" ||
      code == "TokenRefreshRequired") {
    return format(
        "the temporary keys ({}) have ended; fetch new ones",
        settings_.keys_from);
  }
  if (code == "InvalidAccessKeyId" || code == "SignatureDoesNotMatch") {
    return format("correct the keys ({})", settings_.keys_from);
  }
  if (answer.status == 401 || answer.status == 403) {
    return format(
        "the keys ({}) may not do this: allow s3:ListBucket for the bucket, "
        "and s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:AbortMultipartUpload below its name",
        settings_.keys_from);
  }
  if (answer.status == 501) {
    return "this storage lacks what Echelon needs: conditional puts "
           "(If-Match, If-None-Match) and uploads in parts";
  }
  if (answer.status == 404) return "it may have been removed meanwhile";
  if (answer.may_pass()) {
    return format(
        "{} attempts failed alike; try again later", settings_.attempts);
  }
  return "see what the storage says, and its log";
}

void Client::fail(const Request& request, const Answer& answer) const {
  const std::string whose =
      settings_.endpoint.empty() ? "" : " at " + settings_.endpoint;
  std::string what;
  if (answer.status <= 0) {
    what = format("no answer: {}", answer.transport);
  } else {
    const std::string code = answer.code();
    const std::string message = element(answer.body, "Message");
    what = format("{}", answer.status);
    if (!code.empty()) what += " " + code;
    if (!message.empty()) what += ": " + message;
    while (what.ends_with('.')) what.pop_back();
  }
  for (char& c : what) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  throw StorageError(
      format(
          "{}: {}{}: {}; {}", url(request.key), request.method, whose, what,
          way_out(request, answer)),
      std::max(answer.status, 0), answer.code());
}

}  // namespace echelon::storage
