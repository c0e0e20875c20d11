#include "echelon/checkpoint/format/manifest.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::manifest_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

SavedFile file_of(const std::string& name, int64_t bytes) {
  SavedFile file{.name = name, .bytes = bytes};
  for (int64_t at = 0; at < bytes; at += kChecksumBlockBytes) {
    file.blocks.push_back(checksum(&at, sizeof at));
  }
  return file;
}

/// What two ranks write: a matrix sharded by rows, a scalar, random states.
std::vector<RankPart> two_parts() {
  std::vector<RankPart> parts(2);
  parts[0].file = file_of("rank-00000.safetensors", 200);
  parts[1].file = file_of("rank-00001.safetensors", kChecksumBlockBytes + 1);
  parts[0].tensors = {
      {.name = "fc.weight",
       .dtype = "F32",
       .shape = {3, 4},
       .slices = {{{{0, 0}, {2, 4}}, 0, "fc.weight"}},
       .hash = {~0ull, 3}},
      {.name = "fc.weight/step",
       .kind = SavedKind::optimizer,
       .dtype = "F32",
       .slices = {{Box{}, 0, "fc.weight/step"}},
       .hash = {7, 8}},
      {.name = "random/0",
       .kind = SavedKind::random,
       .dtype = "U8",
       .shape = {16},
       .slices = {{{{0}, {16}}, 0, "random/0"}},
       .hash = {1, 2}}};
  parts[1].tensors = {
      {.name = "fc.weight",
       .dtype = "F32",
       .shape = {3, 4},
       .slices =
           {{{{2, 2}, {1, 2}}, 0, "fc.weight"},
            {{{2, 0}, {1, 2}}, 0, "fc.weight#1"}},
       .hash = {2, 4}},
      {.name = "mean\n\"\x01é",
       .kind = SavedKind::buffer,
       .dtype = "BF16",
       .shape = {2, 0},
       .hash = {0, 0}}};
  return parts;
}

CheckpointManifest a_manifest() {
  CheckpointManifest manifest{
      .step = 100,
      .skipped_steps = 1,
      .total_steps = 1000,
      .epoch = 2,
      .consumed = 6400,
      .seed = std::numeric_limits<uint64_t>::max(),
      .loss_scale = SavedLossScale{65536, 12, 3},
      .layout = "dp=2",
      .ranks = 2,
      .config = "[train]\nsteps = 1000\n",
      .data = "digits: 1797 images",
      .metrics = {{"loss", 0.1}, {"eval_loss", -2}, {"best", 1e300}}};
  add_parts(manifest, two_parts());
  return manifest;
}

/// The text with its checksum corrected.
std::string sign(const std::string& text) {
  const std::string key = "\"checksum\": \"";
  const std::string body = text.substr(0, text.rfind(key));
  return body + key + checksum(body.data(), body.size()) + "\"\n}\n";
}

/// The text of a_manifest() with `from`, which it must have, replaced.
std::string
changed(const std::string& from, const std::string& to, std::string text = "") {
  if (text.empty()) text = to_json(a_manifest());
  const size_t at = text.find(from);
  if (at == std::string::npos) {
    ADD_FAILURE() << from << " is not in\n" << text;
    return text;
  }
  return sign(text.replace(at, from.size(), to));
}

std::string refusal(const std::string& text) {
  return error_text<CheckpointError>([&] { parse_manifest(text, "m.json"); });
}

