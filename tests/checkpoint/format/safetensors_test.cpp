#include "echelon/checkpoint/format/safetensors.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <filesystem>

#include "echelon/error.h"
#include "tests/checkpoint/small_disk.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::safetensors::safetensors_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::string with_length(uint64_t length, const std::string& rest) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(length >> (8 * i));
  return file + rest;
}

std::string file_of(const std::string& header, size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, '\1'));
}

Header parse_text(const std::string& file) {
  return parse(std::as_bytes(std::span(file)), "f.safetensors");
}

std::string refusal(const std::string& file) {
  return error_text<CheckpointError>([&] { parse_text(file); });
}

/// A header of one tensor "a" with the given fields.
std::string one(const std::string& fields, size_t data_bytes = 8) {
  return file_of("{\"a\":{" + fields + "}}", data_bytes);
}

TEST(Safetensors, ReadsWhatTheFormatAllows) {
  const Header header = parse_text(file_of(
      R"({"b":{"dtype":"I64","shape":[],"data_offsets":[24,32]},)"
      R"("__metadata__":{"format":"pt"},)"
      R"("a":{"shape":[2,3],"data_offsets":[0,24],"dtype":"F32"},)"
      R"("none":{"dtype":"U8","shape":[0,5],"data_offsets":[24,24]}}   )",
      32));
  ASSERT_EQ(header.tensors.size(), 3);
  EXPECT_EQ(header.tensors[0], (TensorInfo{"a", "F32", {2, 3}, 0, 24}));
  EXPECT_EQ(header.tensors[1], (TensorInfo{"none", "U8", {0, 5}, 24, 24}));
  EXPECT_EQ(header.tensors[2], (TensorInfo{"b", "I64", {}, 24, 32}));
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}}));
  EXPECT_TRUE(parse_text(file_of("{}", 0)).tensors.empty());
  EXPECT_EQ(
      parse_text(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"))
          .data_begin,
      62);
}

struct Refused {
  const char* name;
  std::string file;
  std::string message;
};

// Printed by GoogleTest; the default would dump the bytes.
void PrintTo(const Refused& refused, std::ostream* out) {
  *out << refused.name;
}

class SafetensorsRefuses : public testing::TestWithParam<Refused> {};

TEST_P(SafetensorsRefuses, WithPathAndRule) {
  EXPECT_THAT(
      refusal(GetParam().file), HasAll("f.safetensors: ", GetParam().message));
}

const std::string kGood = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";

