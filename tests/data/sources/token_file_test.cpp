#include "echelon/data/sources/token_file.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>

#include "tests/data/sources/make_tokens.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::token_file_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<int64_t>
tokens_of(const TokenFile& file, int64_t vocabulary = 1 << 20) {
  std::vector<int64_t> tokens(static_cast<size_t>(file.size()));
  file.read(0, file.size(), vocabulary, tokens.data());
  return tokens;
}

TEST(TokenFile, APipeIsRefused) {
  const TempFolder folder;
  const std::string pipe = folder.path("pipe.bin");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(
      error_text<DataError>([&] { TokenFile(pipe, TokenType::u16); }),
      HasSubstr("pipe.bin: is no file"));
}

TEST(TokenFile, PlainFilesOfBothTypes) {
  const TempFolder folder;
  const auto narrow =
      folder.write("a.bin", raw_bytes<uint16_t>({5, 65535, 0, 7}));
  const auto wide = folder.write("b.bin", raw_bytes<uint32_t>({70000, 1}));
  EXPECT_THAT(
      tokens_of(TokenFile(narrow, TokenType::u16)),
      ElementsAre(5, 65535, 0, 7));
  EXPECT_THAT(
      tokens_of(TokenFile(wide, TokenType::u32)), ElementsAre(70000, 1));
  EXPECT_EQ(TokenFile(narrow, TokenType::u16).largest(1 << 20), 65535);
  EXPECT_FALSE(TokenFile(narrow, TokenType::u16).has_documents());
}

TEST(TokenFile, NamesFileAndOffsetOfATokenOutsideOfTheVocabulary) {
  const TempFolder folder;
  const auto path =
      folder.write("a.bin", raw_bytes<uint16_t>({1, 2, 3, 500, 4}));
  const TokenFile file(path, TokenType::u16);
  int64_t two[2];
  file.read(1, 2, 500, two);
  EXPECT_THAT(two, ElementsAre(2, 3));
  const auto message =
      error_text<DataError>([&] { file.read(2, 2, 500, two); });
  EXPECT_THAT(
      message,
      HasSubstr(
          path + ": token 3 (byte 6) is 500, but the vocabulary has 500"));
  EXPECT_THAT(
      error_text<DataError>([&] { file.largest(500); }),
      HasSubstr("token 3 (byte 6)"));
  const auto negative = folder.write("n.bin", raw_bytes<int32_t>({1, -1}));
  folder.write("n.idx", make_index(4, {2}, {0}, {0, 1}));
  const TokenFile signed_file(negative, folder.path("n.idx"));
  EXPECT_THAT(
      error_text<DataError>([&] { signed_file.largest(500); }),
      HasSubstr("token 1 (byte 4) is -1"));
}

TEST(TokenFile, AFileThatWasShortenedIsAnErrorAndAReplacedOneIsNot) {
  const TempFolder folder;
  const auto bin = folder.write("a.bin", raw_bytes<uint16_t>({1, 2, 3}));
  const auto idx =
      folder.write("a.idx", make_index(8, {2, 1}, {0, 4}, {0, 1, 2}));
  const TokenFile file(bin, idx);
  std::filesystem::rename(bin, folder.path("old.bin"));
  folder.write("a.bin", "");
  EXPECT_THAT(tokens_of(file), ElementsAre(1, 2, 3));
  std::filesystem::rename(folder.path("old.bin"), bin);
  std::filesystem::resize_file(bin, 2);
  EXPECT_EQ(
      error_text<DataError>([&] { tokens_of(file); }),
      bin +
          ": had 6 bytes when it was opened and has 2: it was shortened while "
          "it is in use; restore it, and the same command resumes");
  EXPECT_THAT(file.borders(0, 3), ElementsAre(2));
  std::filesystem::resize_file(idx, 40);
  EXPECT_THAT(
      error_text<DataError>([&] { file.borders(0, 3); }),
      HasSubstr(idx + ": had "));
}

