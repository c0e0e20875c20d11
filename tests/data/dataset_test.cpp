#include "echelon/data/dataset.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cstdlib>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/data/loader.h"
#include "echelon/text/format.h"
#include "tests/data/make_image.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::dataset_test {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Dataset, Digits) {
  const auto digits = make_dataset({}, 0);
  EXPECT_EQ(digits->size(), 1797);
  const Batch batch = digits->get(std::vector<int64_t>{0, 1796, 3}, {});
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{3, 1, 8, 8}));
  EXPECT_EQ(batch.inputs[0][0][0][3].item<float>(), 13.0f / 16);
  EXPECT_TRUE(torch::equal(batch.targets, torch::tensor({0, 8, 3})));
  EXPECT_EQ(batch.global_count, 3);
  EXPECT_THAT(batch.indices, ElementsAre(0, 1796, 3));
  EXPECT_LE(batch.inputs.max().item<float>(), 1.0f);
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { digits->get(std::vector<int64_t>{1797}, {}); }),
      HasSubstr("sample 1797 is outside of the data set's 1797"));
  EXPECT_EQ(digits->get({}, {}).inputs.size(0), 0);
}

TEST(Dataset, DummyIsAFunctionOfSeedAndIndex) {
  const DataOptions options{
      .name = DataKind::dummy,
      .samples = 2000,
      .shape = {3, 16, 20},
      .classes = 7};
  const auto a = make_dataset(options, 1);
  const std::vector<int64_t> some = {5, 1999, 5};
  const Batch batch = a->get(some, {});
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{3, 3, 16, 20}));
  EXPECT_TRUE(torch::equal(batch.inputs[0], batch.inputs[2]));
  EXPECT_FALSE(torch::equal(batch.inputs[0], batch.inputs[1]));
  EXPECT_TRUE(torch::equal(
      batch.inputs, make_dataset(options, 1)->get(some, {}).inputs));
  EXPECT_FALSE(torch::equal(
      batch.inputs, make_dataset(options, 2)->get(some, {}).inputs));
}

