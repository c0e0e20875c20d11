// The reader checks an index once, completely: the counts against the file's
// length, the offsets against the sizes, the documents against the sequences.
// After that it reads without checks of bounds; only ids are compared with the
// vocabulary. The writer writes both files under a name with its process's
// number, syncs them, and renames the index last, so an index that exists has
// its tokens.
#include "echelon/data/sources/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr uint64_t kIndexVersion = 1;
constexpr size_t kBlockBytes = size_t{4} << 20;  // of a checksum
constexpr size_t kHeaderBytes = sizeof(kMagic) + 8 + 1 + 8 + 8;

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

std::string checksum_of(std::span<const std::byte> bytes) {
  return checksum(bytes.data(), bytes.size());
}

int64_t number_at(const std::byte* list, int64_t i) {
  return load<int64_t>(list + static_cast<size_t>(i) * sizeof(int64_t));
}

/// Calls `body` with a zero of the type.
template <typename Body>
void with_type(TokenType type, Body&& body) {
  switch (type) {
    case TokenType::u8:
      return body(uint8_t{});
    case TokenType::i8:
      return body(int8_t{});
    case TokenType::i16:
      return body(int16_t{});
    case TokenType::i32:
      return body(int32_t{});
    case TokenType::i64:
      return body(int64_t{});
    case TokenType::u16:
      return body(uint16_t{});
    case TokenType::u32:
      return body(uint32_t{});
  }
}

class IndexParser {
 public:
  IndexParser(
      std::span<const std::byte> file, uint64_t bin_bytes,
      const std::string& path)
      : file_(file), bin_bytes_(bin_bytes), path_(path) {}

  TokenIndex run() {
    read_header();
    check_sequences();
    check_documents();
    return index_;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(path_ + ": " + why);
  }

  void read_header() {
    if (file_.size() < kHeaderBytes) {
      fail(format(
          "has {} bytes; the header of an index alone takes {}; it is "
          "truncated, or not an index",
          file_.size(), kHeaderBytes));
    }
    const std::byte* at = file_.data();
    if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0) {
      fail("does not begin with MMIDIDX; it is not an index of tokens");
    }
    at += sizeof(kMagic);
    const auto version = load<uint64_t>(at);
    if (version != kIndexVersion) {
      fail(format("is an index of version {}; only 1 is known", version));
    }
    at += 8;
    const auto code = load<uint8_t>(at);
    if (code == 6 || code == 7) {
      fail(format(
          "says that ids are floating-point numbers (type {}); they must be "
          "integers",
          code));
    }
    if (code < 1 || code > 8) {
      fail(format("has type {} of ids; types are 1 to 8", code));
    }
    index_.type = static_cast<TokenType>(code);
    const auto sequences = load<uint64_t>(at + 1);
    const auto documents = load<uint64_t>(at + 9);
    check_size(sequences, documents);
    index_.num_sequences = static_cast<int64_t>(sequences);
    index_.num_documents = static_cast<int64_t>(documents) - 1;
    sizes_ = file_.data() + kHeaderBytes;
    index_.pointers = sizes_ + sequences * sizeof(int32_t);
    index_.documents = index_.pointers + sequences * sizeof(int64_t);
  }

  void check_size(uint64_t sequences, uint64_t documents) const {
    constexpr uint64_t kMost = uint64_t{1} << 48;
    if (sequences > kMost || documents > kMost) {
      fail(format(
          "says that it has {} sequences and {} document indices, which no "
          "file holds",
          sequences, documents));
    }
    const uint64_t needed = kHeaderBytes + sequences * 12 + documents * 8;
    if (needed > file_.size()) {
      fail(format(
          "has {} bytes, but {} sequences and {} document indices take {}; it "
          "is truncated",
          file_.size(), sequences, documents, needed));
    }
    if (needed + sequences == file_.size() && sequences > 0) {
      fail(
          "has a mode for each sequence: it indexes images and text; only text "
          "is known");
    }
    if (needed < file_.size()) {
      fail(format(
          "has {} bytes, {} more than its {} sequences and {} document indices "
          "take",
          file_.size(), file_.size() - needed, sequences, documents));
    }
    if (documents == 0) {
      fail("has no document indices; there is at least the end, S");
    }
  }

  void check_sequences() {
    const auto width = static_cast<int64_t>(token_bytes(index_.type));
    int64_t at = 0;
    for (int64_t i = 0; i < index_.num_sequences; ++i) {
      const auto size = load<int32_t>(sizes_ + 4 * static_cast<size_t>(i));
      if (size < 0) {
        fail(format(
            "sequence {} has {} tokens; 0 or more are possible", i, size));
      }
      const int64_t pointer = number_at(index_.pointers, i);
      if (pointer != at) {
        fail(format(
            "sequence {} begins at byte {}, but those before it end at {}; "
            "sequences must follow each other",
            i, pointer, at));
      }
      // Up to 2^48 sizes below 2^31, times 8 bytes, may overflow.
      if (__builtin_add_overflow(at, int64_t{size} * width, &at)) {
        fail("its sequences have more tokens than a file holds");
      }
    }
    if (static_cast<uint64_t>(at) != bin_bytes_) {
      fail(format(
          "its sequences take {} bytes, but the .bin has {}; the two files do "
          "not belong together, or one is truncated",
          at, bin_bytes_));
    }
    index_.num_tokens = at / width;
  }

  void check_documents() const {
    int64_t before = 0;
    for (int64_t d = 0; d <= index_.num_documents; ++d) {
      const int64_t sequence = number_at(index_.documents, d);
      const bool good =
          d == 0 ? sequence == 0
                 : sequence >= before && sequence <= index_.num_sequences;
      if (!good) {
        fail(format(
            "document index {} is {}; they begin with 0 and ascend to {}", d,
            sequence, index_.num_sequences));
      }
      before = sequence;
    }
    if (before != index_.num_sequences) {
      fail(format(
          "its last document index is {}; it must be the number of sequences, "
          "{}",
          before, index_.num_sequences));
    }
  }

  std::span<const std::byte> file_;
  uint64_t bin_bytes_;
  const std::string& path_;
  TokenIndex index_;
  const std::byte* sizes_ = nullptr;
};

}  // namespace

