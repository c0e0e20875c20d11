#include <gmock/gmock.h>

#include "echelon/config/section.h"
#include "echelon/schedule/options.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::pipeline_layout_test {

using testing::HasSubstr;

PipelineLayout read(const std::string& text) {
  auto document = config::Document::parse("[layout]\n" + text, "f.toml");
  auto section = document.section("layout", "degrees");
  PipelineLayout options;
  bind(section, options);
  document.finish();
  return options;
}

TEST(PipelineLayout, IsRead) {
  const auto options = read(
      "microbatches = 8\nschedule = \"zb-v\"\nstages_per_rank = 2\n"
      "schedule_file = \"s.csv\"\n");
  EXPECT_EQ(options.microbatches, 8);
  EXPECT_EQ(options.schedule, ScheduleKind::zb_v);
  EXPECT_EQ(options.stages_per_rank, 2);
  EXPECT_EQ(options.schedule_file, "s.csv");
  EXPECT_THAT(
      error_text([] { read("schedule = \"1f1\"\n"); }),
      HasSubstr("did you mean \"1f1b\"?"));
  EXPECT_THAT(
      error_text([] { read("microbatches = -1\n"); }), HasSubstr("at least 0"));
}

TEST(PipelineLayout, MakesASchedule) {
  EXPECT_EQ(
      make_schedule(PipelineLayout{}, 3),
      make_schedule({ScheduleKind::one_f_one_b, 3, 12, 0}));
  const PipelineLayout mine{
      .microbatches = 7,
      .schedule = ScheduleKind::interleaved,
      .stages_per_rank = 3};
  EXPECT_EQ(
      make_schedule(mine, 2),
      make_schedule({ScheduleKind::interleaved, 2, 7, 3}));
  for (const ScheduleKind kind : kScheduleKinds) {
    EXPECT_NO_THROW(make_schedule(PipelineLayout{.schedule = kind}, 4))
        << to_string(kind);
  }
  EXPECT_THAT(
      error_text<ConfigError>([] {
        make_schedule(PipelineLayout{.microbatches = int64_t{1} << 40}, 2);
      }),
      HasSubstr("microbatches"));
}

TEST(PipelineLayout, TakesAFile) {
  const TempFolder folder;
  PipelineLayout options{
      .schedule_file =
          folder.write("s.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")};
  const auto schedule = make_schedule(options, 2);
  EXPECT_EQ(schedule.num_microbatches, 2);
  EXPECT_EQ(schedule.name, options.schedule_file);

  const auto error = [&](int64_t ranks) {
    return error_text<ConfigError>([&] { make_schedule(options, ranks); });
  };
  EXPECT_THAT(
      error(3),
      HasSubstr("has 2 rows, one for each rank, but pp = 3; set pp to 2"));
  options.microbatches = 4;
  EXPECT_THAT(error(2), HasSubstr("2 microbatches, but microbatches = 4"));
  options.microbatches = 2;
  options.stages_per_rank = 2;
  EXPECT_THAT(error(2), HasSubstr("1 stage on rank 0, but stages_per_rank"));
  options.stages_per_rank = 1;
  EXPECT_EQ(error(2), "no error");
  folder.write("s.csv", "0F0,0B0\n1F0\n");
  EXPECT_THAT(error(2), HasSubstr("rank 1 lacks 1B0"));
}

}  // namespace echelon::pipeline_layout_test
