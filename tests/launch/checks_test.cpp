#include "echelon/launch/checks.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::launch::checks_test {

using testing::HasSubstr;

std::string refused(LaunchOptions options) {
  if (options.command.empty()) options.command = {"true"};
  return error_text<ConfigError>([&] { check(options); });
}

TEST(Check, OptionsOutOfRange) {
  EXPECT_EQ(refused({}), "no error");
  EXPECT_THAT(refused({.num_ranks = 0}), HasSubstr("-n 0"));
  EXPECT_THAT(refused({.num_ranks = -3}), HasSubstr("-n -3"));
  EXPECT_THAT(refused({.num_ranks = 100000}), HasSubstr("1 to 1024"));
  EXPECT_THAT(refused({.num_nodes = 0}), HasSubstr("--nnodes 0"));
  EXPECT_THAT(refused({.num_nodes = 2}), HasSubstr("--master-addr"));
  EXPECT_THAT(refused({.node_rank = 1}), HasSubstr("--nnodes?"));
  EXPECT_THAT(refused({.num_nodes = 2, .node_rank = 2}), HasSubstr("0 to 1"));
  EXPECT_THAT(refused({.num_nodes = 2, .node_rank = -1}), HasSubstr("0 to 1"));
  EXPECT_THAT(refused({.master_port = 70000}), HasSubstr("65535"));
  EXPECT_THAT(refused({.master_port = -1}), HasSubstr("65535"));
  EXPECT_THAT(
      error_text<ConfigError>([] { check(LaunchOptions{}); }),
      HasSubstr("after --"));
}

class FindProgram : public testing::Test {
 protected:
  std::string
  write(const std::string& name, const std::string& text, mode_t mode = 0755) {
    const std::string path = folder_.write(name, text);
    chmod(path.c_str(), mode);
    return path;
  }
  std::string refused(const std::string& program) {
    return error_text<ConfigError>([&] { find_program(program); });
  }
  TempFolder folder_;
};

TEST_F(FindProgram, InPathOrByName) {
  EXPECT_THAT(find_program("sh"), HasSubstr("/sh"));
  const std::string script = write("ok", "#!/bin/sh\n");
  EXPECT_EQ(find_program(script), script);
}

TEST_F(FindProgram, Missing) {
  EXPECT_THAT(refused("no-such-program"), HasSubstr("in PATH"));
  EXPECT_THAT(refused(folder_.path("none")), HasSubstr("No such file"));
}

TEST_F(FindProgram, NotAProgram) {
  EXPECT_THAT(refused(folder_.path()), HasSubstr("folder"));
  EXPECT_THAT(
      refused(write("plain", "#!/bin/sh\n", 0644)), HasSubstr("chmod +x"));
  EXPECT_THAT(refused(write("empty", "")), HasSubstr("empty"));
}

TEST_F(FindProgram, MissingInterpreter) {
  EXPECT_THAT(
      refused(write("a", "#!/no/such/python3 -u\n")),
      HasSubstr("\"/no/such/python3\""));
  EXPECT_THAT(
      refused(write("b", "#!/bin/sh\r\nls\r\n")), HasSubstr("dos2unix"));
}

}  // namespace echelon::launch::checks_test
