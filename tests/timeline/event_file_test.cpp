#include "echelon/timeline/event_file.h"

#include <gmock/gmock.h>

#include <cstring>

#include "echelon/error.h"
#include "tests/checkpoint/small_disk.h"
#include "tests/support/temp_folder.h"

namespace echelon::timeline::event_file_test {

using testing::Contains;
using testing::ElementsAre;
using testing::Pair;

StepMetrics step_of(int64_t step) {
  return {
      .step = step,
      .loss = 2.0 / static_cast<double>(step),
      .samples_per_second = 100,
      .tokens_per_second = 4000,
      .step_seconds = 0.5,
      .data_seconds = 0.1,
      .learning_rate = 1e-3,
      .flops_per_second = 8e12,
      .mfu = 0.4,
      .peak_memory_bytes = 3LL << 29};
}

/// The steps of the events of a file, by its frames alone.
std::vector<int> steps_in(const std::string& text) {
  std::vector<int> steps;
  for (size_t at = 0; at + 12 <= text.size();) {
    uint64_t size = 0;
    std::memcpy(&size, text.data() + at, 8);
    // Behind the time (9 bytes) is the step's tag, unless it is the version.
    const auto* event =
        reinterpret_cast<const unsigned char*>(text.data()) + at + 12;
    if (event[9] == 0x10) {
      steps.push_back(
          event[10] < 128 ? event[10] : event[10] - 128 + 128 * event[11]);
    }
    at += 12 + size + 4;
  }
  return steps;
}

class EventFiles : public testing::Test {
 protected:
  std::string only_file() const {
    const auto names = names_in(folder_.path("tb"));
    EXPECT_EQ(names.size(), 1u);
    EXPECT_TRUE(names.at(0).starts_with("events.out.tfevents."));
    return folder_.path("tb/" + names.at(0));
  }
  std::string text() const { return read_file(only_file()); }

  TempFolder folder_;
};

// RFC 3720, appendix B.4.
TEST(Crc32c, HasTheValuesOfItsRfc) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
}

TEST(EventScalars, HaveTorchtitansNamesAndUnits) {
  const auto scalars = scalars_of(step_of(4), 2);
  EXPECT_THAT(scalars, Contains(Pair("loss_metrics/global_avg_loss", 0.5)));
  EXPECT_THAT(scalars, Contains(Pair("throughput(tps)", 2000)));
  EXPECT_THAT(scalars, Contains(Pair("tflops", 4)));
  EXPECT_THAT(scalars, Contains(Pair("mfu(%)", 40)));
  EXPECT_THAT(scalars, Contains(Pair("memory/max_reserved(GiB)", 1.5)));
  EXPECT_THAT(scalars, Contains(Pair("time_metrics/end_to_end(s)", 0.5)));
  EXPECT_THAT(scalars, Contains(Pair("time_metrics/data_loading(s)", 0.1)));
  EXPECT_THAT(scalars, Contains(Pair("time_metrics/data_loading(%)", 20)));
}

// Every file of TensorFlow's begins so: 24 bytes, and the masked CRC of that.
TEST_F(EventFiles, AreFramedAsTensorFlowsAre) {
  { EventFile file(folder_.path("tb"), 1); }
  const std::string whole = text();
  ASSERT_EQ(whole.size(), 12u + 24 + 4);
  EXPECT_EQ(
      whole.substr(0, 12),
      std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22", 12));
  EXPECT_EQ(
      whole.substr(12 + 9, 15),
      "\x1a\x0d"
      "brain.Event:2");
}

TEST_F(EventFiles, GoOnWithoutDoubledSteps) {
  {
    EventFile file(folder_.path("tb"), 1);
    for (int step = 1; step <= 200; ++step) file.append(step_of(step));
  }
  EXPECT_EQ(steps_in(text()).size(), 200u);
  // The run resumes from step 150, and metrics.jsonl has as many.
  std::vector<StepMetrics> steps;
  for (int step = 1; step <= 150; ++step) steps.push_back(step_of(step));
  EventFile file(folder_.path("tb"), 1);
  file.go_on_from(steps, {});
  file.append(step_of(151));
  file.flush();
  const auto found = steps_in(text());
  ASSERT_EQ(found.size(), 151u);
  for (int i = 0; i < 151; ++i) EXPECT_EQ(found[static_cast<size_t>(i)], i + 1);
  file.truncate(3);
  file.append(step_of(4));
  file.flush();
  EXPECT_THAT(steps_in(text()), ElementsAre(1, 2, 3, 4));
}

TEST_F(EventFiles, GetTheStepsOfEarlierProcessesThatTheyLack) {
  EventFile file(folder_.path("tb"), 1);
  file.go_on_from(
      {step_of(1), step_of(2), step_of(3)},
      {{.step = 2, .accuracy = 0.5, .loss = 1}});
  EXPECT_THAT(steps_in(text()), ElementsAre(1, 2, 3, 2));
}

TEST_F(EventFiles, LeaveOutWhatIsBrokenAtTheirEnd) {
  {
    EventFile file(folder_.path("tb"), 1);
    for (int step = 1; step <= 3; ++step) file.append(step_of(step));
  }
  const std::string path = only_file();
  const std::string whole = text();
  std::string broken = whole;
  broken.resize(whole.size() - 7);
  folder_.write("tb/" + names_in(folder_.path("tb")).at(0), broken);
  {
    EventFile file(folder_.path("tb"), 1);
    file.append(step_of(3));
  }
  EXPECT_THAT(steps_in(text()), ElementsAre(1, 2, 3));
  // A byte that has changed.
  broken = whole;
  broken[whole.size() - 30] ^= 1;
  folder_.write("tb/" + names_in(folder_.path("tb")).at(0), broken);
  {
    EventFile file(folder_.path("tb"), 1);
    file.append(step_of(9));
  }
  EXPECT_THAT(steps_in(text()), ElementsAre(1, 2, 9));
}

TEST_F(EventFiles, GetWhatAFullDiskHadNoRoomFor) {
  const std::string disk = folder_.make_folder("disk");
  const int result = in_child([&] {
    if (!mount_disk(disk, "size=64k")) return 77;
    EventFile file(disk + "/tb", 1);
    int step = 0;
    bool full = false;
    while (!full && step < 2000) {
      try {
        file.append(step_of(++step));
        file.flush();
      } catch (const Error& error) {
        full = std::string(error.what()).find("No space") != std::string::npos;
      }
    }
    if (!full) return 1;
    const std::string before = read_file(file.path().string());
    if (steps_in(before).size() != static_cast<size_t>(step) - 1) return 2;
    ::mount("none", disk.c_str(), "tmpfs", MS_REMOUNT, "size=1m");
    file.append(step_of(++step));
    file.flush();
    const auto steps = steps_in(read_file(file.path().string()));
    return steps.size() == static_cast<size_t>(step) ? 0 : 3;
  });
  if (result == 77) GTEST_SKIP() << "needs root's rights, for a small disk";
  EXPECT_EQ(result, 0);
}

}  // namespace echelon::timeline::event_file_test
