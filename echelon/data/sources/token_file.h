// Token ids on disk, mapped into memory: plain .bin files and Megatron-LM's
// indexed ones.
//
// A plain file holds ids of one type, one after the other, in the byte order of
// x86. An indexed one has a second file, .idx (little-endian, without padding):
//   9 bytes  "MMIDIDX\0\0"
//   uint64   version, 1
//   uint8    type of an id: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8
//   uint16 uint64   S, the number of sequences uint64   D, the number of
//   document indices int32    [S] tokens of each sequence int64    [S] where in
//   the .bin each begins, in bytes int64    [D] the sequence that each document
//   begins with; last: S
// Source: Megatron-LM's indexed_dataset.py, format version 1; sequences follow
// each other without gaps, as its builder writes them.
#pragma once

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

/// A file in memory, as long as this lives. Throws DataError when it cannot be
/// read or is no file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// What an .idx file says; points into its bytes.
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

/// Reads and checks all of an .idx whose tokens are a file of `bin_bytes`
/// bytes. Throws DataError: `path`, what is wrong, where.
TokenIndex parse_token_index(
    std::span<const std::byte> file, uint64_t bin_bytes,
    const std::string& path);

class TokenFile {
 public:
  /// A plain file. Throws DataError: unreadable, or a size that is no multiple
  /// of an id's.
  TokenFile(const std::string& path, TokenType type);
  /// An indexed pair.
  TokenFile(const std::string& bin_path, const std::string& idx_path);

  const std::string& path() const { return bin_->path(); }
  int64_t size() const { return num_tokens_; }
  TokenType type() const { return type_; }
  bool has_documents() const { return index_file_ != nullptr; }

  /// Tokens [begin, begin + count), which must lie inside. Throws DataError
  /// that names file and offset for one that is not in [0, vocabulary).
  void
  read(int64_t begin, int64_t count, int64_t vocabulary, int64_t* to) const;

  /// Largest id of the file; reads all of it. Throws DataError for a negative
  /// one, and for one that is not below `vocabulary`.
  int64_t largest(int64_t vocabulary) const;

  /// The first tokens of documents within (begin, end), ascending: the borders
  /// inside of that range. Only with documents.
  std::vector<int64_t> borders(int64_t begin, int64_t end) const;

 private:
  std::unique_ptr<MappedFile> bin_;
  std::unique_ptr<MappedFile> index_file_;
  TokenIndex index_;
  TokenType type_ = TokenType::u16;
  int64_t num_tokens_ = 0;
};

/// Writes an indexed pair: appears whole, or not at all. When a pair of that
/// name is written by two at once, both must write the same.
class TokenWriter {
 public:
  /// prefix.bin and prefix.idx; `vocabulary` chooses the type of an id.
  TokenWriter(std::string prefix, int64_t vocabulary);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  void add(std::span<const int32_t> ids);
  void end_document();  // an empty one is left out
  /// Puts the files into place. Throws DataError when the disk is full.
  void finish();

 private:
  void write(std::FILE* file, const void* data, size_t bytes);
  void close(std::FILE*& file);
  [[noreturn]] void fail(const std::string& what);

  std::string prefix_;
  std::string part_;  // name of the unfinished files
  bool wide_;
  std::FILE* bin_ = nullptr;
  std::vector<int64_t> document_sizes_;
  int64_t open_size_ = 0;
  std::vector<uint16_t> narrow_;  // one piece, in 16 bits
};

}  // namespace echelon
