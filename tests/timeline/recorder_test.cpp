#include "echelon/timeline/recorder.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <memory>

namespace echelon::timeline::recorder_test {

using testing::ElementsAre;
using testing::IsEmpty;

/// Its times are the number of the clock, in thousands, and of the mark.
class CountingClock : public DeviceClock {
 public:
  explicit CountingClock(int64_t& made) : number_(++made) {}
  int64_t mark(int) override { return next_++; }
  int64_t time_ns(int64_t mark) override {
    EXPECT_LT(mark, next_);
    return 1000 * number_ + mark;
  }

 private:
  int64_t number_, next_ = 0;
};

std::vector<std::string> names_of(const std::vector<Span>& spans) {
  std::vector<std::string> names;
  for (const auto& span : spans) {
    names.push_back(span.name + " in " + std::to_string(span.step));
  }
  return names;
}

void record(Recorder& recorder, int64_t step) {
  recorder.begin_step(step);
  const ScopedSpan span(&recorder, "compute", "work", SpanKind::forward);
}

TEST(Recorder, KeepTheFirstStepsAndAnotherOne) {
  Recorder recorder(0, 1, 2);
  recorder.also_record(5);
  for (int64_t step = 0; step < 8; ++step) record(recorder, step);
  EXPECT_THAT(names_of(recorder.take_step(5)), ElementsAre("work in 5"));
  EXPECT_THAT(recorder.take_step(5), IsEmpty());
  // One of the first is given, and kept.
  EXPECT_THAT(names_of(recorder.take_step(2)), ElementsAre("work in 2"));
  EXPECT_THAT(names_of(recorder.take()), ElementsAre("work in 1", "work in 2"));
  // Once it was taken, the same number is no longer recorded.
  record(recorder, 5);
  EXPECT_THAT(recorder.take(), IsEmpty());
  recorder.also_record(-1);
  record(recorder, -1);
  EXPECT_THAT(recorder.take(), IsEmpty());
}

TEST(Recorder, TakeStepsOfADeviceByNewClocks) {
  int64_t clocks = 0;
  Recorder recorder(
      0, 0, 1, [&] { return std::make_unique<CountingClock>(clocks); });
  record(recorder, 0);
  recorder.begin_step(1);
  const Moment early = recorder.now();  // of the host: nothing is recorded
  EXPECT_FALSE(early.mark);
  recorder.also_record(2);
  recorder.begin_step(2);
  const Moment begin = recorder.now();
  ASSERT_TRUE(begin.mark);
  recorder.add({.name = "a"}, begin, recorder.now());
  recorder.begin_step(3);
  const auto taken = recorder.take_step(2);
  ASSERT_THAT(names_of(taken), ElementsAre("a in 2"));
  EXPECT_EQ(taken[0].begin_ns, 1002);
  EXPECT_EQ(taken[0].end_ns, 1003);
  // What is told of it later is dropped; a collective may end late.
  recorder.add({.name = "late"}, begin, begin);
  recorder.also_record(4);
  recorder.begin_step(4);
  const Moment again = recorder.now();
  recorder.add({.name = "b"}, again, recorder.now());
  recorder.begin_step(5);
  const auto next = recorder.take_step(4);
  ASSERT_THAT(names_of(next), ElementsAre("b in 4"));
  EXPECT_EQ(next[0].begin_ns, 2000);
  EXPECT_EQ(clocks, 2);
  const auto first = recorder.take();
  ASSERT_THAT(names_of(first), ElementsAre("work in 0"));
  EXPECT_EQ(first[0].begin_ns, 1000);
  EXPECT_EQ(first[0].end_ns, 1001);
}

// The window has begun again when the step is taken: its marks are read later.
TEST(Recorder, KeepAClockThatIsInUse) {
  int64_t clocks = 0;
  Recorder recorder(
      0, 3, 2, [&] { return std::make_unique<CountingClock>(clocks); });
  recorder.also_record(1);
  record(recorder, 1);
  const Moment early = recorder.now();
  recorder.begin_step(3);
  const Moment begin = recorder.now();
  EXPECT_THAT(names_of(recorder.take_step(1)), ElementsAre("work in 1"));
  recorder.add({.name = "late"}, early, begin);  // of a step that was taken
  recorder.add({.name = "a"}, begin, recorder.now());
  EXPECT_THAT(names_of(recorder.take()), ElementsAre("a in 3"));
  EXPECT_EQ(clocks, 1);
}

TEST(Recorder, TimesPartsOfStepsThatAreNotRecorded) {
  Recorder recorder(0, /*first_step=*/100, /*num_steps=*/1);
  { const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward); }
  EXPECT_TRUE(recorder.take_passes().empty()) << "nobody asked";
  // The host computes for 2 s less than this says, all of it waiting.
  int64_t waited = 0;
  recorder.time_parts(nullptr, [&] { return waited; });
  recorder.begin_step(0);
  const int64_t begin = steady_now_ns();
  { const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward); }
  { const ScopedSpan span(&recorder, "compute", "data wait", SpanKind::data); }
  {
    const ScopedSpan span(&recorder, "compute", "backward", SpanKind::backward);
    waited += 2000000000;
  }
  const auto passes = recorder.take_passes();
  ASSERT_EQ(passes.size(), 2u);
  const int64_t end = steady_now_ns();
  const auto parts = recorder.parts_of(passes, end);
  const double most = static_cast<double>(end - begin) * 1e-9;
  ASSERT_TRUE(parts);
  EXPECT_GE(parts->forward.seconds, 0);
  EXPECT_LE(parts->forward.seconds, most);
  EXPECT_LE(parts->backward.seconds, most - 2);
  EXPECT_EQ(parts->update.seconds, 0);
  EXPECT_LE(begin, parts->forward.begin_ns);
  EXPECT_LE(parts->forward.begin_ns, parts->forward.end_ns);
  EXPECT_LE(parts->forward.end_ns, parts->backward.begin_ns);
  EXPECT_LE(parts->backward.begin_ns, parts->backward.end_ns);
  EXPECT_LE(parts->backward.end_ns, end);
  EXPECT_EQ(parts->update.end_ns, 0);
  EXPECT_TRUE(recorder.take().empty());
  EXPECT_FALSE(recorder.parts_of({}, end));
  // A step that is not read to its end leaves nothing to the next one.
  { const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward); }
  recorder.begin_step(1);
  EXPECT_TRUE(recorder.take_passes().empty());
}

