// The projects of a pool's file.
#include "echelon/deploy/projects.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::projects_test {

using testing::HasSubstr;

std::string refused(const std::string& text) {
  const TempFolder folder;
  const std::string path = folder.write("pool.toml", text);
  return error_text<ConfigError>([&] { deploy::read_projects(path); });
}

TEST(Projects, AreRead) {
  const TempFolder folder;
  const auto projects = deploy::read_projects(folder.write(
      "pool.toml",
      "[pool]\ndevices = 8\ngroup = 'a'\n[project.a]\n[project.b]\n"
      "guaranteed = 3\nweight = 0.5\nusers = ['u']\n"
      "limit = 8\nparent = 'a'\n"));
  ASSERT_EQ(projects.size(), 2u);
  EXPECT_EQ(projects[0].name, "a");
  EXPECT_EQ(projects[0].guaranteed, 3);  // those of its parts
  EXPECT_EQ(projects[1].weight, 0.5);
  EXPECT_EQ(projects[1].limit, 8);
  EXPECT_EQ(projects[1].parent, "a");
}

TEST(Projects, MistakesHaveAPlaceAndAWayOut) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "has no project"},
      {"[project.a]\nguarantee = 3\n", ":2:1: unknown key \"guarantee\""},
      {"[project.a]\nguarantee = 3\n", "did you mean \"guaranteed\""},
      {"[project.a]\nguaranteed = -1\n", "must be a whole number, 0 or more"},
      {"[project.a]\nweight = 'x'\n", "must be a number, 0 or more"},
      {"[project.a]\nguaranteed = 4\nlimit = 2\n",
       "limit = 2, but guaranteed = 4"},
      {"[project.A]\nguaranteed = 4\n", "begins with a letter"},
      {"[project.a]\nparent = 'c'\n", "there is no such project"},
      {"[project.a]\nparent = 'b'\n[project.b]\nparent = 'a'\n",
       "is a part of itself"},
      {"[project.a]\nguaranteed = 4\n[project.b]\ndevices = 5\nparent = 'a'\n",
       "[project.a] guaranteed = 4, but its parts are guaranteed 5"},
      {"[pool]\ndevices = 4\n[project.a]\nguaranteed = 3\n[project.b]\n"
       "guaranteed = 3\n",
       "are guaranteed 6 devices, but [pool] devices = 4"}};
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(refused(text), HasSubstr(message)) << text;
  }
}

}  // namespace echelon::projects_test
