#include "echelon/text/nearest.h"

#include <gtest/gtest.h>

namespace echelon::config::nearest_test {

TEST(Nearest, FindsFewEdits) {
  EXPECT_EQ(nearest("stesp", {"batch", "steps", "step_every"}), "steps");
  EXPECT_EQ(
      nearest("leaning_rate", {"learning_rate", "momentum"}), "learning_rate");
  EXPECT_EQ(nearest("Log-Every", {"log_every"}), "log_every");
}

TEST(Nearest, PrefersTheFewest) {
  EXPECT_EQ(nearest("resnet19", {"resnet18", "resnet101"}), "resnet18");
  EXPECT_EQ(nearest("beta", {"beta1", "batch"}), "beta1");
}

TEST(Nearest, KnowsAbbreviationsAndLongerForms) {
  EXPECT_EQ(nearest("lr", {"momentum", "learning_rate"}), "learning_rate");
  EXPECT_EQ(nearest("batch_size", {"seed", "batch"}), "batch");
  EXPECT_EQ(nearest("decay", {"weight_decay"}), "weight_decay");
}

TEST(Nearest, IsSilentWhenNothingIsNear) {
  EXPECT_EQ(nearest("zebra", {"steps", "batch", "seed"}), "");
  EXPECT_EQ(nearest("x", {"tp", "pp"}), "");
  EXPECT_EQ(nearest("", {"steps"}), "");
  EXPECT_EQ(nearest(std::string(100000, 'a'), {"steps"}), "");
}

TEST(Nearest, MakesAQuestion) {
  EXPECT_EQ(did_you_mean("stesp", {"steps"}), "; did you mean \"steps\"?");
  EXPECT_EQ(did_you_mean("zebra", {"steps"}), "");
}

}  // namespace echelon::config::nearest_test