TEST(Manifest, ChecksumIsXxh3) {
  // What xxh128sum prints.
  EXPECT_EQ(checksum("", 0), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(checksum("abc", 3), "06b05ab6733a618578af5f94892f3950");
}

TEST(Manifest, ReadsWhatItWrote) {
  const CheckpointManifest manifest = a_manifest();
  EXPECT_EQ(parse_manifest(to_json(manifest), "m.json"), manifest);

  CheckpointManifest empty;
  add_parts(empty, {});
  EXPECT_EQ(parse_manifest(to_json(empty), "m.json"), empty);
  for (const double value :
       {std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity(),
        std::numeric_limits<double>::denorm_min(), -0.0, std::nan("")}) {
    empty.metrics["loss"] = value;
    const auto read = parse_manifest(to_json(empty), "m.json");
    const double back = read.metrics.at("loss");
    EXPECT_TRUE(std::isnan(value) ? std::isnan(back) : back == value);
    EXPECT_EQ(std::signbit(back), std::signbit(value));
  }
}

TEST(Manifest, IsJsonWithALineForEachTensorAndFile) {
  const std::string text = to_json(a_manifest());
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["format"], "echelon checkpoint");
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["seed"], std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(json["tensors"][3]["name"], "mean\n\"\x01é");
  EXPECT_EQ(json["files"][1]["blocks"].size(), 2);
  EXPECT_THAT(
      text,
      HasSubstr(
          "\n{\"name\": \"fc.weight\", \"kind\": \"parameter\", \"dtype\": "
          "\"F32\", \"shape\": [3, 4], \"hash\": "
          "\"00000000000000010000000000000007\", \"slices\": [{\"offset\": [0, "
          "0], \"sizes\": [2, 4], \"file\": 0, \"key\": \"fc.weight\"}, "
          "{\"offset\": [2, 2], \"sizes\": [1, 2], \"file\": 1, \"key\": "
          "\"fc.weight\"}, {\"offset\": [2, 0], \"sizes\": [1, 2], \"file\": "
          "1, \"key\": \"fc.weight#1\"}]},\n"));
}

TEST(Manifest, EveryFlippedBitIsFound) {
  std::string text = to_json(a_manifest());
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int bit : {0, 3, 7}) {
      text[i] ^= static_cast<char>(1 << bit);
      EXPECT_THAT(
          refusal(text),
          AllOf(StartsWith("m.json: its "), HasSubstr("checksum")));
      text[i] ^= static_cast<char>(1 << bit);
    }
  }
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_THAT(refusal(text.substr(0, size)), StartsWith("m.json: its "));
  }
  EXPECT_THAT(refusal(text + "\n"), HasSubstr("do not end with a checksum"));
}

TEST(Manifest, FindsTensors) {
  const auto manifest = a_manifest();
  EXPECT_EQ(manifest.find("random/0"), &manifest.tensors[2]);
  EXPECT_EQ(manifest.find("random/1"), nullptr);
}

TEST(Manifest, ContentHashIsOfTheStateAlone) {
  const auto base = a_manifest();
  const std::string hash = content_hash(base);
  EXPECT_EQ(base.content_hash, hash);

  auto same = base;
  same.layout = "tp=2";
  same.ranks = 1;
  same.config = "";
  same.data = "";
  same.metrics.clear();
  same.files.clear();
  std::reverse(same.tensors.begin(), same.tensors.end());
  for (auto& tensor : same.tensors) {
    if (tensor.kind == SavedKind::random) tensor.hash = {5, 5};
    tensor.slices.clear();
  }
  EXPECT_EQ(content_hash(same), hash);

  const std::vector<std::function<void(CheckpointManifest&)>> changes = {
      [](auto& m) { ++m.step; },
      [](auto& m) { ++m.skipped_steps; },
      [](auto& m) { ++m.total_steps; },
      [](auto& m) { ++m.epoch; },
      [](auto& m) { ++m.consumed; },
      [](auto& m) { --m.seed; },
      [](auto& m) { m.loss_scale->scale /= 2; },
      [](auto& m) { ++m.loss_scale->good_steps; },
      [](auto& m) { ++m.loss_scale->overflows; },
      [](auto& m) { m.loss_scale.reset(); },
      [](auto& m) { m.tensors[0].name = "fc.bias"; },
      [](auto& m) { m.tensors[0].kind = SavedKind::buffer; },
      [](auto& m) { m.tensors[0].dtype = "I32"; },
      [](auto& m) { m.tensors[0].shape = {12}; },
      [](auto& m) { ++m.tensors[0].hash[0]; },
      [](auto& m) { ++m.tensors[1].hash[1]; },
      [](auto& m) { m.tensors.pop_back(); }};
  std::set<std::string> seen = {hash};
  for (const auto& change : changes) {
    auto other = base;
    change(other);
    EXPECT_TRUE(seen.insert(content_hash(other)).second);
  }
}

