#include "echelon/storage/object_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "echelon/storage/client.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::storage {
namespace {

constexpr int64_t kMostParts = 10'000;  // S3's limit
constexpr int64_t kMiB = int64_t{1} << 20;

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

// "Sat, 28 Nov 2026 09:27:31 GMT"; 0 for another text.
std::time_t time_of(const std::string& text) {
  std::tm time = {};
  const char* end =
      ::strptime(text.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &time);
  return end == nullptr ? 0 : ::timegm(&time);
}

}  // namespace

ObjectStore::ObjectStore(std::string bucket, S3Settings settings)
    : client_(
          std::make_unique<Client>(std::move(bucket), std::move(settings))) {}

ObjectStore::~ObjectStore() = default;

void ObjectStore::cancel() {
  client_->cancel();
}

const S3Settings& ObjectStore::settings() const {
  return client_->settings();
}

std::string ObjectStore::url(const std::string& key) const {
  return client_->url(key);
}

// ------------------------------------------------------------ small objects

std::vector<ObjectInfo>
ObjectStore::list(const std::string& prefix, int at_most) {
  std::vector<ObjectInfo> found;
  std::string more;
  do {
    Request request{.method = "GET"};
    if (!more.empty()) {
      request.query = "continuation-token=" + encoded(more) + "&";
    }
    request.query += "encoding-type=url&list-type=2";
    if (at_most > 0) request.query += format("&max-keys={}", at_most);
    request.query += "&prefix=" + encoded(prefix);
    Answer answer = client_->perform(request);
    if (!answer.is_good()) {
      request.key = prefix;  // for the message
      client_->fail(request, answer);
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
  const Answer answer = client_->perform(request);
  if (answer.status == 404) return {};
  if (!answer.is_good()) client_->fail(request, answer);
  const std::string etag = answer.header("etag");
  return ObjectInfo{
      .key = key,
      .bytes =
          std::strtoll(answer.header("content-length").c_str(), nullptr, 10),
      .etag = etag,
      .md5 = md5_of(etag, answer.headers),
      .modified = time_of(answer.header("last-modified"))};
}

std::optional<ObjectText> ObjectStore::get(const std::string& key) {
  const Request request{.method = "GET", .key = key};
  for (int tried = 1;; ++tried) {
    const Answer answer = client_->perform(request);
    if (answer.status == 404 && answer.code() != "NoSuchBucket") return {};
    if (!answer.is_good()) client_->fail(request, answer);
    const std::string etag = answer.header("etag");
    const std::string md5 = md5_of(etag, answer.headers);
    if (md5.empty() || md5 == digest_of(EVP_md5(), bytes_of(answer.body))) {
      return ObjectText{answer.body, etag};
    }
    if (!client_->may_try_again(tried)) {
      throw StorageError(
          format(
              "{}: its bytes do not have the MD5 that the storage names; it is "
              "damaged",
              url(key)),
          answer.status, kDamaged);
    }
    client_->back_off(tried);
  }
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
  const Answer answer = client_->perform(request);
  if (answer.status == 412) {
    throw StorageError(
        format(
            "{}: was replaced while it was read; start again", url(object.key)),
        answer.status, answer.code());
  }
  if (!answer.is_good()) client_->fail(request, answer);
}

std::optional<std::string> ObjectStore::put(
    const std::string& key, const std::string& text,
    const PutCondition& condition) {
  Request request{.method = "PUT", .key = key, .body = bytes_of(text)};
  if (condition.if_absent) request.headers = {"If-None-Match: *"};
  if (!condition.if_match.empty()) {
    request.headers = {"If-Match: " + condition.if_match};
  }
  const Answer answer = client_->perform(request);
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
  if (!answer.is_good()) client_->fail(request, answer);
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
  const Answer answer = client_->perform(request);
  if (answer.status != 404 && !answer.is_good()) client_->fail(request, answer);
}

// ------------------------------------------------------------ large objects

namespace {

// Each thread takes the next part that nobody has taken, and has memory for
// one. The first error ends all.
void for_parts(
    int64_t bytes, int64_t part_bytes, int connections,
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
  for (int64_t i = 1; i < std::min<int64_t>(parts, connections); ++i) {
    threads.emplace_back(run);
  }
  run();
  for (auto& thread : threads) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
}

// The storage compares the header's checksum with what came and returns it; one
// that does not know the header returns an etag that tells.
void check_stored(
    const Answer& answer, Bytes bytes, const std::string& crc,
    const std::string& url) {
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
          url, theirs.empty() ? "MD5" : "CRC-32"),
      answer.status, kDamaged);
}

// A part of an upload, or a whole object, with the checksum `crc`. Returns its
// etag.
std::string upload_part(
    Client& client, const std::string& key, const std::string& query,
    Bytes bytes, const std::string& crc) {
  const Request request{
      .method = "PUT",
      .key = key,
      .query = query,
      .headers = {"x-amz-checksum-crc32: " + crc},
      .body = bytes,
      .file = true};
  for (int tried = 1;; ++tried) {
    try {
      const Answer answer = client.perform_or_fail(request);
      check_stored(answer, bytes, crc, client.url(key));
      return answer.header("etag");
    } catch (const StorageError& error) {
      const bool again = error.code() == kDamaged;
      if (!again || !client.may_try_again(tried)) throw;
      client.back_off(tried);
    }
  }
}

// Its answer may be an error although the status is 200, and when an earlier
// answer was lost, the upload is gone and the object there.
void complete(
    Client& client, const std::string& key, const std::string& upload,
    const std::string& xml, const std::function<bool()>& is_there) {
  const Request request{
      .method = "POST",
      .key = key,
      .query = "uploadId=" + encoded(upload),
      .body = bytes_of(xml)};
  for (int tried = 1;; ++tried) {
    Answer answer = client.perform(request);
    const bool error = answer.body.find("<Error>") != std::string::npos;
    if (answer.is_good() && !error) return;
    const bool lost = answer.lost || tried > 1;
    if (answer.code() == "NoSuchUpload" && lost && is_there()) return;
    const bool again = answer.is_good() && (answer.code() == "InternalError" ||
                                            answer.code() == "SlowDown");
    if (!again || !client.may_try_again(tried)) client.fail(request, answer);
    client.back_off(tried);
  }
}

}  // namespace

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
  if (bytes <= settings().part_bytes) {
    std::vector<std::byte> all(static_cast<size_t>(bytes));
    read_part(0, all);
    upload_part(*client_, key, "", all, crc_of(all));
    return;
  }
  const int64_t part_bytes = std::max(
      settings().part_bytes, (bytes / kMostParts + kMiB) / kMiB * kMiB);
  const Answer begun = client_->perform_or_fail(
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
        bytes, part_bytes, settings().connections,
        [&](int64_t number, int64_t offset, std::span<std::byte> memory) {
          read_part(offset, memory);
          const std::string crc = crc_of(memory);
          const std::string etag = upload_part(
              *client_, key,
              format("partNumber={}&uploadId={}", number, encoded(upload)),
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
    xml += "</CompleteMultipartUpload>";
    complete(*client_, key, upload, xml, [&] {
      const auto there = find(key);
      return there && there->bytes == bytes;
    });
  } catch (...) {
    // Parts cost money until they are removed; remove_unfinished() finds those
    // that stay now.
    if (!client_->is_cancelled()) {
      const Request abort{
          .method = "DELETE",
          .key = key,
          .query = "uploadId=" + encoded(upload)};
      client_->attempt(abort);
    }
    throw;
  }
}

void ObjectStore::remove_unfinished(const std::string& prefix) {
  Request request{
      .method = "GET", .query = "prefix=" + encoded(prefix) + "&uploads="};
  const Answer answer = client_->perform(request);
  if (answer.status == 501 || answer.status == 403) return;  // a right to spare
  if (!answer.is_good()) client_->fail(request, answer);
  for (const auto upload : elements(answer.body, "Upload")) {
    const std::string key = element(upload, "Key");
    if (!key.starts_with(prefix)) continue;
    const Request abort{
        .method = "DELETE",
        .key = key,
        .query = "uploadId=" + encoded(element(upload, "UploadId"))};
    const Answer removed = client_->perform(abort);
    if (removed.status != 404 && !removed.is_good())
      client_->fail(abort, removed);
  }
}

void ObjectStore::download(
    const ObjectInfo& object, int file, const IsIntact& is_intact) {
  if (object.bytes == 0) return;
  for_parts(
      object.bytes, settings().part_bytes, settings().connections,
      [&](int64_t, int64_t offset, std::span<std::byte> memory) {
        for (int tried = 1;; ++tried) {
          read(object, offset, memory);
          if (!is_intact || is_intact(offset, memory)) break;
          if (!client_->may_try_again(tried)) {
            throw StorageError(
                format(
                    "{}: bytes {} to {} do not have their checksum, also when "
                    "they are read again",
                    url(object.key), offset,
                    offset + static_cast<int64_t>(memory.size())),
                200, kDamaged);
          }
          client_->back_off(tried);
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
