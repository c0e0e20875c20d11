// Hosts are sets of slots of this process, each with a server of its own.
#include "echelon/checkpoint/memory/memory_hosts.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <list>
#include <sstream>

#include "echelon/checkpoint/memory/memory_server.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A host of one rank, which has the half of a column of `rows`.
struct Host {
  explicit Host(const authentication::Key& key)
      : server(std::in_place, slots, "127.0.0.1", key) {}

  WrittenSlot
  write(int64_t step, int64_t rank, int generation = 0, int64_t rows = 6) {
    if (!slot || slot_generation != generation) {
      slot.emplace(slots.path(), static_cast<int>(rank), kept, 0);
      slot_generation = generation;
    }
    std::vector<float> values;
    for (int64_t i = rank * rows / 2; i < (rank + 1) * rows / 2; ++i) {
      values.push_back(static_cast<float>(100 * step + i));
    }
    CheckpointManifest manifest;
    manifest.step = step;
    manifest.ranks = 2;
    manifest.layout = "fsdp=2";
    return slot->write(
        {{.name = "weight",
          .dtype = "F32",
          .shape = {rows},
          .box = {{rank * rows / 2}, {rows / 2}},
          .bytes = std::as_bytes(std::span(values))}},
        manifest, generation);
  }

  MemorySlots slots{1};
  std::optional<MemoryServer> server;
  std::optional<MemorySlot> slot;
  int64_t kept = -1;  // the step that it resumed from
  int slot_generation = -1;
};

std::vector<std::string> describe(const std::vector<Host*>& hosts) {
  std::vector<std::string> all;
  for (const Host* host : hosts) {
    all.push_back(describe_memory(host->slots.path()));
  }
  return all;
}

// What ranks do when they start: the steps that each host then lists.
std::vector<int64_t> list(const std::vector<Host*>& hosts) {
  const auto descriptions = describe(hosts);
  std::list<CommonCheckpoints> common;
  std::vector<std::string> found;
  for (const Host* host : hosts) {
    common.emplace_back(host->slots.path(), descriptions);
    found.push_back(common.back().found());
  }
  std::vector<int64_t> steps;
  for (size_t i = 0; i < hosts.size(); ++i) {
    common.front().list(found);
    common.pop_front();
    std::vector<int64_t> here;
    for (const auto& place : checkpoints_in_memory(hosts[i]->slots.path())) {
      here.push_back(place.step);
    }
    if (i > 0) {
      EXPECT_EQ(here, steps);
    }
    steps = here;
  }
  return steps;
}

void send(
    const Host& from, const std::vector<Host*>& hosts, size_t own,
    const WrittenSlot& slot) {
  SlotSender(from.slots.path(), describe(hosts), own).send(slot);
}

// Reads the newest checkpoint that the host has listed.
void expect_whole(const Host& host, int64_t rows = 6) {
  const auto place = checkpoints_in_memory(host.slots.path()).at(0);
  CheckpointReader reader(
      place.path.string(), 0, remote_slots(host.slots.path()));
  const SavedTensor* weight = reader.manifest().find("weight");
  ASSERT_NE(weight, nullptr);
  std::vector<float> values(static_cast<size_t>(rows));
  reader.read(
      *weight, whole_box({rows}),
      std::as_writable_bytes(std::span(values)).data());
  for (int64_t i = 0; i < rows; ++i) {
    ASSERT_EQ(
        values[static_cast<size_t>(i)],
        static_cast<float>(100 * place.step + i));
  }
}

// Encrypted or not.
class MemoryHosts : public testing::TestWithParam<bool> {
 protected:
  static authentication::Key make_key() {
    auto key = authentication::Key::random();
    key.set_encrypts(GetParam());
    return key;
  }
  const authentication::Key key_ = make_key();
  Host a_{key_};
  Host b_{key_};
  const std::vector<Host*> both_{&a_, &b_};
};

TEST_P(MemoryHosts, EachReadsWhatTheOtherHas) {
  a_.write(7, 0);
  EXPECT_THAT(list(both_), IsEmpty());  // b has not come so far
  b_.write(7, 1);
  a_.write(8, 0);
  EXPECT_THAT(list(both_), ElementsAre(7));
  expect_whole(a_);
  expect_whole(b_);
}

// Many blocks, whose pieces come one by one.
TEST_P(MemoryHosts, LargeFilesComeWhole) {
  constexpr int64_t kRows = 5'000'000;
  a_.write(3, 0, 0, kRows);
  b_.write(3, 1, 0, kRows);
  EXPECT_THAT(list(both_), ElementsAre(3));
  expect_whole(a_, kRows);
}

TEST_P(MemoryHosts, ALostHostLeavesItsCopyBehind) {
  for (const int64_t step : {7, 8}) {
    const auto of_a = a_.write(step, 0);
    const auto of_b = b_.write(step, 1);
    send(a_, both_, 0, of_a);
    send(b_, both_, 1, of_b);
  }
  b_.write(9, 1);  // not sent
  b_.server.reset();
  EXPECT_THAT(list({&a_}), ElementsAre(8, 7));
  expect_whole(a_);
}