TEST(Manifest, ReadsThePartsThatItWrote) {
  for (const RankPart& part : two_parts()) {
    const RankPart read = parse_rank_part(to_json(part), "p.json");
    EXPECT_EQ(read.tensors, part.tensors);
    EXPECT_EQ(read.file, part.file);
  }
  const std::string text = to_json(two_parts()[0]);
  for (const auto& [wrong, message] : std::map<std::string, const char*>{
           {to_json(a_manifest()), "it must be \"echelon checkpoint part\""},
           {text.substr(1), "damaged or changed"},
           {changed("\"sizes\": [2, 4]", "\"sizes\": [4, 4]", text),
            "a slice of [4, 4] at [0, 0] is not inside"},
           {changed("\"file\": 0", "\"file\": 1", text), "file number 1 of 1"},
           {changed("\"name\": \"rank", "\"name\": \"../rank", text),
            "no name of a file"}}) {
    EXPECT_THAT(
        error_text<CheckpointError>([&] { parse_rank_part(wrong, "p.json"); }),
        HasSubstr(message));
  }
}

TEST(Manifest, AddsTheParts) {
  const auto manifest = a_manifest();
  ASSERT_EQ(manifest.tensors.size(), 4);
  EXPECT_EQ(manifest.tensors[0].slices.size(), 3);
  EXPECT_EQ(manifest.tensors[0].slices[2].file, 1);
  EXPECT_EQ(manifest.tensors[0].hash, (ContentHash{1, 7}));
  EXPECT_EQ(manifest.files[1].name, "rank-00001.safetensors");
  EXPECT_EQ(manifest.config_hash, checksum("[train]\nsteps = 1000\n", 21));
}

TEST(Manifest, RefusesIncompleteParts) {
  const struct {
    std::function<void(std::vector<RankPart>&)> change;
    const char* message;
  } cases[] = {
      {[](auto& parts) { parts.pop_back(); },
       "step 5: tensor \"fc.weight\": nothing covers [2, 0]; slices must cover "
       "its shape [3, 4], each element once"},
      {[](auto& parts) {
         parts[1].tensors[0].slices[1].box = {{2, 1}, {1, 2}};
       },
       "\"fc.weight\": [2, 2] is in two slices"},
      {[](auto& parts) { parts[1].tensors[0].dtype = "F64"; },
       "rank-00001.safetensors: tensor \"fc.weight\" is parameter F64 [3, 4], "
       "but parameter F32 [3, 4] for the ranks before"},
      {[](auto& parts) {
         parts[1].tensors[0].shape = {4, 4};
       },
       "parameter F32 [4, 4], but"},
      {[](auto& parts) { parts[1].tensors[0].kind = SavedKind::buffer; },
       "is buffer F32"},
      {[](auto& parts) { parts[1].file.name = parts[0].file.name; },
       "file \"rank-00000.safetensors\": it is listed twice"}};
  for (const auto& [change, message] : cases) {
    auto parts = two_parts();
    change(parts);
    CheckpointManifest manifest{.step = 5};
    EXPECT_THAT(
        error_text<CheckpointError>([&] { add_parts(manifest, parts); }),
        HasSubstr(message));
  }
}

struct Refused {
  const char* name;
  std::string from;
  std::string to;
  std::string message;
};

void PrintTo(const Refused& refused, std::ostream* out) {
  *out << refused.name;
}

class ManifestRefuses : public testing::TestWithParam<Refused> {};

TEST_P(ManifestRefuses, WithPathPlaceAndRule) {
  const auto& [name, from, to, message] = GetParam();
  EXPECT_THAT(
      refusal(changed(from, to)),
      AllOf(StartsWith("m.json: "), HasSubstr(message)));
}

