#include "echelon/layout/layout.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <vector>

#include "echelon/layout/mesh.h"
#include "tests/support/error_text.h"

namespace echelon::layout_test {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Layout, ReadsShortAndLongNames) {
  EXPECT_EQ(parse_layout("dp=2,tp=4"), (Layout{.dp_replicate = 2, .tp = 4}));
  EXPECT_EQ(parse_layout("fsdp=3"), (Layout{.dp_shard = 3}));
  EXPECT_EQ(parse_layout("dp_replicate=2,dp_shard=2,pp=3").num_ranks(), 12);
  EXPECT_EQ(to_string(parse_layout("tp=4,dp=2")), "dp=2,tp=4");
  EXPECT_EQ(to_string(Layout{}), "dp=1");
}

struct Refused {
  const char* layout;
  const char* says;
};

void expect_refused(const std::vector<Refused>& all) {
  for (const Refused& one : all) {
    EXPECT_THAT(
        error_text<ConfigError>([&] { parse_layout(one.layout); }),
        HasSubstr(one.says))
        << one.layout;
  }
}

TEST(Layout, RefusesWhatItCannotRead) {
  expect_refused(
      {{"xp=2", "\"xp=2\""},
       {"", "AXIS=DEGREE"},
       {"dp=0", "1 or more"},
       {"dp=2x", "\"2x\""},
       {"dp=-1", "1 or more"},
       {"dp=99999999999999999999", "whole number"},
       {"dp=2,dp_replicate=2", "twice"},
       {"dp=9223372036854775807,tp=9223372036854775807", "overflows"}});
}

TEST(Layout, SaysWhichDegreeFits) {
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { check_world_size({.dp_replicate = 3, .tp = 4}, 16); }),
      HasSubstr("dp=3 * tp=4 = 12 ranks, but there are 16; dp=4 fits"));
  EXPECT_EQ(
      error_text<ConfigError>([] { check_world_size({.dp_replicate = 4}, 4); }),
      "no error");
}

TEST(Layout, ReadsAndWritesTheOrderOfItsAxes) {
  using enum Axis;
  const Layout layout = parse_layout("dp=2,pp=2,tp=4,order=pp:dp:tp");
  EXPECT_THAT(layout.used_axes(), ElementsAre(pp, dp_replicate, tp));
  EXPECT_EQ(layout.stride(pp), 8);
  EXPECT_EQ(layout.stride(dp_replicate), 4);
  EXPECT_EQ(layout.stride(tp), 1);
  EXPECT_EQ(to_string(layout), "dp=2,pp=2,tp=4,order=pp:dp:tp");
  EXPECT_EQ(parse_layout(to_string(layout)), layout);
  // Axes of degree 1 may be named, and do not count.
  EXPECT_EQ(
      parse_layout("order=cp:dp_replicate:tp,dp=2,tp=2"),
      parse_layout("dp=2,tp=2"));
  EXPECT_EQ(to_string(parse_layout("dp=2,tp=2,order=dp:pp:tp")), "dp=2,tp=2");
  EXPECT_NE(parse_layout("dp=2,tp=2,order=tp:dp"), parse_layout("dp=2,tp=2"));
  EXPECT_TRUE(parse_layout("dp=2,tp=2,order=tp:dp")
                  .same_degrees(parse_layout("dp=2,tp=2")));
}

TEST(Layout, RefusesAnOrderThatIsNone) {
  expect_refused(
      {{"dp=2,tp=2,order=tp:tp", "the axis tp twice"},
       {"fsdp=2,tp=2,order=fsdp:dp_shard:tp", "the axis fsdp twice"},
       {"dp=2,tp=4,order=dp", "leaves out tp, which has 4"},
       {"dp=2,tp=2,order=dp:fdsp",
        "\"fdsp\" is not an axis: dp, fsdp, pp, cp, ep or tp; did you mean "
        "\"fsdp\"?"},
       {"dp=2,order=", "\"\" is not an axis"},
       {"dp=2,tp=2,order=tp-dp", "separated by colons"},
       {"dp=2,order=dp,order=dp", "given twice"}});
  EXPECT_THAT(
      error_text<ConfigError>([] {
        Mesh(Layout{.dp_replicate = 2, .order = {Axis::tp, Axis::tp}});
      }),
      HasSubstr("must have each once"));
}

