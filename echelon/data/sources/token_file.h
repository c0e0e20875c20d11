// Token ids on disk, mapped into memory: plain .bin files and Megatron-LM's
// indexed ones.
//
// A plain file is an array of ids of one type, little-endian. An indexed one
// has a second file, .idx (little-endian, without padding):
//   9 bytes  "MMIDIDX\0\0"
//   uint64   version, 1
//   uint8    type of an id:
//            1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
//   uint64   S, the number of sequences
//   uint64   D, the number of document indices
//   int32    [S] the number of tokens of each sequence
//   int64    [S] the offset of each sequence in the .bin, in bytes
//   int64    [D] the first sequence of each document; the last entry is S
//
// Source: Megatron-LM's indexed_dataset.py, format version 1; sequences follow
// each other without gaps, as its builder writes them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace echelon {

enum class TokenType : uint8_t {
  u8 = 1,
  i8 = 2,
  i16 = 3,
  i32 = 4,
  i64 = 5,
  u16 = 8,
  u32 = 64,  // plain files only
};

size_t token_bytes(TokenType type);

/// A memory-mapped file. Throws DataError when it cannot be read or is not a
/// regular file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  /// Reading bytes that the file lost since it was mapped ends the process
  /// (SIGBUS), so call check_size() first.
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  /// Throws DataError when the file has been shortened. One that has replaced
  /// it leaves bytes() as they were.
  void check_size() const;

 private:
  std::string path_;
  uint64_t device_ = 0, inode_ = 0;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// The content of an .idx file; points into its bytes.
struct TokenIndex {
  TokenType type = TokenType::u16;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  int64_t num_documents = 0;
  const std::byte* pointers = nullptr;   // int64 [num_sequences]
  const std::byte* documents = nullptr;  // int64 [num_documents + 1]

  /// The first token of document `d`; num_tokens for d = num_documents.
  int64_t document_begin(int64_t d) const;
};

/// Reads and checks a complete .idx whose .bin has `bin_bytes` bytes. Throws
/// DataError, which begins with `path` and names the place.
TokenIndex parse_token_index(
    std::span<const std::byte> file, uint64_t bin_bytes,
    const std::string& path);

class TokenFile {
 public:
  /// A plain file. Throws DataError when it is unreadable, or when its size is
  /// no multiple of the size of an id.
  TokenFile(const std::string& path, TokenType type);
  /// An indexed pair.
  TokenFile(const std::string& bin_path, const std::string& idx_path);

  const std::string& path() const { return bin_->path(); }
  int64_t size() const { return num_tokens_; }
  TokenType type() const { return type_; }
  bool has_documents() const { return index_file_ != nullptr; }

  /// Reads tokens [begin, begin + count) of the file. Throws DataError, with
  /// file and offset, for a token that is not in [0, vocabulary).
  void
  read(int64_t begin, int64_t count, int64_t vocabulary, int64_t* to) const;

  /// The largest id; reads the whole file. Throws DataError for an id that is
  /// negative or not below `vocabulary`.
  int64_t largest(int64_t vocabulary) const;

  /// Of an indexed pair: the checksum of its .idx and of each block of 4 MiB of
  /// its .bin, a line each. Reads both as a whole.
  std::string checksums() const;
  /// Compares an indexed pair with an earlier text of checksums(): the .idx and
  /// a .bin of at most `at_once` bytes now, each block of a larger .bin before
  /// it is first read. Throws DataError with the file, the bytes and both
  /// checksums; read() does the same later. Call it before other threads read.
  void verify(const std::string& checksums, size_t at_once = size_t{256} << 20);

  /// A checksum of what it holds, the same whatever its name and time: of all
  /// bytes where verify() knows their checksums, otherwise sampled_checksum().
  std::string fingerprint() const;

  /// The borders of documents in (begin, end): the indices of their first
  /// tokens, ascending. Only for files with documents.
  std::vector<int64_t> borders(int64_t begin, int64_t end) const;

 private:
  std::span<const std::byte> block(size_t i) const;
  void verify_bytes(size_t begin, size_t end, const char* way_out) const;

  std::unique_ptr<MappedFile> bin_;
  std::unique_ptr<MappedFile> index_file_;
  std::vector<std::string> sums_;  // of the blocks; empty: none are known
  std::unique_ptr<std::atomic<bool>[]> verified_;  // of each block
  TokenIndex index_;
  TokenType type_ = TokenType::u16;
  int64_t num_tokens_ = 0;
};

/// Writes an indexed pair, which appears complete or not at all. Two processes
/// that write a pair of the same name at once must write the same content.
class TokenWriter {
 public:
  /// prefix.bin and prefix.idx; `vocabulary` chooses the type of an id.
  TokenWriter(std::string prefix, int64_t vocabulary);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  void add(std::span<const int32_t> ids);
  void end_document();  // empty documents are dropped
  /// Renames the files into place. Throws DataError when the disk is full.
  void finish();

 private:
  void write(std::FILE* file, const void* data, size_t bytes);
  void close(std::FILE*& file);
  [[noreturn]] void fail(const std::string& what);

  std::string prefix_;
  std::string part_;  // prefix of the unfinished files
  bool wide_;
  std::FILE* bin_ = nullptr;
  std::vector<int64_t> document_sizes_;
  int64_t open_size_ = 0;
  std::vector<uint16_t> narrow_;  // ids in 16 bits
};

}  // namespace echelon
