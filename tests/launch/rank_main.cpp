// A rank for the launcher's tests; its first argument says what it does.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "echelon/comm/trace/progress.h"
#include "echelon/error.h"
#include "echelon/error_report.h"
#include "echelon/launch/fork_server.h"

namespace {

// Waits for ever, from before main().
const bool kEarlyThread = [] {
  if (std::getenv("ECHELON_TEST_EARLY_THREAD") == nullptr) return false;
  std::thread([] { pause(); }).detach();
  return true;
}();

int number(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : -1;
}

[[noreturn]] void wait_forever() {
  for (;;) pause();
}

void say(const char* text) {
  std::printf("%s\n", text);
  std::fflush(stdout);
}

// Returns when every other rank has sent rank 0 a byte and received one.
void exchange_bytes() {
  const int rank = number("RANK");
  const int size = number("WORLD_SIZE");
  if (rank == 0) {
    const int listener = number("ECHELON_MASTER_FD");
    if (listen(listener, 64) != 0) {
      throw std::runtime_error(std::string("listen: ") + std::strerror(errno));
    }
    int sum = 0;
    int links[64];
    for (int i = 1; i < size; ++i) {
      links[i] = accept(listener, nullptr, nullptr);
      char byte = 0;
      if (read(links[i], &byte, 1) != 1) throw std::runtime_error("read");
      sum += byte;
    }
    const char answer = static_cast<char>(sum);
    for (int i = 1; i < size; ++i) {
      if (write(links[i], &answer, 1) != 1) throw std::runtime_error("write");
    }
    std::printf("sum %d\n", sum);
    return;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(number("MASTER_PORT"));
  inet_pton(AF_INET, std::getenv("MASTER_ADDR"), &address.sin_addr);
  for (;;) {
    const int link = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(link, reinterpret_cast<sockaddr*>(&address), sizeof address) ==
        0) {
      char byte = static_cast<char>(rank);
      if (write(link, &byte, 1) != 1 || read(link, &byte, 1) != 1) {
        throw std::runtime_error("exchange");
      }
      std::printf("sum %d\n", byte);
      return;
    }
    close(link);
    usleep(2000);
  }
}

// Does steps for a while. Then no rank makes progress: `chosen` is in a step
// until it is started again, or does something else that takes 5 s.
int stall(bool chosen, bool hangs) {
  if (number("ECHELON_GENERATION") > 0) return 0;
  echelon::ProgressMark mark(
      std::getenv("ECHELON_PROGRESS"), number("LOCAL_RANK"));
  for (int i = 0; i < 150; ++i) {
    mark.advance();
    usleep(10000);
  }
  if (!chosen) ++*mark.collectives();
  if (hangs) wait_forever();
  if (chosen) mark.pause();
  sleep(5);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  echelon::launch::serve_forks();
  const std::string what = argc > 1 ? argv[1] : "";
  const int rank = number("RANK");
  if (what == "exec") {
    execvp(argv[2], argv + 2);
    return 127;
  }
  const bool chosen = argc > 2 && rank == std::atoi(argv[2]);
  if (what == "throw" || what == "config" || what == "lost" ||
      what == "throw-at-usr1") {
    echelon::install_error_reporter();
  }
  sigset_t usr1;
  sigemptyset(&usr1);
  if (what == "throw-at-usr1") {
    sigaddset(&usr1, SIGUSR1);
    sigprocmask(SIG_BLOCK, &usr1, nullptr);
  }
  if (what == "stall" || what == "saves") return stall(chosen, what == "stall");
  if (what == "meet") {
    exchange_bytes();
    return 0;
  }
  if (what == "listen") {
    if (rank == 0) {
      listen(number("ECHELON_MASTER_FD"), 1);
      say("listening");
    }
    wait_forever();
  }
  if (what == "flood") {
    const std::string line(199, 'x');
    for (int i = 0; i < std::atoi(argv[2]); ++i) {
      std::printf("%s\n", line.c_str());
    }
    std::fprintf(stderr, "the last words\n");
    return 3;
  }
  if (what == "ignore-term") {
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
  }
  say("ready");
  if (!chosen && what == "lost") {
    // This is the error that comm/ throws when a peer is gone: a consequence.
    throw echelon::CommError("rank 1 is gone");
  }
  if (what == "throw-at-usr1") {
    int signal = 0;
    sigwait(&usr1, &signal);
    throw echelon::ConfigError("no rank can go on");
  }
  if (!chosen) wait_forever();
  if (what == "throw" || what == "throw-bare") {
    throw std::runtime_error("batch 7 does not fit");
  }
  if (what == "config") {
    throw echelon::ConfigError("[layout] dp=3, but 4 ranks");
  }
  if (what == "lost") {
    usleep(300000);
    raise(SIGKILL);
  }
  if (what == "segv") raise(SIGSEGV);
  if (what == "kill") raise(SIGKILL);
  return argc > 3 ? std::atoi(argv[3]) : 0;
}