TEST(Mesh, TensorParallelIsInnermostAndDataParallelOutermost) {
  const Mesh mesh(Layout{.dp_replicate = 2, .tp = 2, .pp = 2});
  EXPECT_THAT(mesh.ranks_along(0, Axis::tp), ElementsAre(0, 1));
  EXPECT_THAT(mesh.ranks_along(0, Axis::pp), ElementsAre(0, 2));
  EXPECT_THAT(mesh.ranks_along(0, Axis::dp_replicate), ElementsAre(0, 4));
  EXPECT_THAT(mesh.ranks_along(5, Axis::dp_replicate), ElementsAre(1, 5));
  EXPECT_EQ(mesh.coordinate(6, Axis::pp), 1);
  EXPECT_EQ(mesh.moved(6, Axis::pp, 0), 4);
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

// Calls visit with a layout in each of the 720 orders of its axes.
template <class Visit>
void in_every_order(Layout layout, const Visit& visit) {
  std::ranges::sort(layout.order);
  do {
    visit(layout);
  } while (std::next_permutation(layout.order.begin(), layout.order.end()));
}

// Four axes with ranks, no two with as many; and all six.
constexpr Layout kFourDegrees = {
    .dp_replicate = 2, .dp_shard = 3, .tp = 5, .pp = 4};
constexpr Layout kAxesOfTwo = {
    .dp_replicate = 2, .dp_shard = 2, .cp = 2, .tp = 2, .pp = 2, .ep = 2};

// Neighbours in rank differ in the last axis of the order, then in the one
// before.
TEST(Mesh, RanksGoThroughTheAxesInTheirOrder) {
  int orders = 0;
  for (const Layout& start : {kFourDegrees, kAxesOfTwo}) {
    in_every_order(start, [&](const Layout& layout) {
      ++orders;
      const Mesh mesh(layout);
      std::array<int64_t, 6> at{};  // in the order's places
      for (int64_t rank = 0; rank < mesh.size(); ++rank) {
        for (size_t place = 0; place < at.size(); ++place) {
          ASSERT_EQ(mesh.coordinate(rank, layout.order[place]), at[place])
              << to_string(layout) << " rank " << rank;
        }
        for (size_t place = at.size(); place-- > 0;) {
          if (++at[place] < layout.degree(layout.order[place])) break;
          at[place] = 0;
        }
      }
    });
  }
  EXPECT_EQ(orders, 2 * 720);
}

TEST(Mesh, InEveryOrderRanksAndCoordinatesAreOneToOne) {
  for (const Layout& start : {kFourDegrees, kAxesOfTwo}) {
    const Mesh usual(start);
    in_every_order(start, [&](const Layout& layout) {
      const Mesh mesh(layout);
      std::vector<int> taken(static_cast<size_t>(mesh.size()), 0);
      for (int64_t rank = 0; rank < mesh.size(); ++rank) {
        const int64_t place = mesh.place(rank);
        ++taken.at(static_cast<size_t>(place));
        for (const Axis axis : kAxes) {
          ASSERT_EQ(mesh.coordinate(rank, axis), usual.coordinate(place, axis))
              << to_string(layout);
          const int64_t last = layout.degree(axis) - 1;
          ASSERT_EQ(
              mesh.place(mesh.moved(rank, axis, last)),
              usual.moved(place, axis, last));
        }
        ASSERT_EQ(mesh.data_index(rank), usual.data_index(place));
      }
      ASSERT_THAT(taken, testing::Each(1)) << to_string(layout);
    });
  }
}

TEST(Mesh, InEveryOrderGroupsPartitionTheWorld) {
  const std::vector<std::vector<Axis>> sets = {
      {Axis::dp_replicate},
      {Axis::dp_shard},
      {Axis::pp},
      {Axis::tp},
      {Axis::dp_replicate, Axis::dp_shard},
      {Axis::pp, Axis::tp}};
  for (const Layout& start : {kFourDegrees, kAxesOfTwo}) {
    in_every_order(start, [&](const Layout& layout) {
      const Mesh mesh(layout);
      for (const auto& axes : sets) {
        std::vector<int> count(static_cast<size_t>(mesh.size()), 0);
        for (const auto& group : mesh.groups_along(axes)) {
          for (size_t i = 0; i < group.size(); ++i) {
            ++count[static_cast<size_t>(group[i])];
            // Groups are in the order of the coordinates.
            ASSERT_EQ(
                mesh.coordinate(group[i], axes.back()),
                static_cast<int64_t>(i) % layout.degree(axes.back()));
            ASSERT_EQ(mesh.ranks_along(group[i], axes), group);
            ASSERT_EQ(mesh.first_along(group[i], axes), group.front());
            for (const Axis axis : kAxes) {
              if (std::ranges::find(axes, axis) != axes.end()) continue;
              ASSERT_EQ(
                  mesh.coordinate(group[i], axis),
                  mesh.coordinate(group.front(), axis));
            }
          }
        }
        ASSERT_THAT(count, testing::Each(1)) << to_string(layout);
      }
      const auto data =
          mesh.ranks_along(0, {Axis::dp_replicate, Axis::dp_shard, Axis::ep});
      for (size_t i = 0; i < data.size(); ++i) {
        ASSERT_EQ(mesh.data_index(data[i]), static_cast<int64_t>(i));
      }
    });
  }
}

TEST(Mesh, SaysWhetherGroupsLieOnOneHost) {
  const Mesh usual(parse_layout("dp=2,pp=2,tp=2"));
  EXPECT_TRUE(usual.within_hosts(Axis::tp, 2));
  EXPECT_FALSE(usual.within_hosts(Axis::pp, 2));
  EXPECT_TRUE(usual.within_hosts(Axis::pp, 4));
  EXPECT_FALSE(usual.within_hosts(Axis::dp_replicate, 4));
  EXPECT_TRUE(usual.within_hosts(Axis::cp, 1));
  const Mesh other(parse_layout("dp=2,pp=2,tp=2,order=tp:dp:pp"));
  EXPECT_FALSE(other.within_hosts(Axis::tp, 4));
  EXPECT_TRUE(other.within_hosts(Axis::tp, 8));
  EXPECT_TRUE(other.within_hosts(Axis::dp_replicate, 4));
  EXPECT_TRUE(other.within_hosts(Axis::pp, 2));
  // The second of four groups of 3 ranks spans two hosts of 4.
  EXPECT_FALSE(Mesh(parse_layout("dp=4,tp=3")).within_hosts(Axis::tp, 4));
}

TEST(Mesh, RanksOfOneModelCopySeeTheSameSamples) {
  const Mesh mesh(Layout{.dp_replicate = 2, .dp_shard = 2, .tp = 2, .pp = 2});
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    for (int other : mesh.ranks_along(rank, {Axis::tp, Axis::pp})) {
      EXPECT_EQ(mesh.data_index(rank), mesh.data_index(other));
    }
  }
  EXPECT_THAT(
      error_text<ConfigError>([&] { mesh.coordinate(16, Axis::tp); }),
      HasSubstr("rank 16 is outside"));
}

}  // namespace echelon::layout_test