std::vector<Refused> refused_changes() {
  const std::string slice = "{\"offset\": [2, 2], \"sizes\": [1, 2], ";
  const std::string last = "{\"offset\": [2, 0], \"sizes\": [1, 2], ";
  const std::string file = "{\"name\": \"rank-00000.safetensors\"";
  const auto file_name = [&](const std::string& name) {
    return "{\"name\": \"" + name + "\"";
  };
  return {
      {"Text", "{\n", "x{\n", "not valid JSON in UTF-8: byte 1"},
      {"NotUtf8", "mean", "me\xffn", "not valid JSON in UTF-8"},
      {"Comment", "{\n", "{ /* */\n", "not valid JSON"},
      {"Deep", "{\n", "[[[[[[[[[[[[{\n", "nested deeper than 8"},
      {"Array", "{\n\"format\"", "[\n\"format\"", "not valid JSON"},
      {"Format", "echelon checkpoint", "other",
       "format: \"other\"; it must be \"echelon checkpoint\""},
      {"Newer", "\"version\": 1", "\"version\": 2, \"more\": []",
       "version: version 2 of the format; this program reads up to 1"},
      {"VersionZero", "\"version\": 1", "\"version\": 0", "begin with 1"},
      {"UnknownKey", "\"step\": 100", "\"color\": 1,\n\"step\": 100",
       "the key \"color\" in place of the key \"step\""},
      {"DoubledKey", "\"step\": 100", "\"step\": 100,\n\"step\": 100",
       "the key \"step\" in place of the key \"skipped_steps\""},
      {"MissingKey", "\"step\": 100,\n", "",
       "the key \"skipped_steps\" in place of the key \"step\""},
      {"KeyAtTheEnd", "\"overflows\": 3", "\"overflows\": 3, \"overflows\": 3",
       "loss_scale: unknown, or there already: the key \"overflows\""},
      {"Negative", "\"step\": 100", "\"step\": -100",
       "step: -100; it must be a whole number of 0 to 2^63 - 1"},
      {"Fraction", "\"step\": 100", "\"step\": 1.5", "step: 1.5; it must be"},
      {"TooLarge", "\"step\": 100", "\"step\": 9223372036854775808",
       "step: 9223372036854775808; it must be"},
      {"Overflowing", "\"seed\": 18446744073709551615",
       "\"seed\": 18446744073709551616",
       "seed: 1.8446744073709552e+19; it must be a whole"},
      {"Quoted", "\"step\": 100", "\"step\": \"100\"", "step: \"100\"; it"},
      {"Null", "\"layout\": \"dp=2\"", "\"layout\": null", "layout: null; it"},
      {"NoRanks", "\"ranks\": 2", "\"ranks\": 0", "ranks: 0; at least one"},
      {"ScaleZero", "65536", "0", "loss_scale.scale: it must be a finite"},
      {"ScaleInfinite", "65536", "\"inf\"", "it must be a finite number"},
      {"Metric", "0.1", "\"0.1\"", "metrics.loss: \"0.1\"; it must be"},
      {"MetricTrue", "0.1", "true", "metrics.loss: true; it must be"},
      {"MetricTwice", "\"loss\": 0.1", "\"loss\": 1, \"loss\": 0.1",
       "metrics.loss: it is there twice"},
      {"Config", "steps = 1000", "steps = 2000", "config_hash is "},
      {"ConfigHash", "\"config_hash\": \"", "\"config_hash\": \"x", "32 hexa"},
      {"ContentHash", "\"step\": 100", "\"step\": 101", "content_hash is "},
      {"Kind", "\"kind\": \"optimizer\"", "\"kind\": \"other\"",
       "tensors[1].kind: \"other\"; it must be parameter, buffer"},
      {"Dtype", "\"BF16\"", "\"B16\"", "unknown dtype \"B16\""},
      {"NoName", "\"fc.weight/step\"", "\"\"", "a tensor needs a name"},
      {"SameName", "\"fc.weight/step\"", "\"fc.weight\"",
       "tensor \"fc.weight\": it is listed twice"},
      {"ShapeNegative", "[3, 4]", "[-3, 4]", "tensors[0].shape[0]: -3; it"},
      {"ShapeOverflows", "\"shape\": [2, 0]",
       "\"shape\": [4611686018427387904, 4, 0]",
       "shape [4611686018427387904, 4, 0] of BF16 is negative or overflows"},
      {"BytesOverflow", "\"shape\": [3, 4]", "\"shape\": [4611686018427387904]",
       "shape [4611686018427387904] of F32 is negative or overflows"},
      {"Hash", "\"hash\": \"0", "\"hash\": \"G", "tensors[0].hash: \"G000"},
      {"Outside", slice, "{\"offset\": [2, 3], \"sizes\": [1, 2], ",
       "tensor \"fc.weight\": a slice of [1, 2] at [2, 3] is not inside"},
      {"Dimensions", slice, "{\"offset\": [2, 2, 0], \"sizes\": [1, 2, 1], ",
       "a slice of [1, 2, 1] at [2, 2, 0] is not inside of its shape [3, 4]"},
      {"BoxOverflows", slice,
       "{\"offset\": [9223372036854775807, 2], \"sizes\": [9, 2], ",
       "is not inside of its shape"},
      {"Hole", slice, "{\"offset\": [2, 3], \"sizes\": [1, 1], ",
       "tensor \"fc.weight\": nothing covers [2, 2]; slices must cover"},
      {"Overlap", last, "{\"offset\": [1, 0], \"sizes\": [2, 2], ",
       "tensor \"fc.weight\": [1, 0] is in two slices"},
      {"FileNumber", "\"file\": 1", "\"file\": 2", "file number 2 of 2"},
      {"SameKey", "\"fc.weight#1\"", "\"fc.weight\"",
       "another slice has the key \"fc.weight\" in file "
       "\"rank-00001.safetensors\" already"},
      {"NoKey", "\"fc.weight#1\"", "\"\"", "\"\" is no key"},
      {"MetadataKey", "\"fc.weight#1\"", "\"__metadata__\"", "is no key"},
      {"FileTooSmall", "\"bytes\": 200", "\"bytes\": 51",
       "tensor \"random/0\": file \"rank-00000.safetensors\" of 51 bytes has "
       "no room"},
      {"FileSlash", file, file_name("a/b"), "file \"a/b\": no name of a file"},
      {"FileBackslash", file, file_name("a\\\\b"), "no name of a file"},
      {"FileAbsolute", file, file_name("/etc/passwd"), "no name of a file"},
      {"FileParent", file, file_name(".."), "no name of a file"},
      {"FileHidden", file, file_name(".x"), "no name of a file"},
      {"FileEmpty", file, file_name(""), "no name of a file"},
      {"FileNul", file, file_name("a\\u0000b"), "no name of a file"},
      {"FileManifest", file, file_name("manifest.json"), "no name of a file"},
      {"FileTwice", file, file_name("rank-00001.safetensors"),
       "file \"rank-00001.safetensors\": it is listed twice"},
      {"Blocks", "\"bytes\": 4194305", "\"bytes\": 4194304",
       "4194304 bytes are 1 blocks, but it has the checksums of 2"},
      {"BlocksOfMany", "\"bytes\": 4194305", "\"bytes\": 9223372036854775807",
       "9223372036854775807 bytes are 2199023255552 blocks"},
      {"BlockText", "\"blocks\": [\"", "\"blocks\": [\"A",
       "files[0].blocks[0]: \"A"},
  };
}