TEST(Dataset, DummyIsUniformAndUncorrelated) {
  const auto dummy = make_dataset(
      {.name = DataKind::dummy, .samples = 1000, .shape = {1000}, .classes = 4},
      3);
  std::vector<int64_t> all(1000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  const Batch batch = dummy->get(all, {});
  const auto x = batch.inputs.to(torch::kFloat64);
  // The standard deviation of means over a million is 0.001.
  EXPECT_NEAR(x.mean().item<double>(), 0.0, 0.006);
  EXPECT_NEAR(x.var().item<double>(), 1.0, 0.006);
  EXPECT_LT(x.abs().max().item<double>(), 1.73206);
  // Neighbours within a sample, and the same element of neighbouring samples.
  EXPECT_NEAR(
      (x.slice(1, 1) * x.slice(1, 0, -1)).mean().item<double>(), 0.0, 0.006);
  EXPECT_NEAR(
      (x.slice(0, 1) * x.slice(0, 0, -1)).mean().item<double>(), 0.0, 0.006);
  EXPECT_LT(x.mean(0).abs().max().item<double>(), 0.2);
  EXPECT_LT(x.mean(1).abs().max().item<double>(), 0.2);
  const auto count = torch::bincount(batch.targets);
  EXPECT_EQ(count.size(0), 4);
  EXPECT_GT(count.min().item<int64_t>(), 180);
}

TEST(Dataset, TensorsOfAnyShape) {
  TempFolder folder;
  const std::string path = folder.path("d.safetensors");
  const auto inputs = torch::randn({6, 2, 5}, torch::kFloat64);
  const auto targets = torch::randint(0, 9, {6, 4}, torch::kInt32);
  save_tensors(path, {{"inputs", inputs}, {"targets", targets}});
  const auto data = make_dataset({.name = DataKind::tensors, .path = path}, 0);
  const Batch batch = data->get(std::vector<int64_t>{4, 0}, {});
  EXPECT_TRUE(torch::equal(batch.inputs[0], inputs[4]));
  EXPECT_TRUE(torch::equal(batch.inputs[1], inputs[0]));
  EXPECT_TRUE(torch::equal(batch.targets[0], targets[4].to(torch::kInt64)));
  EXPECT_EQ(data->spec().classes, targets.max().item<int64_t>() + 1);
}

TEST(Dataset, ATableOfNumbers) {
  TempFolder folder;
  const std::string path =
      folder.write("d.csv", "x,target,y\n1,2,3\n4,0,5\n6,1,7\n");
  const auto data = make_dataset({.name = DataKind::tensors, .path = path}, 0);
  const Batch batch = data->get(std::vector<int64_t>{2, 0}, {});
  EXPECT_TRUE(
      torch::equal(batch.inputs, torch::tensor({{6.0f, 7.0f}, {1.0f, 3.0f}})));
  EXPECT_TRUE(torch::equal(batch.targets, torch::tensor({1, 2})));
  EXPECT_EQ(data->spec().classes, 3);
  EXPECT_EQ(data->fingerprints().at(0).first, path);
}

TEST(OpenData, SplitsOrOpensASeparateHoldout) {
  const TrainingData digits = open_data({}, 4);
  EXPECT_EQ(digits.train_samples.size(), 1438);
  EXPECT_EQ(digits.holdout_samples.size(), 359);
  EXPECT_EQ(digits.train, digits.holdout);

  TempFolder folder;
  for (const char* name : {"a", "b"}) {
    save_tensors(
        folder.path(name),
        {{"inputs", torch::ones({name[0] == 'a' ? 5 : 2, 3})},
         {"targets", torch::zeros({name[0] == 'a' ? 5 : 2}, torch::kInt64)}});
  }
  const TrainingData both = open_data(
      {.name = DataKind::tensors,
       .path = folder.path("a"),
       .holdout_path = folder.path("b")},
      4);
  EXPECT_THAT(both.train_samples, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(both.holdout_samples, ElementsAre(0, 1));
  EXPECT_EQ(both.holdout->size(), 2);
}

class Images : public testing::Test {
 protected:
  DataOptions options(BadImage bad_image = BadImage::error) const {
    return {
        .name = DataKind::images,
        .path = folder_.path("root"),
        .image_size = 24,
        .mean = {0, 0, 0},
        .std = {1, 1, 1},
        .bad_image = bad_image};
  }
  TempFolder folder_;
};

TEST_F(Images, LabelsFollowTheFolders) {
  folder_.write("root/b/x.png", make_png(30, 24));
  folder_.write("root/a/y.jpeg", make_jpeg(24, 24));
  folder_.write("root/caf\xe9/\xff.jpg", make_jpeg(50, 24));
  const auto data = make_dataset(options(), 0);
  const Batch batch = data->get(std::vector<int64_t>{0, 1, 2}, {});
  EXPECT_TRUE(torch::equal(batch.targets, torch::tensor({0, 1, 2})));
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{3, 3, 24, 24}));
  // The PNG's red is 255 * x / 30; its window begins at x = 3.
  EXPECT_NEAR(batch.inputs[1][0][0][0].item<float>(), 25 / 255.0, 1e-6);
}

TEST_F(Images, BrokenImagesAreErrorsOrSkipped) {
  folder_.write("root/a/1.png", make_png(24, 24));
  folder_.write("root/a/2.jpg", "this is text");
  folder_.write("root/a/3.png", make_png(25, 24));
  folder_.write("root/a/4.jpg", make_jpeg(99, 99).substr(0, 900));
  const std::vector<int64_t> all = {0, 1, 2, 3};
  EXPECT_THAT(
      error_text<DataError>([&] { make_dataset(options(), 0)->get(all, {}); }),
      HasAll("root/a/2.jpg: broken image", "neither"));

  const auto skipping = make_dataset(options(BadImage::skip), 0);
  const Batch batch = skipping->get(all, {});
  EXPECT_THAT(batch.indices, ElementsAre(0, 2));
  EXPECT_EQ(batch.skipped, 2);
  EXPECT_THAT(
      batch.skip_reasons, ElementsAre(HasSubstr("2.jpg"), HasSubstr("4.jpg")));
  EXPECT_EQ(batch.global_count, 4);
  const auto third = skipping->get(std::vector<int64_t>{2}, {});
  EXPECT_TRUE(torch::equal(batch.inputs[1], third.inputs[0]));
  EXPECT_EQ(batch.targets.size(0), 2);
  const Batch none = skipping->get(std::vector<int64_t>{1, 3}, {});
  EXPECT_EQ(none.inputs.sizes(), (std::vector<int64_t>{0, 3, 24, 24}));
}