size_t token_bytes(TokenType type) {
  size_t bytes = 0;
  with_type(type, [&](auto zero) { bytes = sizeof(zero); });
  return bytes;
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const auto fail = [&] {
    throw DataError(path + ": cannot be read: " + std::strerror(errno));
  };
  // O_NONBLOCK: a pipe would wait for a writer.
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0) fail();
  if (!S_ISREG(status.st_mode)) {
    throw DataError(
        path + ": is " + (S_ISDIR(status.st_mode) ? "a folder" : "no file") +
        "; name a file, or all files of a folder as in FOLDER/*.txt");
  }
  device_ = status.st_dev;
  inode_ = status.st_ino;
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (data == MAP_FAILED) fail();
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::check_size() const {
  struct stat status = {};
  if (::stat(path_.c_str(), &status) != 0 || status.st_dev != device_ ||
      status.st_ino != inode_ || static_cast<size_t>(status.st_size) >= size_) {
    return;
  }
  throw DataError(format(
      "{}: had {} bytes when it was opened and has {}: it was shortened while "
      "it is in use; restore it, and the same command resumes",
      path_, size_, status.st_size));
}

int64_t TokenIndex::document_begin(int64_t d) const {
  const int64_t sequence = number_at(documents, d);
  if (sequence == num_sequences) return num_tokens;
  return number_at(pointers, sequence) /
         static_cast<int64_t>(token_bytes(type));
}

TokenIndex parse_token_index(
    std::span<const std::byte> file, uint64_t bin_bytes,
    const std::string& path) {
  return IndexParser(file, bin_bytes, path).run();
}

TokenFile::TokenFile(const std::string& path, TokenType type)
    : bin_(std::make_unique<MappedFile>(path)), type_(type) {
  const size_t width = token_bytes(type);
  const size_t bytes = bin_->bytes().size();
  if (bytes % width != 0) {
    throw DataError(format(
        "{}: has {} bytes, which is no multiple of the {} of a token; it is "
        "truncated, or [data] token_bytes is wrong",
        path, bytes, width));
  }
  num_tokens_ = static_cast<int64_t>(bytes / width);
}

