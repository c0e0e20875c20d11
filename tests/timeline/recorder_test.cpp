#include "echelon/timeline/recorder.h"

#include <gtest/gtest.h>

namespace echelon::timeline::recorder_test {

TEST(Recorder, TimesPartsOfStepsThatAreNotRecorded) {
  Recorder recorder(0, /*first_step=*/100, /*num_steps=*/1);
  { const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward); }
  EXPECT_TRUE(recorder.take_parts().all.empty()) << "nobody asked";
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
  const auto parts = recorder.take_parts();
  ASSERT_EQ(parts.all.size(), 2u);
  const auto seconds = recorder.seconds_of(parts);
  const double most = static_cast<double>(steady_now_ns() - begin) * 1e-9;
  ASSERT_TRUE(seconds);
  EXPECT_GE(seconds->forward, 0);
  EXPECT_LE(seconds->forward, most);
  EXPECT_LE(seconds->backward, most - 2);
  EXPECT_EQ(seconds->update, 0);
  EXPECT_TRUE(recorder.take().empty());
  EXPECT_FALSE(recorder.seconds_of({}));
  // A step that is not read to its end leaves nothing to the next one.
  { const ScopedSpan span(&recorder, "compute", "forward", SpanKind::forward); }
  recorder.begin_step(1);
  EXPECT_TRUE(recorder.take_parts().all.empty());
}

// Marks of a device whose stream comes to each a second after the one before.
class Timer : public DeviceTimer {
 public:
  explicit Timer(int64_t& marks) : marks_(marks) {}
  int64_t mark() override { return marks_++; }
  int64_t take_ns(int64_t begin, int64_t end) override {
    return (end - begin) * 1000000000;
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
  const auto seconds = recorder.seconds_of(recorder.take_parts());
  ASSERT_TRUE(seconds);
  EXPECT_DOUBLE_EQ(seconds->forward, 3);
  EXPECT_DOUBLE_EQ(seconds->update, 1);
  EXPECT_EQ(seconds->backward, 0);
}

}  // namespace echelon::timeline::recorder_test