// The images of tar files are those of a folder.
TEST_F(Images, InShardsEqualThoseOfAFolder) {
  const std::vector<std::string> images = {
      make_png(30, 24), make_jpeg(40, 50), make_png(99, 70)};
  for (size_t i = 0; i < images.size(); ++i) {
    const std::string number = std::to_string(i);
    folder_.write("root/" + number + "/x.png", images[i]);
    folder_.write("src/" + number + ".png", images[i]);
    folder_.write("src/" + number + ".cls", number);
  }
  const auto pack = [&](const std::string& name, const std::string& samples) {
    std::string command =
        "cd " + folder_.path("src") + " && tar -cf ../" + name;
    for (const char one : samples) {
      command += format(" {}.cls {}.png", one, one);
    }
    ASSERT_EQ(std::system(command.c_str()), 0);
  };
  pack("s-0.tar", "01");
  pack("s-1.tar", "2");
  DataOptions shards = options();
  shards.path = folder_.path("s-*.tar");
  const std::vector<int64_t> all = {2, 0, 1};
  const auto data = make_dataset(shards, 0);
  const Batch batch = data->get(all, {});
  const Batch expected = make_dataset(options(), 0)->get(all, {});
  EXPECT_TRUE(torch::equal(batch.inputs, expected.inputs));
  EXPECT_TRUE(torch::equal(batch.targets, expected.targets));
  EXPECT_EQ(data->spec().classes, 3);
  // A resumed run notices other samples.
  const auto before = data->fingerprints();
  ASSERT_EQ(before.size(), 1U);
  pack("s-1.tar", "1");
  EXPECT_NE(make_dataset(shards, 0)->fingerprints(), before);
  // Errors name the file and the place.
  folder_.write("src/0.png", "no image");
  pack("s-1.tar", "0");
  EXPECT_THAT(
      error_text<DataError>([&] { make_dataset(shards, 0)->get(all, {}); }),
      HasAll("s-1.tar at byte", "broken image"));
  // Held-out shards have the classes of training.
  pack("s-1.tar", "2");
  folder_.write("src/0.png", images[0]);
  pack("held-out.tar", "01");
  shards.holdout_path = folder_.path("held-out.tar");
  const TrainingData both = open_data(shards, 0);
  EXPECT_EQ(both.holdout->size(), 2);
  EXPECT_EQ(both.holdout->spec().classes, 3);
}

TEST_F(Images, AugmentationDependsOnSeedEpochAndIndexAlone) {
  folder_.write("root/a/1.png", make_png(60, 50));
  folder_.write("root/a/2.png", make_png(60, 50));
  DataOptions augmented = options();
  augmented.crop = Crop::random_resized;
  augmented.flip = true;
  const auto data = make_dataset(augmented, 0);
  const std::vector<int64_t> both = {0, 1}, second = {1};
  const SampleContext context{.seed = 7, .epoch = 2};
  const Batch batch = data->get(both, context);
  EXPECT_FALSE(torch::equal(batch.inputs[0], batch.inputs[1]));
  EXPECT_TRUE(
      torch::equal(batch.inputs[1], data->get(second, context).inputs[0]));
  EXPECT_FALSE(torch::equal(
      batch.inputs, data->get(both, {.seed = 7, .epoch = 3}).inputs));
  EXPECT_FALSE(torch::equal(
      batch.inputs, data->get(both, {.seed = 8, .epoch = 2}).inputs));
  // Held-out images are not augmented.
  EXPECT_TRUE(torch::equal(
      data->get(both, {.seed = 7, .epoch = 2, .training = false}).inputs,
      make_dataset(options(), 0)->get(both, context).inputs));
}

TEST_F(Images, HoldoutUsesTheClassNumbersOfTraining) {
  for (const char* name :
       {"root/a/1.png", "root/b/1.png", "root/c/1.png", "val/c/1.png",
        "val/b/1.png"}) {
    folder_.write(name, make_png(24, 24));
  }
  DataOptions both = options();
  both.holdout_path = folder_.path("val");
  const TrainingData data = open_data(both, 0);
  const Batch batch = data.holdout->get(data.holdout_samples, {});
  EXPECT_TRUE(torch::equal(batch.targets, torch::tensor({1, 2})));
}