TokenFile::TokenFile(const std::string& bin_path, const std::string& idx_path)
    : bin_(std::make_unique<MappedFile>(bin_path)),
      index_file_(std::make_unique<MappedFile>(idx_path)),
      index_(parse_token_index(
          index_file_->bytes(), bin_->bytes().size(), idx_path)),
      type_(index_.type),
      num_tokens_(index_.num_tokens) {}

void TokenFile::read(
    int64_t begin, int64_t count, int64_t vocabulary, int64_t* to) const {
  bin_->check_size();
  const size_t width = token_bytes(type_);
  if (!sums_.empty()) {
    const size_t at = static_cast<size_t>(begin) * width;
    verify_bytes(
        at, at + static_cast<size_t>(count) * width,
        "; remove the file, and the same command tokenises the text again");
  }
  const std::byte* from =
      bin_->bytes().data() + static_cast<size_t>(begin) * width;
  with_type(type_, [&](auto zero) {
    using Token = decltype(zero);
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<int64_t>(
          load<Token>(from + static_cast<size_t>(i) * sizeof(Token)));
    }
  });
  // A negative id is huge as an unsigned number.
  const auto bad = std::find_if(to, to + count, [&](int64_t id) {
    return static_cast<uint64_t>(id) >= static_cast<uint64_t>(vocabulary);
  });
  if (bad == to + count) return;
  const int64_t token = begin + (bad - to);
  throw DataError(format(
      "{}: token {} (byte {}) is {}, but the vocabulary has {} tokens; the "
      "tokenizer, vocab_size or token_bytes does not fit the file",
      path(), token, token * static_cast<int64_t>(width), *bad, vocabulary));
}

int64_t TokenFile::largest(int64_t vocabulary) const {
  constexpr int64_t kPiece = 1 << 16;
  std::vector<int64_t> piece(static_cast<size_t>(kPiece));
  int64_t largest = -1;
  for (int64_t begin = 0; begin < num_tokens_; begin += kPiece) {
    const int64_t count = std::min(kPiece, num_tokens_ - begin);
    read(begin, count, vocabulary, piece.data());
    largest = std::max(
        largest, *std::max_element(piece.begin(), piece.begin() + count));
  }
  return largest;
}

std::span<const std::byte> TokenFile::block(size_t i) const {
  const auto bytes = bin_->bytes();
  const size_t begin = i * kBlockBytes;
  return bytes.subspan(begin, std::min(kBlockBytes, bytes.size() - begin));
}

std::string TokenFile::checksums() const {
  std::string text = checksum_of(index_file_->bytes()) + "\n";
  for (size_t i = 0; i * kBlockBytes < bin_->bytes().size(); ++i) {
    text += checksum_of(block(i)) + "\n";
  }
  return text;
}

void TokenFile::verify(const std::string& checksums, size_t at_once) {
  std::istringstream lines(checksums);
  std::string expected;
  std::getline(lines, expected);
  const std::string found = checksum_of(index_file_->bytes());
  if (found != expected) {
    throw DataError(format(
        "{}: is damaged: its checksum is {}, but {} was written",
        index_file_->path(), found, expected));
  }
  for (std::string sum; std::getline(lines, sum);) sums_.push_back(sum);
  const size_t bytes = bin_->bytes().size();
  const size_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
  if (sums_.size() != blocks) {
    throw DataError(format(
        "{}: has {} blocks of 4 MiB, but {} checksums", path(), blocks,
        sums_.size()));
  }
  verified_ = std::make_unique<std::atomic<bool>[]>(blocks);
  if (bytes <= at_once) verify_bytes(0, bytes, "");
}

void TokenFile::verify_bytes(
    size_t begin, size_t end, const char* way_out) const {
  for (size_t i = begin / kBlockBytes; i * kBlockBytes < end; ++i) {
    if (verified_[i]) continue;
    const std::string found = checksum_of(block(i));
    if (found != sums_[i]) {
      throw DataError(format(
          "{}: is damaged: bytes {} to {} have the checksum {}, but {} was "
          "written{}",
          path(), i * kBlockBytes, i * kBlockBytes + block(i).size(), found,
          sums_[i], way_out));
    }
    verified_[i] = true;
  }
}

std::string TokenFile::fingerprint() const {
  std::string text;
  if (index_file_) text = checksum_of(index_file_->bytes());
  for (const auto& sum : sums_) text += sum;
  if (sums_.empty()) {
    bin_->check_size();
    text += sampled_checksum(bin_->bytes().data(), bin_->bytes().size());
  }
  return checksum(text.data(), text.size());
}

