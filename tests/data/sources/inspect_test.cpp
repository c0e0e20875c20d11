#include "echelon/data/sources/inspect.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/data/sources/digits.h"
#include "echelon/data/sources/image_folder.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::inspect_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string config_error(const DataOptions& options) {
  return error_text<ConfigError>([&] { inspect_data(options); });
}
std::string data_error(const DataOptions& options) {
  return error_text<DataError>([&] { inspect_data(options); });
}

TEST(Digits, EqualTheirSource) {
  const Digits digits = load_digits();
  ASSERT_EQ(digits.labels.size(), 1797);
  EXPECT_THAT(
      std::vector<int>(digits.labels.begin(), digits.labels.begin() + 10),
      ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(digits.labels.back(), 8);
  EXPECT_THAT(
      std::vector<int>(digits.pixels[0].begin(), digits.pixels[0].begin() + 8),
      ElementsAre(0, 0, 5, 13, 9, 1, 0, 0));
  int64_t ink = 0;
  for (const auto& image : digits.pixels) {
    ink += std::accumulate(image.begin(), image.end(), int64_t{0});
  }
  EXPECT_EQ(ink, 561718);
}

TEST(Inspect, Digits) {
  const DataFacts facts = inspect_data({});
  EXPECT_EQ(facts.num_samples, 1797);
  EXPECT_EQ(facts.num_train, 1438);
  EXPECT_EQ(facts.num_holdout, 359);
  EXPECT_THAT(facts.sample_shape, ElementsAre(1, 8, 8));
  EXPECT_EQ(facts.classes, 10);
  EXPECT_EQ(facts.describe, "1797 digits, 10 classes, 1x8x8");
}

TEST(Inspect, Dummy) {
  DataOptions options{.name = DataKind::dummy, .holdout = 0};
  EXPECT_EQ(
      inspect_data(options).describe,
      "10000 random images, 10 classes, 3x224x224");
  EXPECT_EQ(inspect_data(options).num_train, 10000);
  options.shape = {3, 0};
  EXPECT_THAT(config_error(options), HasSubstr("shape=0: must be 1 or more"));
  options.shape = {1 << 16, 1 << 16};
  EXPECT_THAT(config_error(options), HasSubstr("fewer than 2^31"));
  options.shape = {};
  EXPECT_THAT(config_error(options), HasSubstr("shape=[]"));
  options.shape = {1};
  options.samples = 0;
  EXPECT_THAT(config_error(options), HasSubstr("samples=0"));
}

TEST(Inspect, RefusesWrongSettings) {
  for (const auto& [options, part] :
       std::vector<std::pair<DataOptions, std::string>>{
           {{.holdout = 1.0}, "holdout=1"},
           {{.workers = 0}, "workers=0"},
           {{.prefetch = -1}, "prefetch=-1"},
           {{.name = DataKind::tensors}, "needs path"},
           {{.name = DataKind::images}, "needs path"},
           {{.holdout_path = "x"}, "use holdout"},
           {{.name = DataKind::images, .image_size = 0}, "image_size=0"},
           {{.name = DataKind::images, .mean = {0.5}}, "3 channels"},
           {{.name = DataKind::images, .std = {1, 0, 1}}, "more than 0"},
           {{.name = DataKind::images, .max_image_pixels = 0},
            "max_image_pixels"}}) {
    EXPECT_THAT(config_error(options), HasSubstr(part));
  }
}

class InspectTensors : public testing::Test {
 protected:
  using Shape = std::vector<int64_t>;

  DataOptions save(
      const Shape& inputs_shape, const Shape& targets_shape,
      const std::vector<int32_t>& targets,
      const std::string& inputs_name = "inputs",
      const std::string& targets_dtype = "I32",
      const std::string& file = "d.safetensors") {
    int64_t count = 4;
    for (int64_t dim : inputs_shape) count *= dim;
    const std::string data(static_cast<size_t>(count), '\0');
    const std::string path = folder_.path(file);
    safetensors::write(
        path,
        {{inputs_name, "F32", inputs_shape, std::as_bytes(std::span(data))},
         {"targets", targets_dtype, targets_shape,
          std::as_bytes(std::span(targets))}});
    return {.name = DataKind::tensors, .path = path};
  }

  TempFolder folder_;
};

TEST_F(InspectTensors, CountsSamplesAndClasses) {
  const DataFacts facts = inspect_data(save({5, 2, 3}, {5}, {0, 6, 2, 1, 0}));
  EXPECT_EQ(facts.num_samples, 5);
  EXPECT_EQ(facts.num_holdout, 1);
  EXPECT_THAT(facts.sample_shape, ElementsAre(2, 3));
  EXPECT_EQ(facts.classes, 7);
  EXPECT_EQ(facts.describe, "5 samples, 7 classes, 2x3");
}

TEST_F(InspectTensors, RefusesWhatDoesNotFit) {
  EXPECT_THAT(
      data_error(save({3, 2}, {2}, {0, 1})),
      AllOf(HasSubstr("inputs [3, 2] has 3"), HasSubstr("targets [2] has 2")));
  EXPECT_THAT(
      data_error(save({2}, {2}, {0, 1}, "x")),
      HasSubstr("no tensor \"inputs\""));
  EXPECT_THAT(
      data_error(save({2}, {2}, {0, -1})),
      AllOf(HasSubstr("holds -1 (element 1)"), HasSubstr("0 or more")));
  EXPECT_THAT(
      data_error(save({2}, {2}, {0, 1}, "inputs", "F32")),
      AllOf(HasSubstr("targets are F32"), HasSubstr("integers")));
  EXPECT_THAT(data_error(save({}, {}, {0})), HasSubstr("inputs is a scalar"));
  EXPECT_THAT(data_error(save({0, 3}, {0}, {})), HasSubstr("are empty"));
}

TEST_F(InspectTensors, RefusesMissingAndMalformedFiles) {
  DataOptions options = save({2}, {2}, {0, 1});
  const std::string whole = read_file(options.path);
  options.path = folder_.write("cut", whole.substr(0, whole.size() - 1));
  EXPECT_THAT(data_error(options), HasSubstr("/cut"));
  options.path = folder_.path("none.safetensors");
  EXPECT_THAT(data_error(options), HasSubstr("No such file"));
  options.path = folder_.path();
  EXPECT_THAT(data_error(options), HasSubstr("not a file"));
}

TEST_F(InspectTensors, SeparateHoldoutMustMatch) {
  DataOptions options = save({4, 2}, {4}, {0, 1, 2, 0});
  options.holdout_path = save({2, 2}, {2}, {0, 1}, "inputs", "I32", "h").path;
  EXPECT_EQ(inspect_data(options).num_train, 4);
  EXPECT_EQ(inspect_data(options).num_holdout, 2);
  save({2, 3}, {2}, {0, 1}, "inputs", "I32", "h");
  EXPECT_THAT(data_error(options), HasSubstr("samples are [3]"));
  save({2, 2}, {2}, {0, 5}, "inputs", "I32", "h");
  EXPECT_THAT(data_error(options), HasSubstr("holds class 5"));
}

class InspectImages : public testing::Test {
 protected:
  DataOptions options() const {
    return {
        .name = DataKind::images,
        .path = folder_.path("pictures"),
        .image_size = 32};
  }
  TempFolder folder_;
};

TEST_F(InspectImages, FindsClassesAndImages) {
  for (const char* name :
       {"dog/b.JPG", "dog/a.jpeg", "cat/x.png", "cat/deep/er/y.PNG",
        "cat/notes.txt", "cat/.hidden.jpg", ".git/z.jpg", "cat/jpg",
        "caf\xe9/\xff.jpg"}) {
    folder_.write(std::string("pictures/") + name, "x");
  }
  folder_.write("pictures/readme.jpg", "beside the classes");
  const ImageFolder found = scan_image_folder(folder_.path("pictures/"));
  EXPECT_THAT(found.classes, ElementsAre("caf\xe9", "cat", "dog"));
  std::vector<std::string> paths;
  for (const auto& image : found.images) paths.push_back(image.path);
  EXPECT_THAT(
      paths, ElementsAre(
                 "caf\xe9/\xff.jpg", "cat/deep/er/y.PNG", "cat/x.png",
                 "dog/a.jpeg", "dog/b.JPG"));
  EXPECT_EQ(found.images[3].label, 2);
  const DataFacts facts = inspect_data(options());
  EXPECT_EQ(facts.num_samples, 5);
  EXPECT_EQ(facts.describe, "5 images, 3 classes, 3x32x32");
}

TEST_F(InspectImages, OneClassIsEnough) {
  folder_.write("pictures/only/a.png", "x");
  const DataFacts facts = inspect_data(options());
  EXPECT_EQ(facts.classes, 1);
  EXPECT_EQ(facts.num_train, 1);
  EXPECT_EQ(facts.num_holdout, 0);
}

TEST_F(InspectImages, RefusesFoldersWithoutImages) {
  EXPECT_THAT(data_error(options()), HasAll("/pictures", "No such file"));
  folder_.make_folder("pictures");
  EXPECT_THAT(data_error(options()), HasSubstr("no class folders"));
  folder_.write("pictures/a.jpg", "x");
  EXPECT_THAT(data_error(options()), HasSubstr("no class folders"));
  folder_.write("pictures/cat/a.txt", "x");
  EXPECT_THAT(
      data_error(options()),
      HasAll("/pictures/cat", "class folder without images"));
  DataOptions file = options();
  file.path = folder_.path("pictures/a.jpg");
  EXPECT_THAT(data_error(file), HasSubstr("is a file"));
}

TEST_F(InspectImages, FollowsLinksButNotLoops) {
  folder_.write("pictures/cat/a.jpg", "x");
  folder_.write("elsewhere/b.jpg", "x");
  fs::create_symlink(folder_.path("elsewhere"), folder_.path("pictures/dog"));
  EXPECT_EQ(inspect_data(options()).num_samples, 2);
  fs::create_symlink(
      folder_.path("pictures/cat"), folder_.path("pictures/cat/self"));
  EXPECT_THAT(data_error(options()), HasAll("/cat/self", "in a circle"));
  fs::remove(folder_.path("pictures/cat/self"));
  fs::create_symlink("b.jpg", folder_.path("pictures/cat/c.jpg"));
  fs::create_symlink("c.jpg", folder_.path("pictures/cat/b.jpg"));
  EXPECT_THAT(data_error(options()), HasSubstr("in a circle"));
  fs::remove(folder_.path("pictures/cat/b.jpg"));
  EXPECT_THAT(data_error(options()), HasAll("c.jpg", "No such"));
}

TEST_F(InspectImages, UnreadableFolder) {
  folder_.write("pictures/cat/a.jpg", "x");
  ::chmod(folder_.path().c_str(), 0755);
  ::chmod(folder_.path("pictures/cat").c_str(), 0);
  // Root can read every folder, so a child process becomes another user.
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);
    const std::string text = data_error(options());
    const bool told = text.find("/cat: ") != std::string::npos &&
                      text.find("Permission denied") != std::string::npos;
    ::_exit(told ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  ::chmod(folder_.path("pictures/cat").c_str(), 0700);
}

TEST_F(InspectImages, SeparateHoldoutUsesTheSameClasses) {
  folder_.write("pictures/cat/a.jpg", "x");
  folder_.write("pictures/dog/a.jpg", "x");
  folder_.write("val/dog/a.jpg", "x");
  DataOptions with_holdout = options();
  with_holdout.holdout_path = folder_.path("val");
  EXPECT_EQ(inspect_data(with_holdout).num_train, 2);
  EXPECT_EQ(inspect_data(with_holdout).num_holdout, 1);
  folder_.write("val/cow/a.jpg", "x");
  EXPECT_THAT(
      data_error(with_holdout), HasAll("val/cow", "no class of that name"));
}

}  // namespace echelon::inspect_test