class TextData : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("ECHELON_CACHE", folder_.make_folder("cache").c_str(), 1);
    std::string lines;
    for (int i = 0; i < 300; ++i) lines += "line " + std::to_string(i) + "\n";
    options_.name = DataKind::text;
    options_.sources = {
        folder_.write("a.txt", lines), folder_.write("b.txt", "0123456789")};
    options_.weights = {3, 1};
    options_.sequence = 5;
    options_.document_separator = "\n";
    options_.documents = Documents::respected;
  }

  TempFolder folder_;
  DataOptions options_;
};

TEST_F(TextData, TensorsOfABatch) {
  const auto dataset = make_dataset(options_, 0);
  const auto spec = dataset->spec();
  EXPECT_EQ(spec.input_shape, (std::vector<int64_t>{5}));
  EXPECT_EQ(spec.target_shape, (std::vector<int64_t>{5}));
  EXPECT_EQ(spec.input_dtype, torch::kInt64);
  EXPECT_EQ(spec.classes, 257);
  ASSERT_EQ(spec.more.size(), 1);
  const std::vector<int64_t> indices = {1, 0};
  const Batch batch = dataset->get(indices, {});
  // "line " | "0\0line" with \0 for the end of a document.
  EXPECT_TRUE(torch::equal(
      batch.inputs, torch::tensor(
                        {{'0', 256, 'l', 'i', 'n'}, {'l', 'i', 'n', 'e', ' '}},
                        torch::kInt64)));
  EXPECT_TRUE(torch::equal(
      batch.targets,
      torch::tensor(
          {{256, -100, 'i', 'n', 'e'}, {'i', 'n', 'e', ' ', '0'}},
          torch::kInt64)));
  EXPECT_TRUE(torch::equal(
      batch.more.at(0),
      torch::tensor({{0, 0, 1, 1, 1}, {0, 0, 0, 0, 0}}, torch::kInt64)));
  options_.documents = Documents::packed;
  EXPECT_TRUE(make_dataset(options_, 0)->get(indices, {}).more.empty());
}

TEST_F(TextData, ResumesInTheSameOrderWithOtherRanks) {
  const TrainingData data = open_data(options_, 7);
  const auto order = data.train->training_order(data.train_samples, 7, 1, true);
  const auto total = static_cast<int64_t>(order.size());
  const auto loader = [&](int64_t batch, int64_t rank, int64_t ranks) {
    return std::make_unique<Loader>(
        *data.train, LoaderOptions{
                         .samples = data.train_samples,
                         .global_batch = batch,
                         .rank = rank,
                         .num_ranks = ranks,
                         .seed = 7});
  };
  const auto first = loader(12, 0, 1);
  first->start_epoch(1);
  std::vector<int64_t> seen = first->next()->indices;
  const auto second = first->next()->indices;
  seen.insert(seen.end(), second.begin(), second.end());
  EXPECT_EQ(first->position(), (Position{1, 24}));
  for (const int64_t ranks : {1, 2, 3}) {
    std::vector<std::vector<int64_t>> batches(
        static_cast<size_t>((total - 24 + 9) / 10));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto other = loader(10, rank, ranks);
      other->seek(first->position());
      for (auto& batch : batches) {
        const auto part = other->next();
        ASSERT_TRUE(part);
        EXPECT_EQ(
            part->more.at(0).size(0),
            static_cast<int64_t>(part->indices.size()));
        batch.insert(batch.end(), part->indices.begin(), part->indices.end());
      }
      EXPECT_FALSE(other->next());
    }
    std::vector<int64_t> all = seen;
    for (const auto& batch : batches) {
      all.insert(all.end(), batch.begin(), batch.end());
    }
    EXPECT_EQ(all, order) << ranks << " ranks";
  }
  // The short second source is repeated and makes a quarter of the samples.
  const auto repeated = std::count_if(
      order.begin(), order.end(),
      [&](int64_t sample) { return sample >= data.train->size() - 2; });
  EXPECT_EQ(repeated, (total + 2) / 4);
}

TEST_F(TextData, VisitsHeldOutSamplesOnce) {
  const TrainingData data = open_data(options_, 7);
  Loader loader(
      *data.holdout, {.samples = data.holdout_samples,
                      .global_batch = 1000000,
                      .shuffle = false,
                      .training = false});
  EXPECT_EQ(loader.next()->indices, data.holdout_samples);
}

}  // namespace echelon::dataset_test
