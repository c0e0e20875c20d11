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
      "devices = 8\n[project.a]\n[project.b]\ndevices = 3\nweight = 0.5\n"
      "limit = 8\nparent = 'a'\n"));
  ASSERT_EQ(projects.size(), 2u);
  EXPECT_EQ(projects[0].name, "a");
  EXPECT_EQ(projects[0].devices, 3);  // those of its parts
  EXPECT_EQ(projects[1].weight, 0.5);
  EXPECT_EQ(projects[1].limit, 8);
  EXPECT_EQ(projects[1].parent, "a");
}

TEST(Projects, MistakesHaveAPlaceAndAWayOut) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "has no project"},
      {"[project.a]\ndevice = 3\n", ":2:1: unknown key \"device\""},
      {"[project.a]\ndevice = 3\n", "did you mean \"devices\""},
      {"[project.a]\ndevices = -1\n", "must be a whole number, 0 or more"},
      {"[project.a]\nweight = 'x'\n", "must be a number, 0 or more"},
      {"[project.a]\ndevices = 4\nlimit = 2\n", "limit = 2, but devices = 4"},
      {"[project.A]\ndevices = 4\n", "begins with a letter"},
      {"[project.a]\nparent = 'c'\n", "there is no such project"},
      {"[project.a]\nparent = 'b'\n[project.b]\nparent = 'a'\n",
       "is a part of itself"},
      {"[project.a]\ndevices = 4\n[project.b]\ndevices = 5\nparent = 'a'\n",
       "[project.a] devices = 4, but its parts are guaranteed 5"},
      {"devices = 4\n[project.a]\ndevices = 3\n[project.b]\ndevices = 3\n",
       "are guaranteed 6 devices, but devices = 4"}};
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(refused(text), HasSubstr(message)) << text;
  }
}

}  // namespace echelon::projects_test
