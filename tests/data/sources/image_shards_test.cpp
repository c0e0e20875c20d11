#include "echelon/data/sources/image_shards.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "echelon/data/sources/inspect.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::image_shards_test {

using testing::ElementsAre;
using testing::HasSubstr;

class ImageShards : public testing::Test {
 protected:
  /// Packs files below src/ by the system's tar, in this order.
  std::string pack(
      const std::string& shard,
      const std::vector<std::pair<std::string, std::string>>& files,
      const std::string& kind = "ustar") const {
    std::string names;
    for (const auto& [name, content] : files) {
      folder_.write("src/" + name, content);
      names += " '" + name + "'";
    }
    const std::string path = folder_.path(shard);
    const std::string command = "tar --format=" + kind + " -C " +
                                folder_.path("src") + " -cf " + path + names;
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return path;
  }
  static std::string refusal(const std::string& pattern) {
    return error_text<DataError>([&] { scan_image_shards(pattern); });
  }

  TempFolder folder_;
};

TEST_F(ImageShards, SamplesOfAllFormats) {
  const std::string deep(150, 'd');
  for (const char* kind : {"ustar", "gnu", "pax", "v7"}) {
    std::vector<std::pair<std::string, std::string>> files = {
        {"a/1.jpg", "first image"},
        {"a/1.cls", "3\n"},
        {"a/1.json", "{}"},
        {"a/2.cls", " 0"},
        {"a/2.PNG", std::string(1000, 'x')}};
    if (std::string(kind) != "v7") {
      files.emplace_back(deep + "/3.x.jpg", "another field of the sample");
      files.emplace_back(deep + "/3.jpeg", "third");
      files.emplace_back(deep + "/3.cls", "1");
    }
    const auto path = pack("one.tar", files, kind);
    const ImageFolder found = scan_image_shards(path);
    ASSERT_EQ(found.images.size(), files.size() > 5 ? 3U : 2U) << kind;
    EXPECT_THAT(found.classes, ElementsAre("0", "1", "2", "3"));
    EXPECT_EQ(found.images[0].label, 3);
    EXPECT_EQ(found.images[1].label, 0);
    EXPECT_EQ(found.images[1].bytes, 1000);
    const std::string bytes = read_file(path);
    EXPECT_EQ(
        bytes.substr(
            static_cast<size_t>(found.images[0].offset),
            static_cast<size_t>(found.images[0].bytes)),
        "first image");
  }
}

TEST_F(ImageShards, APatternNamesSeveral) {
  pack("s-1.tar", {{"b.jpg", "b"}, {"b.cls", "1"}});
  pack("s-0.tar", {{"a.jpg", "aa"}, {"a.cls", "0"}});
  const DataOptions options{
      .name = DataKind::images,
      .path = folder_.path("s-*.tar"),
      .holdout = 0.5,
      .image_size = 32};
  const ImageFolder found = scan_image_shards(options.path);
  EXPECT_EQ(found.images[0].path, folder_.path("s-0.tar"));
  EXPECT_EQ(found.images[1].label, 1);
  EXPECT_EQ(inspect_data(options).describe, "2 images, 2 classes, 3x32x32");
  DataOptions mixed = options;
  mixed.holdout_path = folder_.make_folder("photos");
  folder_.write("photos/cat/a.jpg", "x");
  EXPECT_THAT(
      error_text<DataError>([&] { inspect_data(mixed); }),
      HasSubstr("must be tar files, or folders"));
}

TEST_F(ImageShards, SamplesThatAreNone) {
  EXPECT_THAT(refusal(folder_.path("no.tar")), HasSubstr("cannot be read"));
  EXPECT_THAT(refusal(folder_.path("*.tar")), HasSubstr("matches no file"));
  EXPECT_THAT(
      refusal(pack("a.tar", {{"x.txt", "x"}})), HasSubstr("has no images"));
  EXPECT_THAT(
      refusal(pack("b.tar", {{"x.jpg", "x"}, {"y.cls", "1"}})),
      HasAll("b.tar: at byte", "\"x\" has no class (.cls)"));
  EXPECT_THAT(
      refusal(pack("c.tar", {{"x.cls", "1"}})),
      HasSubstr("has no image (.jpg"));
  EXPECT_THAT(
      refusal(pack("d.tar", {{"x.jpg", "x"}, {"x.png", "x"}, {"x.cls", "1"}})),
      HasAll("\"x.jpg\" and \"x.png\"", "one image and one .cls"));
  for (const char* bad : {"", "cat", "-1", "1.5", "1048576", "1 2"}) {
    EXPECT_THAT(
        refusal(pack("e.tar", {{"x.jpg", "x"}, {"x.cls", bad}})),
        HasAll("\"x.cls\" is", "a whole number from 0"))
        << bad;
  }
}

TEST_F(ImageShards, FilesThatAreBroken) {
  const auto path = pack("a.tar", {{"x.cls", "1"}, {"x.jpg", "image"}});
  const std::string bytes = read_file(path);
  EXPECT_THAT(
      refusal(folder_.write("b.tar", bytes.substr(0, 1300))),
      HasSubstr("the file ends within a member"));
  EXPECT_THAT(
      refusal(folder_.write("c.tar", bytes.substr(0, 1540))),
      HasSubstr("the file ends within a member"));
  EXPECT_THAT(
      refusal(folder_.write("d.tar", "\x1f\x8b" + bytes)),
      HasAll("at byte 0", "no header of a tar file", "unpacked"));
  // Any changed byte of a header is seen.
  for (size_t at = 0; at < 512; at += 7) {
    std::string broken = bytes;
    broken[at] = static_cast<char>(broken[at] + 1);
    EXPECT_THAT(refusal(folder_.write("e.tar", broken)), HasSubstr("at byte 0"))
        << at;
  }
}

}  // namespace echelon::image_shards_test
