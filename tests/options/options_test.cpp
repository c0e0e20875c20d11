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

}  // namespace echelon::options_test