// Marks of a device whose stream comes to each a second after the one before.
class Timer : public DeviceTimer {
 public:
  explicit Timer(int64_t& marks) : marks_(marks) {}
  int64_t mark() override { return marks_++; }
  std::vector<int64_t> take_ns(const std::vector<int64_t>& marks) override {
    std::vector<int64_t> times;
    for (const int64_t mark : marks) {
      times.push_back((mark - marks[0]) * 1000000000);
    }
    return times;
  }

 private:
  int64_t& marks_;
};

TEST(Recorder, TimesPartsOnADevice) {
  Recorder recorder(0, 0, 0);
  int64_t marks = 0;
  recorder.time_parts(
      std::make_unique<Timer>(marks), []() -> int64_t { std::abort(); });
  recorder.begin_step(0);
  {
    const ScopedSpan outer(&recorder, "compute", "all", SpanKind::other);
    const ScopedSpan span(&recorder, "compute", "update", SpanKind::optimizer);
  }
  for (int i = 0; i < 3; ++i) {
    const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward);
  }
  EXPECT_EQ(marks, 8);
  // Mark 7, the last, is where the host saw the step's end.
  const auto parts = recorder.parts_of(recorder.take_passes(), 70000000000);
  ASSERT_TRUE(parts);
  EXPECT_DOUBLE_EQ(parts->forward.seconds, 3);
  EXPECT_EQ(parts->forward.begin_ns, 65000000000);
  EXPECT_EQ(parts->forward.end_ns, 70000000000);
  EXPECT_DOUBLE_EQ(parts->update.seconds, 1);
  EXPECT_EQ(parts->update.begin_ns, 63000000000);
  EXPECT_EQ(parts->update.end_ns, 64000000000);
  EXPECT_EQ(parts->backward.seconds, 0);
}

}  // namespace echelon::timeline::recorder_test
