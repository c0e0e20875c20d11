// One request is one libcurl transfer on a handle from a pool, so connections
// are used again. Keys are encoded here as S3 wants them, and parameters are
// sorted: then the path and the query that libcurl signs are the canonical
// ones.
#include "echelon/storage/object_store.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "echelon/storage/curl_library.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::storage {
namespace {

using Bytes = std::span<const std::byte>;

constexpr int64_t kMostParts = 10'000;  // S3's limit
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr auto kLongestWait = std::chrono::milliseconds(10'000);

std::string encoded(std::string_view text, bool keep_slashes) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '-' || c == '_' || c == '.' ||
        c == '~' || (c == '/' && keep_slashes)) {
      result += c;
    } else {
      result += format("%{:02X}", unsigned{byte});
    }
  }
  return result;
}

std::string decoded(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      const std::string hex(text.substr(i + 1, 2));
      result += static_cast<char>(std::strtol(hex.c_str(), nullptr, 16));
      i += 2;
    } else {
      result += text[i] == '+' ? ' ' : text[i];
    }
  }
  return result;
}

// The text of the first element of that name. S3's answers nest no element in
// one of its own name, and its texts have no "<".
std::string element(std::string_view xml, const std::string& name) {
  const std::string open = "<" + name + ">";
  const size_t begin = xml.find(open);
  if (begin == std::string_view::npos) return "";
  const size_t end = xml.find("</" + name + ">", begin);
  if (end == std::string_view::npos) return "";
  std::string text(xml.substr(begin + open.size(), end - begin - open.size()));
  constexpr std::pair<const char*, const char*> kEntities[] = {
      {"&quot;", "\""}, {"&#34;", "\""}, {"&lt;", "<"}, {"&gt;", ">"},
      {"&apos;", "'"},  {"&#39;", "'"},  {"&amp;", "&"}};
  for (const auto& [entity, plain] : kEntities) {
    for (size_t at = 0; (at = text.find(entity, at)) != std::string::npos;) {
      text.replace(at, std::strlen(entity), plain);
      at += std::strlen(plain);
    }
  }
  return text;
}

std::vector<std::string_view>
elements(std::string_view xml, const std::string& name) {
  std::vector<std::string_view> found;
  const std::string open = "<" + name + ">";
  const std::string close = "</" + name + ">";
  for (size_t at = 0; (at = xml.find(open, at)) != std::string_view::npos;) {
    const size_t end = xml.find(close, at);
    if (end == std::string_view::npos) break;
    found.push_back(xml.substr(at, end - at));
    at = end;
  }
  return found;
}

std::string digest_of(const EVP_MD* kind, Bytes bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest, &size, kind, nullptr);
  std::string hex;
  for (unsigned i = 0; i < size; ++i)
    hex += format("{:02x}", unsigned{digest[i]});
  return hex;
}

// CRC-32 as the headers have it: big-endian, in base 64.
std::string crc_of(Bytes bytes) {
  const auto sum = static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  const unsigned char big[4] = {
      static_cast<unsigned char>(sum >> 24),
      static_cast<unsigned char>(sum >> 16),
      static_cast<unsigned char>(sum >> 8), static_cast<unsigned char>(sum)};
  unsigned char text[16];
  EVP_EncodeBlock(text, big, sizeof big);
  return reinterpret_cast<const char*>(text);
}

// The MD5 in an etag: of objects that were put whole and have no key of their
// own.
std::string md5_of(
    const std::string& etag,
    const std::map<std::string, std::string>& headers) {
  std::string hex = etag;
  std::erase(hex, '"');
  const auto encryption = headers.find("x-amz-server-side-encryption");
  const bool own_key =
      headers.contains("x-amz-server-side-encryption-customer-algorithm") ||
      (encryption != headers.end() &&
       encryption->second.starts_with("aws:kms"));
  const bool is_hex =
      hex.size() == 32 && std::ranges::all_of(hex, [](char c) {
        return std::isxdigit(static_cast<unsigned char>(c)) != 0;
      });
  return is_hex && !own_key ? hex : "";
}

Bytes bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

struct ObjectStore::Request {
  std::string method;
  std::string key;
  std::string query;
  std::vector<std::string> headers;
  Bytes body;
  bool file = false;          // the body is part of a file
  std::span<std::byte> into;  // where the answer's body goes
};

