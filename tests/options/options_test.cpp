// Every options struct: its defaults pass, and survive being written and read.
#include <gtest/gtest.h>

#include "echelon/error.h"
#include "echelon/options/bind.h"
#include "echelon/schedule/options.h"

namespace echelon::options_test {

template <class T>
class OptionsTest : public testing::Test {};

using AllOptions = testing::Types<
    CommOptions, DataOptions, Layout, ModelOptions, OptimizerOptions,
    PipelineLayout, TrainOptions>;
TYPED_TEST_SUITE(OptionsTest, AllOptions);

TYPED_TEST(OptionsTest, DefaultsPassAndReadBack) {
  TypeParam options;
  config::Document written;
  auto section = written.section("t", "a table");
  bind(section, options);
  ASSERT_NO_THROW(written.finish());
  EXPECT_FALSE(written.entries().empty());

  auto document = config::Document::parse(written.to_toml(), "f.toml");
  auto again = document.section("t", "a table");
  TypeParam read;
  bind(again, read);
  document.finish();
  EXPECT_EQ(document.to_toml(), written.to_toml());
  for (const auto& entry : document.entries()) {
    EXPECT_EQ(entry.value, entry.default_value) << entry.key;
    EXPECT_FALSE(entry.help.empty()) << entry.key;
  }
}

TEST(LayoutOptions, LongAndShortNames) {
  for (const char* text :
       {"[layout]\ndp = 2\nfsdp = 3\n",
        "[layout]\ndp_replicate = 2\ndp_shard = 3\n"}) {
    auto document = config::Document::parse(text, "f.toml");
    auto section = document.section("layout", "degrees");
    Layout layout;
    bind(section, layout);
    document.finish();
    EXPECT_EQ(layout, (Layout{.dp_replicate = 2, .dp_shard = 3}));
  }
}

// As in PyTorch: only AdamW decays by default.
TEST(OptimizerOptions, DefaultDecayIsThatOfTheOptimizer) {
  const auto decay = [](const std::string& text) {
    auto document = config::Document::parse("[optimizer]\n" + text, "f.toml");
    auto section = document.section("optimizer", "");
    OptimizerOptions options;
    bind(section, options);
    document.finish();
    return options.decay();
  };
  EXPECT_EQ(decay(""), 0.01);
  EXPECT_EQ(decay("name = \"adamw\""), 0.01);
  EXPECT_EQ(decay("name = \"adam\""), 0);
  EXPECT_EQ(decay("name = \"sgd\""), 0);
  EXPECT_EQ(decay("name = \"sgd\"\nweight_decay = 0.01"), 0.01);
  EXPECT_EQ(decay("weight_decay = 0.0"), 0);
  // A program may change the name of a job that it has read.
  OptimizerOptions options;
  options.name = OptimizerKind::adam;
  EXPECT_EQ(options.decay(), 0);
}

}  // namespace echelon::options_test
