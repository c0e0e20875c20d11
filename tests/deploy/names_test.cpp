// Names, labels, time limits and words as the engines take them.
#include "echelon/deploy/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "echelon/deploy/deploy.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::names_test {

using namespace deploy;
using testing::AllOf;
using testing::HasSubstr;

std::string refused(const std::function<void()>& act) {
  return error_text<ConfigError>(act);
}

TEST(Names, AreLabelsOfDns) {
  for (const char* fine : {"a", "first", "first-2", "a1b"}) {
    EXPECT_NO_THROW(check_dns_label("--name", fine)) << fine;
  }
  for (const char* wrong :
       {"", "First", "1st", "a_b", "a.b", "-a", "a-", "ä"}) {
    EXPECT_THAT(
        refused([&] { check_dns_label("--name", wrong); }),
        HasSubstr("begins with a letter"))
        << wrong;
  }
}

TEST(Names, ThatAreTooLongSayTheLongest) {
  const std::string name(60, 'a');
  EXPECT_NO_THROW(check_dns_label("--name", name, 60));
  const std::string text = refused([&] {
    check_dns_label("--name", "aaaa-bbbb", 5, "its pods need the rest");
  });
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("has 9 characters, but at most 5 are possible"),
          HasSubstr("its pods need the rest"), HasSubstr("--name aaaa fits")));
}

TEST(Names, AreMadeOfFiles) {
  EXPECT_EQ(name_of("examples/configs/own_model.toml"), "own-model");
  EXPECT_EQ(name_of("My Run..toml"), "my-run");
  EXPECT_EQ(name_of("7b.toml"), "job-7b");
  EXPECT_EQ(name_of("___.toml"), "job");
}

TEST(Names, OfObjectsMayBeginWithADigit) {
  for (const char* fine : {"a", "7b-data", "2026"}) {
    EXPECT_NO_THROW(check_object_name("--namespace", fine, false)) << fine;
    EXPECT_NO_THROW(check_object_name("--volume", fine, true)) << fine;
  }
  EXPECT_NO_THROW(check_object_name("--volume", "data.v1", true));
  EXPECT_NO_THROW(check_object_name("--volume", std::string(253, 'a'), true));
  for (const char* wrong :
       {"", "First", "a_b", "-a", "a-", "a..b", "a.-b", "a-.b", ".a"}) {
    EXPECT_NE(
        refused([&] { check_object_name("--volume", wrong, true); }),
        "no error")
        << wrong;
  }
  for (const std::string& wrong : {std::string("a.b"), std::string(64, 'a')}) {
    EXPECT_THAT(
        refused([&] { check_object_name("--namespace", wrong, false); }),
        HasSubstr("at most 63 characters"));
  }
}

TEST(Names, OfLabels) {
  EXPECT_NO_THROW(check_label_key("--topology", "nvidia.com/gpu.clique"));
  EXPECT_NO_THROW(check_label_key("--topology", "rack"));
  for (const char* wrong : {"", "a/b/c", "/a", "a b", "-a"}) {
    EXPECT_NE(
        refused([&] { check_label_key("--topology", wrong); }), "no error")
        << wrong;
  }
  EXPECT_NO_THROW(check_label_value("--queue", "Team_1.a"));
  EXPECT_NE(refused([&] { check_label_value("--queue", "a b"); }), "no error");
  EXPECT_NE(
      refused([&] { check_label_value("--queue", std::string(64, 'a')); }),
      "no error");
}

TEST(Names, CannotAddALineToAScript) {
  EXPECT_NO_THROW(check_word("--account", "vision_a100"));
  for (const char* wrong : {"a b", "a\n#SBATCH --uid=0", "a\"b", ""}) {
    EXPECT_NE(refused([&] { check_word("--account", wrong); }), "no error")
        << wrong;
  }
}

TEST(Names, TimeLimitsAreThoseOfSlurm) {
  const std::pair<const char*, int64_t> limits[] = {
      {"90", 5400},       {"1:30", 90},        {"1:30:00", 5400},
      {"2-12", 216000},   {"2-12:30", 217800}, {"0-0:0:7", 7},
      {"1-0:0:1", 86401}, {"00:10:00", 600}};
  for (const auto& [text, seconds] : limits) {
    EXPECT_EQ(parse_time_limit("--time", text), seconds) << text;
  }
  for (const char* wrong :
       {"", "0", "1h", "1:", ":1", "1:2:3:4", "-1", "1-", "1-1:1:1:1", "-1-2",
        "99999999999999999999"}) {
    EXPECT_THAT(
        refused([&] { parse_time_limit("--time", wrong); }),
        HasSubstr("write it as Slurm does"))
        << wrong;
  }
}

}  // namespace echelon::names_test