struct ObjectStore::Answer {
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

struct ObjectStore::Connections {
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

ObjectStore::ObjectStore(std::string bucket, S3Settings settings)
    : bucket_(std::move(bucket)),
      settings_(std::move(settings)),
      connections_(std::make_unique<Connections>()) {
  curl_library();
}

ObjectStore::~ObjectStore() = default;

std::string ObjectStore::url(const std::string& key) const {
  return ObjectUrl{bucket_, key}.text();
}

// With an endpoint of its own, the bucket is a part of the path: its host may
// have no name below it. So is one with dots, which certificates do not cover.
std::string ObjectStore::address(const Request& request) const {
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

ObjectStore::Answer ObjectStore::attempt(const Request& request) {
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

void ObjectStore::back_off(int attempt) const {
  thread_local std::minstd_rand random(std::random_device{}());
  const auto most = std::min<double>(
      static_cast<double>(kLongestWait.count()),
      std::ldexp(static_cast<double>(settings_.first_wait.count()), attempt));
  const double wait = std::uniform_real_distribution(0.0, most)(random);
  const auto until =
      std::chrono::steady_clock::now() +
      std::chrono::microseconds(static_cast<int64_t>(wait * 1000));
  while (!cancelled_ && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

ObjectStore::Answer ObjectStore::perform(const Request& request) {
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
    if (!answer.may_pass() || tried >= settings_.attempts || cancelled_) {
      return answer;
    }
    lost = lost || answer.status == 0 || answer.status >= 500;
    back_off(tried - 1);
  }
}

ObjectStore::Answer ObjectStore::perform_or_fail(const Request& request) {
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
ObjectStore::way_out(const Request& request, const Answer& answer) const {
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

void ObjectStore::fail(const Request& request, const Answer& answer) const {
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

// ------------------------------------------------------------ small objects

std::vector<ObjectInfo>
ObjectStore::list(const std::string& prefix, int at_most) {
  std::vector<ObjectInfo> found;
  std::string more;
  do {
    Request request{.method = "GET"};
    if (!more.empty()) {
      request.query = "continuation-token=" + encoded(more, false) + "&";
    }
    request.query += "encoding-type=url&list-type=2";
    if (at_most > 0) request.query += format("&max-keys={}", at_most);
    request.query += "&prefix=" + encoded(prefix, false);
    Answer answer = perform(request);
    if (!answer.is_good()) {
      request.key = prefix;  // for the message
      fail(request, answer);
    }
    for (const auto entry : elements(answer.body, "Contents")) {
      found.push_back(
          {.key = decoded(element(entry, "Key")),
           .bytes = std::strtoll(element(entry, "Size").c_str(), nullptr, 10),
           .etag = element(entry, "ETag")});
    }
    more = element(answer.body, "IsTruncated") == "true" && at_most == 0
               ? element(answer.body, "NextContinuationToken")
               : "";
  } while (!more.empty());
  return found;
}

std::optional<ObjectInfo> ObjectStore::find(const std::string& key) {
  const Request request{.method = "HEAD", .key = key};
  const Answer answer = perform(request);
  if (answer.status == 404) return {};
  if (!answer.is_good()) fail(request, answer);
  const std::string etag = answer.header("etag");
  return ObjectInfo{
      .key = key,
      .bytes =
          std::strtoll(answer.header("content-length").c_str(), nullptr, 10),
      .etag = etag,
      .md5 = md5_of(etag, answer.headers)};
}

std::optional<ObjectText> ObjectStore::get(const std::string& key) {
  const Request request{.method = "GET", .key = key};
  const Answer answer = perform(request);
  if (answer.status == 404 && answer.code() != "NoSuchBucket") return {};
  if (!answer.is_good()) fail(request, answer);
  const std::string etag = answer.header("etag");
  const std::string md5 = md5_of(etag, answer.headers);
  if (!md5.empty() && md5 != digest_of(EVP_md5(), bytes_of(answer.body))) {
    throw StorageError(
        format(
            "{}: its bytes do not have the MD5 that the storage names; it is "
            "damaged",
            url(key)),
        answer.status, kDamaged);
  }
  return ObjectText{answer.body, etag};
}

void ObjectStore::read(
    const ObjectInfo& object, int64_t offset, std::span<std::byte> to) {
  if (to.empty()) return;
  const int64_t last = offset + static_cast<int64_t>(to.size()) - 1;
  const Request request{
      .method = "GET",
      .key = object.key,
      .headers =
          {"If-Match: " + object.etag,
           format("Range: bytes={}-{}", offset, last)},
      .into = to};
  const Answer answer = perform(request);
  if (answer.status == 412) {
    throw StorageError(
        format(
            "{}: was replaced while it was read; start again", url(object.key)),
        answer.status, answer.code());
  }
  if (!answer.is_good()) fail(request, answer);
}

std::optional<std::string> ObjectStore::put(
    const std::string& key, const std::string& text,
    const PutCondition& condition) {
  Request request{.method = "PUT", .key = key, .body = bytes_of(text)};
  if (condition.if_absent) request.headers = {"If-None-Match: *"};
  if (!condition.if_match.empty()) {
    request.headers = {"If-Match: " + condition.if_match};
  }
  const Answer answer = perform(request);
  const bool conditional = !request.headers.empty();
  const bool refused = answer.status == 412 || answer.status == 409 ||
                       (answer.status == 404 && answer.code() == "NoSuchKey");
  if (conditional && refused) {
    if (answer.lost) {
      const auto now = get(key);
      if (now && now->text == text) return now->etag;
    }
    return {};
  }
  if (!answer.is_good()) fail(request, answer);
  const std::string md5 = md5_of(answer.header("etag"), answer.headers);
  if (!md5.empty() && md5 != digest_of(EVP_md5(), request.body)) {
    throw StorageError(
        format("{}: the storage has other bytes than were sent", url(key)),
        answer.status, kDamaged);
  }
  return answer.header("etag");
}

void ObjectStore::remove(const std::string& key) {
  const Request request{.method = "DELETE", .key = key};
  const Answer answer = perform(request);
  if (answer.status != 404 && !answer.is_good()) fail(request, answer);
}

// ------------------------------------------------------------ large objects

// Each thread takes the next part that nobody has taken, and has memory for
// one. The first error ends all.
void ObjectStore::for_parts(
    int64_t bytes, int64_t part_bytes,
    const std::function<void(int64_t, int64_t, std::span<std::byte>)>& work) {
  const int64_t parts =
      std::max<int64_t>(1, (bytes + part_bytes - 1) / part_bytes);
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto run = [&] {
    try {
      std::vector<std::byte> memory(
          static_cast<size_t>(std::min(bytes, part_bytes)));
      for (;;) {
        const int64_t part = next.fetch_add(1);
        if (part >= parts) return;
        const int64_t offset = part * part_bytes;
        const auto size =
            static_cast<size_t>(std::min(part_bytes, bytes - offset));
        work(part + 1, offset, std::span(memory).first(size));
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (error == nullptr) error = std::current_exception();
      next = parts;
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < std::min<int64_t>(parts, settings_.connections);
       ++i) {
    threads.emplace_back(run);
  }
  run();
  for (auto& thread : threads) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
}

// The storage compares the header's checksum with what came and returns it; one
// that does not know the header returns an etag that tells.
void ObjectStore::check_stored(
    const Request& request, const Answer& answer, Bytes bytes,
    const std::string& crc) const {
  const std::string theirs = answer.header("x-amz-checksum-crc32");
  if (theirs == crc) return;
  const std::string md5 = md5_of(answer.header("etag"), answer.headers);
  if (theirs.empty() && (md5.empty() || md5 == digest_of(EVP_md5(), bytes))) {
    return;
  }
  throw StorageError(
      format(
          "{}: the storage has other bytes than were sent, by its {}; the "
          "network or the storage damages data",
          url(request.key), theirs.empty() ? "MD5" : "CRC-32"),
      answer.status, kDamaged);
}

std::string ObjectStore::upload_part(
    const std::string& key, const std::string& query, Bytes bytes,
    std::string& crc) {
  crc = crc_of(bytes);
  const Request request{
      .method = "PUT",
      .key = key,
      .query = query,
      .headers = {"x-amz-checksum-crc32: " + crc},
      .body = bytes,
      .file = true};
  for (int tried = 1;; ++tried) {
    const Answer answer = perform(request);
    const bool damaged = answer.status == 400 && answer.code() == kDamaged;
    try {
      if (!answer.is_good()) fail(request, answer);
      check_stored(request, answer, bytes, crc);
      return answer.header("etag");
    } catch (const StorageError& error) {
      const bool again = damaged || error.code() == kDamaged;
      if (!again || tried >= settings_.attempts || cancelled_) throw;
      back_off(tried - 1);
    }
  }
}

// Its answer may be an error although the status is 200, and when an earlier
// answer was lost, the upload is gone and the object there.
void ObjectStore::complete(
    const std::string& key, const std::string& upload, const std::string& xml,
    int64_t bytes) {
  const Request request{
      .method = "POST",
      .key = key,
      .query = "uploadId=" + encoded(upload, false),
      .body = bytes_of(xml)};
  for (int tried = 1;; ++tried) {
    Answer answer = perform(request);
    const bool error = answer.body.find("<Error>") != std::string::npos;
    if (answer.is_good() && !error) return;
    if (answer.code() == "NoSuchUpload" && (answer.lost || tried > 1)) {
      const auto there = find(key);
      if (there && there->bytes == bytes) return;
    }
    const bool again = answer.is_good() && (answer.code() == "InternalError" ||
                                            answer.code() == "SlowDown");
    if (!again || tried >= settings_.attempts || cancelled_) {
      fail(request, answer);
    }
    back_off(tried - 1);
  }
}

void ObjectStore::upload_file(
    const std::filesystem::path& file, const std::string& key) {
  const auto refuse = [&](const char* doing) {
    throw StorageError(
        format("{}: {} failed: {}", file.string(), doing, std::strerror(errno)),
        0, "");
  };
  const FileDescriptor opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (opened.fd() < 0) refuse("opening it");
  struct stat status = {};
  if (::fstat(opened.fd(), &status) != 0) refuse("looking at it");
  const int64_t bytes = status.st_size;
  const auto read_part = [&](int64_t offset, std::span<std::byte> to) {
    size_t done = 0;
    while (done < to.size()) {
      const ssize_t got = ::pread(
          opened.fd(), to.data() + done, to.size() - done,
          offset + static_cast<int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got == 0) errno = EIO;  // it became shorter
      if (got <= 0) refuse("reading it");
      done += static_cast<size_t>(got);
    }
  };
  if (bytes <= settings_.part_bytes) {
    std::vector<std::byte> all(static_cast<size_t>(bytes));
    read_part(0, all);
    std::string crc;
    upload_part(key, "", all, crc);
    return;
  }
  const int64_t part_bytes =
      std::max(settings_.part_bytes, (bytes / kMostParts + kMiB) / kMiB * kMiB);
  const Answer begun = perform_or_fail(
      {.method = "POST",
       .key = key,
       .query = "uploads=",
       .headers = {"x-amz-checksum-algorithm: CRC32"}});
  const std::string upload = element(begun.body, "UploadId");
  if (upload.empty()) {
    throw StorageError(
        format("{}: the storage began an upload without naming it", url(key)),
        begun.status, "");
  }
  std::vector<std::string> parts(
      static_cast<size_t>((bytes + part_bytes - 1) / part_bytes));
  try {
    for_parts(
        bytes, part_bytes,
        [&](int64_t number, int64_t offset, std::span<std::byte> memory) {
          read_part(offset, memory);
          std::string crc;
          const std::string etag = upload_part(
              key,
              format(
                  "partNumber={}&uploadId={}", number, encoded(upload, false)),
              memory, crc);
          parts[static_cast<size_t>(number - 1)] = format(
              "<Part><ChecksumCRC32>{}</ChecksumCRC32><ETag>{}</ETag>"
              "<PartNumber>{}</PartNumber></Part>",
              crc, etag, number);
        });
    std::string xml =
        "<CompleteMultipartUpload "
        "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
    for (const auto& part : parts) xml += part;
    complete(key, upload, xml + "</CompleteMultipartUpload>", bytes);
  } catch (...) {
    // Parts cost money until they are removed; remove_unfinished() finds those
    // that stay now.
    if (!cancelled_) {
      const Request abort{
          .method = "DELETE",
          .key = key,
          .query = "uploadId=" + encoded(upload, false)};
      attempt(abort);
    }
    throw;
  }
}

void ObjectStore::remove_unfinished(const std::string& prefix) {
  Request request{
      .method = "GET",
      .query = "prefix=" + encoded(prefix, false) + "&uploads="};
  const Answer answer = perform(request);
  if (answer.status == 501 || answer.status == 403) return;  // a right to spare
  if (!answer.is_good()) fail(request, answer);
  for (const auto upload : elements(answer.body, "Upload")) {
    const std::string key = element(upload, "Key");
    if (!key.starts_with(prefix)) continue;
    const Request abort{
        .method = "DELETE",
        .key = key,
        .query = "uploadId=" + encoded(element(upload, "UploadId"), false)};
    const Answer removed = perform(abort);
    if (removed.status != 404 && !removed.is_good()) fail(abort, removed);
  }
}

void ObjectStore::download(
    const ObjectInfo& object, int file, const IsIntact& is_intact) {
  if (object.bytes == 0) return;
  for_parts(
      object.bytes, settings_.part_bytes,
      [&](int64_t, int64_t offset, std::span<std::byte> memory) {
        for (int tried = 1;; ++tried) {
          read(object, offset, memory);
          if (!is_intact || is_intact(offset, memory)) break;
          if (tried >= settings_.attempts || cancelled_) {
            throw StorageError(
                format(
                    "{}: bytes {} to {} do not have their checksum, also when "
                    "they are read again",
                    url(object.key), offset,
                    offset + static_cast<int64_t>(memory.size())),
                200, kDamaged);
          }
          back_off(tried - 1);
        }
        for (size_t done = 0; done < memory.size();) {
          const ssize_t wrote = ::pwrite(
              file, memory.data() + done, memory.size() - done,
              offset + static_cast<int64_t>(done));
          if (wrote < 0 && errno == EINTR) continue;
          if (wrote <= 0) {
            throw StorageError(
                format(
                    "{}: writing what was read of it failed: {}",
                    url(object.key),
                    std::strerror(wrote == 0 ? ENOSPC : errno)),
                0, "");
          }
          done += static_cast<size_t>(wrote);
        }
      });
}

}  // namespace echelon::storage