TEST(TokenFile, EachBlockIsComparedWithItsChecksum) {
  const TempFolder folder;
  // Two blocks of 4 MiB and a short one.
  std::string bytes((8 << 20) + 2, '\1');
  const auto bin = folder.write("a.bin", bytes);
  const auto tokens = static_cast<int32_t>(bytes.size() / 2);
  const auto idx = folder.write("a.idx", make_index(8, {tokens}, {0}, {0, 1}));
  const auto sums = TokenFile(bin, idx).checksums();
  EXPECT_EQ(std::ranges::count(sums, '\n'), 4);
  const auto said = [&](const std::string& text) {
    return error_text<DataError>([&] { TokenFile(bin, idx).verify(text); });
  };
  EXPECT_EQ(said(sums), "no error");
  EXPECT_THAT(
      said(sums.substr(0, 99)), HasSubstr("has 3 blocks of 4 MiB, but 2"));
  EXPECT_THAT(said("x" + sums), HasSubstr(idx + ": is damaged: its checksum"));
  bytes[5 << 20] = '\2';
  folder.write("a.bin", bytes);
  EXPECT_THAT(
      said(sums),
      HasSubstr(bin + ": is damaged: bytes 4194304 to 8388608 have the"));
  TokenFile file(bin, idx);
  file.verify(sums, 1 << 20);
  int64_t two[2];
  file.read(0, 2, 1 << 16, two);
  EXPECT_THAT(
      error_text<DataError>([&] { file.read((2 << 20) - 1, 2, 1 << 16, two); }),
      HasAll(
          bin + ": is damaged: bytes 4194304 to",
          "; remove the file, and the same command tokenises"));
}

TEST(TokenFile, OddSizesFoldersAndMissingFiles) {
  const TempFolder folder;
  const auto path = folder.write("a.bin", "12345");
  EXPECT_THAT(
      error_text<DataError>([&] { TokenFile(path, TokenType::u16); }),
      HasSubstr("has 5 bytes, which is no multiple of the 2 of a token"));
  EXPECT_THAT(
      error_text<DataError>(
          [&] { TokenFile(folder.path("none.bin"), TokenType::u16); }),
      HasSubstr("none.bin: cannot be read: No such file"));
  EXPECT_THAT(
      error_text<DataError>([&] { TokenFile(folder.path(), TokenType::u16); }),
      HasSubstr("is a folder"));
}

class Indexed : public testing::Test {
 protected:
  void SetUp() override {
    folder_.write("a.bin", raw_bytes<uint16_t>({10, 11, 12, 20, 21, 30, 40}));
  }
  // Sequences of 3, 2, 1, 1 tokens; documents of 1, 0, 2 and 1 of them.
  std::string good() const {
    return make_index(8, {3, 2, 1, 1}, {0, 6, 10, 12}, {0, 1, 1, 3, 4});
  }
  TokenFile open(const std::string& index) const {
    folder_.write("a.idx", index);
    return TokenFile(folder_.path("a.bin"), folder_.path("a.idx"));
  }
  std::string error(const std::string& index) const {
    const auto message = error_text<DataError>([&] { open(index); });
    EXPECT_THAT(message, HasSubstr(folder_.path("a.idx") + ": "));
    return message;
  }

  TempFolder folder_;
};

TEST_F(Indexed, TokensAndDocuments) {
  const TokenFile file = open(good());
  EXPECT_THAT(tokens_of(file), ElementsAre(10, 11, 12, 20, 21, 30, 40));
  EXPECT_TRUE(file.has_documents());
  EXPECT_THAT(file.borders(0, 7), ElementsAre(3, 6));
  EXPECT_THAT(file.borders(3, 6), IsEmpty()) << "the ends are not inside";
  EXPECT_THAT(file.borders(2, 4), ElementsAre(3));
  EXPECT_THAT(file.borders(5, 7), ElementsAre(6));
}

