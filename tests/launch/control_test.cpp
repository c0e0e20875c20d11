#include "echelon/launch/control.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <thread>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::launch::control_test {

std::string own_name() {
  return "echelon-control-test-" + std::to_string(getpid());
}

// Whether somebody asked within a time.
bool serve(
    ControlSocket& socket, std::string& request, const std::string& answer,
    int wait_ms = 10'000) {
  pollfd file{socket.fd(), POLLIN, 0};
  if (poll(&file, 1, wait_ms) != 1) return false;
  bool asked = false;
  socket.serve([&](const std::string& text) {
    asked = true;
    request = text;
    return answer;
  });
  return asked;
}

TEST(Control, ARequestIsAnswered) {
  ControlSocket socket(own_name());
  std::string request, answer;
  std::thread client([&] { answer = ask_job(own_name(), "resize 3"); });
  EXPECT_TRUE(serve(socket, request, "done: 3 ranks"));
  client.join();
  EXPECT_EQ(request, "resize 3");
  EXPECT_EQ(answer, "done: 3 ranks");
}

TEST(Control, NobodyIsThere) {
  EXPECT_EQ(ask_job(own_name(), "status"), "");
}

TEST(Control, ANameHasOneJob) {
  const ControlSocket socket(own_name());
  EXPECT_THAT(
      error_text<ConfigError>([] { ControlSocket second(own_name()); }),
      testing::HasSubstr("Address already in use"));
}

// Both ways: a job takes no request of another user, and a program asks no job
// of another user.
TEST(Control, OtherUsersAreTurnedAway) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  std::optional<ControlSocket> socket(own_name());
  const std::string name = own_name();
  const auto as_nobody = [](const auto& act) {
    const pid_t child = fork();
    if (child == 0) {
      if (setuid(65534) != 0) _exit(2);
      _exit(act() ? 1 : 0);
    }
    return child;
  };
  const auto code = [](pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  std::string request;
  const pid_t client = as_nobody([&] {
    try {
      return !ask_job(name, "stop").empty();
    } catch (const Error&) {
      return false;
    }
  });
  EXPECT_FALSE(serve(*socket, request, "done"));
  EXPECT_EQ(code(client), 0);
  socket.reset();

  const pid_t squatter = as_nobody([&] {
    ControlSocket taken(name);
    std::string text;
    return serve(taken, text, "done");
  });
  usleep(200'000);
  EXPECT_EQ(ask_job(name, "status"), "");
  EXPECT_EQ(code(squatter), 0);
}

// It does not hold the launcher either.
TEST(Control, AnEmptyRequestIsNone) {
  ControlSocket socket(own_name());
  std::thread client(
      [] { EXPECT_THROW((void)ask_job(own_name(), ""), Error); });
  std::string request;
  EXPECT_FALSE(serve(socket, request, "done"));
  client.join();
}

}  // namespace echelon::launch::control_test