// Its copies are from before the rest went on, and nobody goes back to them.
TEST_P(MemoryHosts, AHostThatComesBackBringsNothingThatIsOver) {
  for (const int64_t step : {7, 8}) {
    const auto of_a = a_.write(step, 0);
    const auto of_b = b_.write(step, 1);
    send(a_, both_, 0, of_a);
    if (step == 7) send(b_, both_, 1, of_b);
  }
  // b had not sent step 8, and a went on without it.
  go_on_from(a_.slots.path(), 1, 7);
  EXPECT_THAT(list(both_), ElementsAre(7));
  // What the job does from there on counts.
  a_.write(8, 0, 1);
  b_.write(8, 1, 1);
  go_on_from(a_.slots.path(), 2, 8);
  EXPECT_THAT(list(both_), ElementsAre(8, 7));
}

// The copy that the ranks have resumed from is kept until there is another one,
// whoever is lost meanwhile.
TEST_P(MemoryHosts, CopiesOfAnEarlierGenerationGoWhenTheyAreNotNeeded) {
  Host c(key_);
  for (const int64_t step : {7, 8}) {
    const auto of_a = a_.write(step, 0);
    send(a_, both_, 0, of_a);
    const auto of_b = b_.write(step, 1);
    send(b_, both_, 1, of_b);
  }
  b_.server.reset();
  const std::vector<Host*> now{&a_, &c};
  ASSERT_THAT(list(now), ElementsAre(8, 7));
  a_.kept = 8;
  // Copies of c go to a, beside those of b.
  send(a_, now, 0, a_.write(9, 0, 1));
  send(c, now, 1, c.write(9, 1, 1));
  EXPECT_THAT(list(now), ElementsAre(9, 8));
  send(a_, now, 0, a_.write(10, 0, 1));
  send(c, now, 1, c.write(10, 1, 1));
  EXPECT_THAT(list(now), ElementsAre(10, 9));
  std::ifstream index(a_.slots.begin_copies());
  const std::string text{std::istreambuf_iterator<char>(index), {}};
  EXPECT_THAT(text, Not(HasSubstr(b_.slots.host())));
  EXPECT_THAT(text, HasSubstr(c.slots.host()));
}

TEST_P(MemoryHosts, ACopyThatIsCutOffIsNone) {
  const auto of_a = a_.write(7, 0);
  auto of_b = b_.write(7, 1);
  of_b.record.resize(of_b.record.size() / 2);  // the host dies while it sends
  send(b_, both_, 1, of_b);
  b_.server.reset();
  EXPECT_THAT(list({&a_}), IsEmpty());
}

TEST_P(MemoryHosts, AFlippedBitIsFound) {
  send(a_, both_, 0, a_.write(7, 0));
  const auto of_b = b_.write(7, 1);
  {
    std::fstream file(of_b.file);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  send(b_, both_, 1, of_b);
  b_.server.reset();
  ASSERT_THAT(list({&a_}), ElementsAre(7));
  EXPECT_THAT(
      error_text<CheckpointError>([&] { expect_whole(a_); }),
      HasSubstr("is damaged"));
}

TEST_P(MemoryHosts, AHostThatIsGoneIsNamed) {
  a_.write(7, 0);
  b_.write(7, 1);
  ASSERT_THAT(list(both_), ElementsAre(7));
  b_.server.reset();
  EXPECT_THAT(
      error_text<CheckpointError>([&] { expect_whole(a_); }),
      HasSubstr("the host at 127.0.0.1, port "));
}

int connect_to(const std::string& description) {
  std::istringstream words(description);
  std::string word;
  int port = 0;
  words >> word >> word >> port;
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &place.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(
      connect(fd, reinterpret_cast<const sockaddr*>(&place), sizeof place), 0);
  return fd;
}

TEST_P(MemoryHosts, StrangersGetNothing) {
  a_.write(7, 0);
  const std::string place = describe_memory(a_.slots.path());
  const int fd = connect_to(place);
  const std::string request =
      "record " + a_.slots.host() + " 0 0\n" + std::string(4096, 'x');
  ASSERT_GT(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), 0);
  char answer = 0;
  EXPECT_LE(recv(fd, &answer, 1, 0), 0);
  close(fd);
  // Another job's key.
  Host other(make_key());
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { SlotSender(other.slots.path(), {place}, 0); }),
      HasSubstr("did not prove that it belongs to this job"));
  // Those who say nothing do not keep others out.
  std::vector<int> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connect_to(place));
  b_.write(7, 1);
  EXPECT_THAT(list(both_), ElementsAre(7));
  expect_whole(b_);
  for (const int one : silent) close(one);
}

INSTANTIATE_TEST_SUITE_P(, MemoryHosts, testing::Bool(), [](const auto& info) {
  return info.param ? "Encrypted" : "Plain";
});

}  // namespace
}  // namespace echelon