INSTANTIATE_TEST_SUITE_P(
    Manifest, ManifestRefuses, testing::ValuesIn(refused_changes()),
    [](const auto& info) { return info.param.name; });

TEST(Manifest, TextsThatAreNotUtf8AreNotWritten) {
  for (const std::string& text :
       {std::string("\xff"), std::string("\xc0\x80"),
        std::string("\xed\xa0\x80"), std::string("\xf4\x90\x80\x80"),
        std::string("\xe2\x82")}) {
    CheckpointManifest manifest;
    add_parts(manifest, {});
    manifest.data = "a" + text;
    EXPECT_THAT(
        error_text<CheckpointError>([&] { to_json(manifest); }),
        HasSubstr("byte 1 of a text of"));
  }
  CheckpointManifest manifest;
  add_parts(manifest, {});
  manifest.data = "é€😀\x7f\t\r\n";
  EXPECT_EQ(parse_manifest(to_json(manifest), "m"), manifest);
}

TEST(Manifest, ManySlicesAreFast) {
  // Slices of one tensor, sharded along both dimensions, and of very many.
  CheckpointManifest manifest;
  std::vector<RankPart> parts(100);
  for (int64_t rank = 0; rank < 100; ++rank) {
    auto& part = parts[static_cast<size_t>(rank)];
    part.file = file_of("rank-" + std::to_string(rank), int64_t{1} << 30);
    for (int64_t i = 0; i < 1000; ++i) {
      const std::string name =
          i < 500 ? "whole" : "layers." + std::to_string(i) + ".weight/exp_avg";
      const Box box = i < 500 ? Box{{2 * rank, 4 * i}, {2, 4}}
                              : Box{{10 * rank, 0}, {10, 64}};
      if (i == 0 || i >= 500) {
        part.tensors.push_back(
            {.name = name,
             .dtype = "F32",
             .shape = i < 500 ? std::vector<int64_t>{200, 2000}
                              : std::vector<int64_t>{1000, 64}});
      }
      part.tensors.back().slices.push_back(
          {box, 0, name + "#" + std::to_string(i)});
    }
  }
  add_parts(manifest, parts);
  EXPECT_EQ(parse_manifest(to_json(manifest), "m"), manifest);
}

}  // namespace echelon::manifest_test