std::vector<Refused> refused_files() {
  const auto offsets = [](const std::string& text) {
    return one(R"("dtype":"F32","shape":[2],"data_offsets":)" + text);
  };
  const auto shape = [](const std::string& text) {
    return one(R"("dtype":"F32","data_offsets":[0,8],"shape":)" + text);
  };
  const auto two = [](const std::string& a, const std::string& b, size_t n) {
    const std::string start = R"({"dtype":"U8","shape":[4],"data_offsets":)";
    return file_of("{\"a\":" + start + a + "},\"b\":" + start + b + "}}", n);
  };
  std::string ones;
  for (int i = 0; i < 64; ++i) ones += ",1";
  return {
      {"Empty", "", "0 bytes long"},
      {"SevenBytes", "1234567", "7 bytes long"},
      {"LengthPastTheEnd", with_length(9, "{}"), "file ends after 2"},
      {"LengthOverTheLimit", with_length(kMaxHeaderBytes + 1, "{}"),
       "limit is 100000000"},
      {"LengthOfAllOnes", with_length(UINT64_MAX, "{}"), "limit is"},
      {"NoHeader", with_length(0, ""), "must begin with '{'"},
      {"SpaceFirst", file_of(" {}", 0), "must begin with '{'"},
      {"Array", file_of("[]", 0), "must begin with '{'"},
      {"CutJson", file_of("{\"a\":", 0), "not valid JSON"},
      {"TextBehindJson", file_of("{} x", 0), "not valid JSON"},
      {"NulBehindJson", file_of(std::string("{}\0", 3), 0), "not valid JSON"},
      {"Comment", file_of("{/* */}", 0), "not valid JSON"},
      {"TrailingComma",
       file_of("{" + std::string("\"a\":{") + kGood + "},}", 8),
       "not valid JSON"},
      {"NotUtf8", file_of("{\"\xff\":{" + kGood + "}}", 8), "not valid JSON"},
      {"Surrogate", file_of("{\"\\ud800\":{" + kGood + "}}", 8),
       "not valid JSON"},
      {"Deep", file_of("{\"a\":" + std::string(100000, '['), 0),
       "holds an array; it must be an object"},
      {"DeepObjects", file_of("{\"a\":{\"dtype\":{", 0),
       "dtype holds an object; it must be a string"},
      {"NameTwice", file_of("{\"a\":{" + kGood + "},\"a\":{" + kGood + "}}", 8),
       "the name \"a\" is there twice"},
      {"NameTwiceEscaped",
       file_of("{\"a\":{" + kGood + "},\"\\u0061\":{" + kGood + "}}", 8),
       "the name \"a\" is there twice"},
      {"FieldTwice", one(kGood + ",\"dtype\":\"F32\""),
       "has the key \"dtype\" twice"},
      {"UnknownField", one(kGood + ",\"strides\":[1]"),
       "unknown key \"strides\""},
      {"NoDtype", one(R"("shape":[2],"data_offsets":[0,8])"),
       "tensor \"a\" has no \"dtype\""},
      {"NoShape", one(R"("dtype":"F32","data_offsets":[0,8])"),
       "has no \"shape\""},
      {"NoOffsets", one(R"("dtype":"F32","shape":[2])"),
       "has no \"data_offsets\""},
      {"TensorIsANumber", file_of("{\"a\":3}", 0), "must be an object"},
      {"TensorIsNull", file_of("{\"a\":null}", 0), "must be an object"},
      {"DtypeUnknown", one(R"("dtype":"F99","shape":[2],"data_offsets":[0,8])"),
       "unknown dtype \"F99\"; known are BOOL"},
      {"DtypeLowerCase",
       one(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"),
       "unknown dtype \"f32\""},
      {"DtypeIsANumber", one(R"("dtype":4,"shape":[2],"data_offsets":[0,8])"),
       "dtype holds a number; it must be a string"},
      {"ShapeNegative", shape("[-2]"), "shape holds -2; it must be 0 or more"},
      {"ShapeFraction", shape("[2.0]"), "shape holds 2.0; it must be a whole"},
      {"ShapeExponent", shape("[2e0]"), "shape holds 2e0"},
      {"ShapeTooLarge", shape("[9223372036854775808]"), "below 2^63"},
      {"ShapeOver64Bits", shape("[99999999999999999999]"), "below 2^63"},
      {"ShapeOverflows", shape("[4294967296,4294967296]"), "overflows 63 bits"},
      {"ShapeOverflowsByDtype", shape("[4611686018427387904]"),
       "overflows 63 bits"},
      {"ShapeOverflowsBesideZero", shape("[0,4294967296,4294967296]"),
       "overflows 63 bits"},
      {"ShapeNested", shape("[[2]]"), "holds an array"},
      {"ShapeOfStrings", shape("[\"2\"]"), "holds a string"},
      {"ShapeIsANumber", shape("2"), "shape holds a number"},
      {"ShapeOf65Dims", shape("[2" + ones + "]"), "more than 64 dimensions"},
      {"OffsetsOne", offsets("[0]"), "data_offsets has 1 numbers"},
      {"OffsetsThree", offsets("[0,8,8]"), "more than two"},
      {"OffsetsNegative", offsets("[-1,8]"), "data_offsets holds -1"},
      {"OffsetsTrue", offsets("[true,8]"), "holds true or false"},
      {"OffsetsReversed", offsets("[8,0]"), "end before they begin"},
      {"OffsetsPastTheEnd", offsets("[0,9]"),
       "reach behind the file's 8 bytes"},
      {"OffsetsHuge", offsets("[18446744073709551608,18446744073709551615]"),
       "reach behind"},
      {"SizeTooSmall", offsets("[0,4]"),
       "are 4 bytes, but shape [2] of F32 takes 8"},
      {"SizeTooLarge", one(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
       "are 8 bytes, but shape [1] of F32 takes 4"},
      {"Overlap", two("[0,4]", "[2,6]", 6),
       "tensor \"b\" begins at byte 2 and overlaps \"a\", which ends at 4"},
      {"SameBytes", two("[0,4]", "[0,4]", 4), "overlaps"},
      {"GapFirst", two("[1,5]", "[5,9]", 9), "leaves a gap after byte 0"},
      {"GapBetween", two("[0,4]", "[5,9]", 9), "leaves a gap after byte 4"},
      {"BytesBehind", two("[0,4]", "[4,8]", 10),
       "2 bytes follow the last tensor"},
      {"BytesWithoutTensor", file_of("{}", 1), "1 bytes follow"},
      {"MetadataNumber", file_of(R"({"__metadata__":{"a":1}})", 0),
       "__metadata__ \"a\" holds a number; it must be a string"},
      {"MetadataNested", file_of(R"({"__metadata__":{"a":{}}})", 0),
       "holds an object; it must be a string"},
      {"MetadataString", file_of(R"({"__metadata__":"a"})", 0),
       "must be an object"},
      {"MetadataKeyTwice", file_of(R"({"__metadata__":{"a":"","a":""}})", 0),
       "key \"a\" twice"},
      {"MetadataTwice", file_of(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "twice"},
      {"ControlCharacterInName", file_of("{\"a\\u001b[31m\":3}", 0),
       "\"a\\x1b[31m\""},
  };
}

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsRefuses, testing::ValuesIn(refused_files()),
    [](const auto& info) { return info.param.name; });

TEST(SafetensorsFile, EveryTruncationIsRefused) {
  const std::string whole = one(kGood);
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(refusal(whole.substr(0, length)), "no error") << length;
  }
  EXPECT_EQ(refusal(whole), "no error");
}

TEST(SafetensorsFile, RefusesWhatIsNotAFile) {
  TempFolder folder;
  EXPECT_THAT(
      error_text([&] { File(folder.path("none")); }),
      HasAll(folder.path("none"), "No such file"));
  EXPECT_THAT(
      error_text([&] { File(folder.path()); }), HasSubstr("not a file"));
  ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(
      error_text([&] { File(folder.path("pipe")); }), HasSubstr("not a file"));
  folder.write("empty", "");
  EXPECT_THAT(
      error_text([&] { File(folder.path("empty")); }),
      HasSubstr("0 bytes long"));
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(SafetensorsFile, ReadsWhatItWrote) {
  TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const std::string odd = "abc", wide = "12345678", none;
  write(
      path,
      {{"odd", "U8", {3}, bytes_of(odd)},
       {"wide \"ü\"", "F64", {1}, bytes_of(wide)},
       {"none", "F32", {2, 0}, bytes_of(none)}},
      {{"made by", "a test"}});
  File file(path);
  const File moved(std::move(file));
  EXPECT_EQ(moved.metadata(), (Metadata{{"made by", "a test"}}));
  ASSERT_EQ(moved.tensors().size(), 3);
  const auto bytes = moved.bytes(moved.at("wide \"ü\""));
  EXPECT_EQ(std::memcmp(bytes.data(), wide.data(), 8), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % 64, 0);
  EXPECT_EQ(std::memcmp(moved.bytes(moved.at("odd")).data(), "abc", 3), 0);
  EXPECT_EQ(moved.at("none").shape, (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(moved.find("other"), nullptr);
  EXPECT_THAT(
      error_text([&] { moved.at("other"); }),
      HasAll("no tensor \"other\"", "none, odd"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("w.safetensors"));
}

TEST(SafetensorsFile, WritesNothingForAWrongList) {
  TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const std::string four = "1234";
  const auto refused = [&](std::vector<TensorBytes> tensors) {
    return error_text<ConfigError>([&] { write(path, tensors); });
  };
  const TensorBytes good{"a", "F32", {1}, bytes_of(four)};
  EXPECT_THAT(refused({good, good}), HasSubstr("name is taken"));
  EXPECT_THAT(
      refused({{"__metadata__", "F32", {1}, bytes_of(four)}}),
      HasSubstr("name is taken"));
  EXPECT_THAT(
      refused({{"a", "X", {1}, bytes_of(four)}}), HasSubstr("unknown dtype"));
  EXPECT_THAT(
      refused({{"a", "F32", {2}, bytes_of(four)}}), HasSubstr("its 4 bytes"));
  EXPECT_THAT(refused({{"a", "F32", {-1}, bytes_of(four)}}), HasSubstr("[-1]"));
  EXPECT_THAT(
      refused({{"\xff", "F32", {1}, bytes_of(four)}}), HasSubstr("UTF-8"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { write(folder.path("no/w.safetensors"), {good}); }),
      HasAll("No such file", "needs"));
}

TEST(SafetensorsFile, FullDiskKeepsTheOldFile) {
  // A file system of 256 KiB, in a mount namespace of the child's own.
  TempFolder folder;
  const std::string disk = folder.make_folder("disk");
  const int status = in_child([&] {
    if (!mount_disk(disk, "size=256k")) return 77;
    const std::string old = "1234", big(1 << 20, 'x');
    write(disk + "/w", {{"a", "U8", {4}, bytes_of(old)}});
    const std::string text = error_text<CheckpointError>([&] {
      write(disk + "/w", {{"a", "U8", {1 << 20}, bytes_of(big)}});
    });
    std::cout << text << std::endl;
    const bool told = text.find("No space left") != std::string::npos &&
                      text.find("it needs 10487") != std::string::npos &&
                      text.find("bytes, 2") != std::string::npos &&
                      text.find(disk + "/w") != std::string::npos;
    const bool kept = File(disk + "/w").at("a").end == 4;
    return told && kept && names_in(disk).size() == 1 ? 0 : 1;
  });
  if (status == 77) GTEST_SKIP() << "mounting a small disk needs root";
  EXPECT_EQ(status, 0);
}

TEST(SafetensorsFile, FailedWriteLeavesNothing) {
  // A limit on file sizes makes the write fail on any disk.
  TempFolder folder;
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string big(2000, 'x');
    const std::string text = error_text<CheckpointError>([&] {
      write(folder.path("w"), {{"a", "U8", {2000}, bytes_of(big)}});
    });
    return text.find("File too large") != std::string::npos &&
                   names_in(folder.path()).empty()
               ? 0
               : 1;
  });
  EXPECT_EQ(status, 0);
}

}  // namespace echelon::safetensors::safetensors_test
