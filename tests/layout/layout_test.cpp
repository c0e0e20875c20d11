#include "echelon/layout/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "echelon/layout/mesh.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Layout, ReadsShortAndLongNames) {
  EXPECT_EQ(parse_layout("dp=2,tp=4"),
            (Layout{.dp_replicate = 2, .tp = 4}));
  EXPECT_EQ(parse_layout("fsdp=3"), (Layout{.dp_shard = 3}));
  EXPECT_EQ(parse_layout("dp_replicate=2,dp_shard=2,pp=3").num_ranks(), 12);
  EXPECT_EQ(to_string(parse_layout("tp=4,dp=2")), "dp=2,tp=4");
  EXPECT_EQ(to_string(Layout{}), "dp=1");
}

TEST(Layout, RefusesWhatItCannotRead) {
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("xp=2"); }), HasSubstr("\"xp=2\""));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout(""); }), HasSubstr("AXIS=DEGREE"));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("dp=0"); }), HasSubstr("1 or more"));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("dp=2x"); }), HasSubstr("\"2x\""));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("dp=-1"); }), HasSubstr("1 or more"));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("dp=99999999999999999999"); }),
              HasSubstr("whole number"));
  EXPECT_THAT(error_text<ConfigError>([] { parse_layout("dp=2,dp_replicate=2"); }),
              HasSubstr("twice"));
  EXPECT_THAT(error_text<ConfigError>([] {
                parse_layout("dp=9223372036854775807,tp=9223372036854775807");
              }),
              HasSubstr("overflows"));
}

TEST(Layout, SaysWhichDegreeFits) {
  EXPECT_THAT(
      error_text<ConfigError>([] { check_world_size({.dp_replicate = 3, .tp = 4}, 16); }),
      HasSubstr("dp=3 * tp=4 = 12 ranks, but there are 16; dp=4 fits"));
  EXPECT_EQ(error_text<ConfigError>([] { check_world_size({.dp_replicate = 4}, 4); }),
            "no error");
}

TEST(Mesh, TensorParallelIsInnermostAndDataParallelOutermost) {
  const Mesh mesh(Layout{.dp_replicate = 2, .tp = 2, .pp = 2});
  EXPECT_THAT(mesh.ranks_along(0, Axis::tp), ElementsAre(0, 1));
  EXPECT_THAT(mesh.ranks_along(0, Axis::pp), ElementsAre(0, 2));
  EXPECT_THAT(mesh.ranks_along(0, Axis::dp_replicate), ElementsAre(0, 4));
  EXPECT_THAT(mesh.ranks_along(5, Axis::dp_replicate), ElementsAre(1, 5));
  EXPECT_EQ(mesh.coordinate(6, Axis::pp), 1);
}

TEST(Mesh, GroupsPartitionTheWorld) {
  const Mesh mesh(Layout{.dp_replicate = 3, .dp_shard = 2, .tp = 2});
  for (const auto& axes : std::vector<std::vector<Axis>>{
           {Axis::tp}, {Axis::dp_replicate, Axis::dp_shard}, {}, {Axis::cp}}) {
    std::vector<int> count(12, 0);
    for (const auto& group : mesh.groups_along(axes)) {
      for (int rank : group) {
        ++count[static_cast<size_t>(rank)];
        EXPECT_EQ(mesh.ranks_along(rank, axes), group);
      }
    }
    EXPECT_THAT(count, testing::Each(1));
  }
}

TEST(Mesh, RanksOfOneModelCopySeeTheSameSamples) {
  const Mesh mesh(Layout{.dp_replicate = 2, .dp_shard = 2, .tp = 2, .pp = 2});
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    for (int other : mesh.ranks_along(rank, {Axis::tp, Axis::pp})) {
      EXPECT_EQ(mesh.data_index(rank), mesh.data_index(other));
    }
  }
  EXPECT_THAT(error_text<ConfigError>([&] { mesh.coordinate(16, Axis::tp); }),
              HasSubstr("rank 16 is outside"));
}

}  // namespace
}  // namespace echelon
