#include "echelon/pool/settings.h"

#include <gmock/gmock.h>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::pool::settings_test {

using testing::ElementsAre;

Settings parse(const std::string& text) {
  return parse_settings(text, "pool.toml");
}
std::string error_of(const std::string& text) {
  return error_text<ConfigError>([&] { parse(text); });
}

TEST(PoolSettings, AreRead) {
  const Settings settings = parse(R"([pool]
devices = 16
min_runtime = "2m"
grace = "5s"
usage_half_life = "24h"

[project.research]
guaranteed = 8
limit = 12

[project.vision]
parent = "research"
devices = 3
weight = 2
users = ["anna"]
)");
  EXPECT_EQ(settings.devices, 16);
  EXPECT_EQ(settings.rules.least_seconds, 120);
  EXPECT_EQ(settings.rules.patience_seconds, 600);
  EXPECT_EQ(settings.rules.usage_factor, 1);
  EXPECT_EQ(settings.grace, std::chrono::seconds(5));
  ASSERT_EQ(settings.projects.size(), 2u);
  const auto vision =
      static_cast<size_t>(find_project(settings.projects, "vision"));
  const Project& project = settings.projects[vision];
  EXPECT_EQ(project.guaranteed, 3);
  EXPECT_EQ(project.weight, 2);
  EXPECT_EQ(project.limit, kNoLimit);
  EXPECT_EQ(
      settings.projects[static_cast<size_t>(project.parent)].name, "research");
  EXPECT_THAT(settings.members[vision].users, ElementsAre("anna"));
}

TEST(PoolSettings, AParentIsGuaranteedWhatItsProjectsAre) {
  const Settings settings = parse(
      "[project.all]\n[project.a]\nparent = \"all\"\nguaranteed = 2\n"
      "[project.b]\nparent = \"all\"\nguaranteed = 3\n");
  for (const Project& project : settings.projects) {
    if (project.name == "all") {
      EXPECT_EQ(project.guaranteed, 5);
    }
  }
}

TEST(PoolSettings, MistakesNameTheirPlaceAndTheWayOut) {
  EXPECT_EQ(
      error_of("[project.vision]\nguarantee = 3\n"),
      "pool.toml:2:1: [project.vision] guarantee = 3: unknown key; did you "
      "mean \"guaranteed\"?");
  EXPECT_THAT(
      error_of("[projects.vision]\nguaranteed = 3\n"),
      HasAll("pool.toml:1:", "unknown table", "did you mean \"project\"?"));
  EXPECT_THAT(
      error_of("[project.vision]\nguaranteed = 3\nlimit = 2\n"),
      HasAll("pool.toml:3:", "limit = 2", "at least guaranteed = 3"));
  EXPECT_THAT(
      error_of("[project.vision]\nguaranteed = -1\n"),
      HasAll("pool.toml:2:", "at least 0"));
  EXPECT_THAT(
      error_of("[project.vision]\nparent = \"reserch\"\n[project.research]\n"),
      HasAll("[project.vision] parent", "did you mean \"research\"?"));
  EXPECT_THAT(
      error_of("[project.a]\nparent = \"b\"\n[project.b]\nparent = "
               "\"c\"\n[project.c]\n"),
      HasAll("two levels"));
  EXPECT_THAT(
      error_of("[project.all]\nguaranteed = 1\n[project.a]\nparent = \"all\"\n"
               "guaranteed = 2\n"),
      HasAll("[project.all] guaranteed = 1", "guaranteed 2"));
  EXPECT_THAT(error_of("[pool]\ndevices = 2\n"), HasAll("has no project"));
  EXPECT_THAT(
      error_of("[pool]\ngrace = \"soon\"\n[project.a]\n"),
      HasAll("pool.toml:2:", "must be a time"));
}

TEST(PoolSettings, NoMoreIsGuaranteedThanThereIs) {
  const Settings settings =
      parse("[project.a]\nguaranteed = 5\n[project.b]\nguaranteed = 4\n");
  EXPECT_NO_THROW(check_capacity(settings, "pool.toml", 9));
  EXPECT_EQ(
      error_text<ConfigError>(
          [&] { check_capacity(settings, "pool.toml", 8); }),
      "pool.toml: guaranteed devices are 9 (a 5 + b 4), but the pool has 8; "
      "guarantee less, or start it with more --devices");
}

TEST(PoolSettings, AProjectIsFoundOrTheNearestNamed) {
  const Settings settings =
      parse("[project.all]\n[project.vision]\nparent = \"all\"\n");
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { find_project(settings.projects, "vison"); }),
      HasAll("--project vison", "did you mean \"vision\"?"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { find_project(settings.projects, "all"); }),
      HasAll("name one of them: vision"));
}

}  // namespace echelon::pool::settings_test