TEST_F(Indexed, AllIntegerTypes) {
  const auto check = [&](int code, const std::string& bytes, int width) {
    folder_.write("a.bin", bytes);
    EXPECT_THAT(
        tokens_of(open(make_index(code, {1, 1}, {0, width}, {0, 2}))),
        ElementsAre(3, 100))
        << code;
  };
  check(1, raw_bytes<uint8_t>({3, 100}), 1);
  check(2, raw_bytes<int8_t>({3, 100}), 1);
  check(3, raw_bytes<int16_t>({3, 100}), 2);
  check(4, raw_bytes<int32_t>({3, 100}), 4);
  check(5, raw_bytes<int64_t>({3, 100}), 8);
  check(8, raw_bytes<uint16_t>({3, 100}), 2);
}

TEST_F(Indexed, RefusesWhatDoesNotFit) {
  EXPECT_THAT(error(""), HasSubstr("has 0 bytes"));
  EXPECT_THAT(error(good().substr(0, 33)), HasSubstr("header of an index"));
  EXPECT_THAT(error("X" + good().substr(1)), HasSubstr("MMIDIDX"));
  std::string other = good();
  other[9] = 2;
  EXPECT_THAT(error(other), HasSubstr("index of version 2; only 1"));
  other = good();
  other[17] = 7;
  EXPECT_THAT(error(other), HasSubstr("floating-point"));
  other[17] = 9;
  EXPECT_THAT(error(other), HasSubstr("type 9"));
  EXPECT_THAT(
      error(good().substr(0, good().size() - 1)),
      HasSubstr(
          "4 sequences and 5 document indices take 122; it is truncated"));
  EXPECT_THAT(error(good() + "12345"), HasSubstr("5 more than"));
  EXPECT_THAT(error(good() + "1234"), HasSubstr("images and text"));
  other = good();
  std::memset(other.data() + 18, 0xff, 8);
  EXPECT_THAT(error(other), HasSubstr("which no file holds"));
  for (const auto& [index, part] :
       std::vector<std::pair<std::string, std::string>>{
           {make_index(8, {7}, {0}, {}), "no document indices"},
           {make_index(8, {3, -1, 5}, {0, 6, 4}, {0, 3}),
            "sequence 1 has -1 tokens"},
           {make_index(8, {3, 4}, {0, 8}, {0, 2}),
            "sequence 1 begins at byte 8, but those before it end at 6"},
           {make_index(8, {3, 3}, {0, 6}, {0, 2}),
            "take 12 bytes, but the .bin has 14"},
           {make_index(8, {3, 4}, {0, 6}, {1, 2}), "document index 0 is 1"},
           {make_index(8, {3, 4}, {0, 6}, {0, 2, 1, 2}),
            "document index 2 is 1"},
           {make_index(8, {3, 4}, {0, 6}, {0, 1}),
            "last document index is 1; it must be the number"}}) {
    EXPECT_THAT(error(index), HasSubstr(part));
  }
}

TEST(TokenWriter, WritesAPairThatReadsBack) {
  const TempFolder folder;
  for (const int64_t vocabulary : {65536, 65537}) {
    TokenWriter writer(folder.path("t"), vocabulary);
    const std::vector<int32_t> ids = {1, 65535, 3};
    writer.add(ids);
    writer.end_document();
    writer.end_document();
    writer.add({ids.data(), 1});
    writer.add({ids.data(), 1});
    EXPECT_FALSE(
        std::filesystem::exists(folder.path("t.idx")) && vocabulary == 65536);
    writer.finish();
    const TokenFile file(folder.path("t.bin"), folder.path("t.idx"));
    EXPECT_EQ(
        file.type(), vocabulary == 65536 ? TokenType::u16 : TokenType::i32);
    EXPECT_THAT(tokens_of(file), ElementsAre(1, 65535, 3, 1, 1));
    EXPECT_THAT(file.borders(0, 5), ElementsAre(3));
  }
  { TokenWriter abandoned(folder.path("u"), 10); }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("t.bin", "t.idx"));
}

}  // namespace echelon::token_file_test