std::vector<int64_t> TokenFile::borders(int64_t begin, int64_t end) const {
  index_file_->check_size();
  // The first document that begins after `begin`.
  int64_t low = 0, high = index_.num_documents;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (index_.document_begin(middle) > begin) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  std::vector<int64_t> borders;
  for (; low < index_.num_documents; ++low) {
    const int64_t at = index_.document_begin(low);
    if (at >= end) break;
    // An empty document begins where the next one begins.
    if (borders.empty() || borders.back() != at) borders.push_back(at);
  }
  return borders;
}

TokenWriter::TokenWriter(std::string prefix, int64_t vocabulary)
    : prefix_(std::move(prefix)),
      part_(prefix_ + ".part-" + std::to_string(::getpid())),
      wide_(vocabulary > int64_t{1} << 16) {
  bin_ = std::fopen((part_ + ".bin").c_str(), "wb");
  if (bin_ == nullptr) fail(part_ + ".bin");
}

TokenWriter::~TokenWriter() {
  if (bin_ != nullptr) std::fclose(bin_);
  // Removes the files that finish() has not renamed.
  ::unlink((part_ + ".bin").c_str());
  ::unlink((part_ + ".idx").c_str());
}

void TokenWriter::fail(const std::string& what) {
  throw DataError(what + ": cannot be written: " + std::strerror(errno));
}

void TokenWriter::write(std::FILE* file, const void* data, size_t bytes) {
  if (bytes > 0 && std::fwrite(data, 1, bytes, file) != bytes) fail(part_);
}

void TokenWriter::close(std::FILE*& file) {
  const bool good = std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int reason = errno;
  const bool closed = std::fclose(file) == 0;
  file = nullptr;
  if (good && closed) return;
  if (!good) errno = reason;
  fail(part_);
}

void TokenWriter::add(std::span<const int32_t> ids) {
  open_size_ += static_cast<int64_t>(ids.size());
  if (wide_) {
    write(bin_, ids.data(), ids.size_bytes());
    return;
  }
  narrow_.assign(ids.begin(), ids.end());
  write(bin_, narrow_.data(), narrow_.size() * sizeof(uint16_t));
}

void TokenWriter::end_document() {
  if (open_size_ > 0) document_sizes_.push_back(open_size_);
  open_size_ = 0;
}

void TokenWriter::finish() {
  end_document();
  close(bin_);
  // A document of 2^31 tokens or more becomes several sequences.
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();
  std::vector<int32_t> sizes;
  std::vector<int64_t> pointers, documents = {0};
  int64_t at = 0;
  for (int64_t left : document_sizes_) {
    while (left > 0) {
      const int64_t size = std::min(left, kLongest);
      sizes.push_back(static_cast<int32_t>(size));
      pointers.push_back(at);
      at += size * (wide_ ? 4 : 2);
      left -= size;
    }
    documents.push_back(static_cast<int64_t>(sizes.size()));
  }
  std::FILE* idx = std::fopen((part_ + ".idx").c_str(), "wb");
  if (idx == nullptr) fail(part_ + ".idx");
  try {
    const uint64_t version = kIndexVersion;
    const auto code =
        static_cast<uint8_t>(wide_ ? TokenType::i32 : TokenType::u16);
    const uint64_t counts[2] = {sizes.size(), documents.size()};
    write(idx, kMagic, sizeof(kMagic));
    write(idx, &version, sizeof(version));
    write(idx, &code, sizeof(code));
    write(idx, counts, sizeof(counts));
    write(idx, sizes.data(), sizes.size() * sizeof(int32_t));
    write(idx, pointers.data(), pointers.size() * sizeof(int64_t));
    write(idx, documents.data(), documents.size() * sizeof(int64_t));
  } catch (const DataError&) {
    std::fclose(idx);
    throw;
  }
  close(idx);
  // The index comes last: where it exists, the tokens are complete.
  for (const char* suffix : {".bin", ".idx"}) {
    if (::rename((part_ + suffix).c_str(), (prefix_ + suffix).c_str()) != 0) {
      fail(prefix_ + suffix);
    }
  }
}

}  // namespace echelon
