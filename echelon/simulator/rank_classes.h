// Ranks that do the same at the same time, found before anything runs.
//
// Ranks begin with a colour: what they compute, and how fast. Then colours are
// split: two ranks keep the same one only if their groups along every axis, and
// their neighbours in the pipeline, have the same colours too; until no colour
// splits any more. A simulation waits for nothing but groups and neighbours, so
// ranks of one colour then do the same at the same time, and one of each is
// enough.
//
// Source: equitable partitions; McKay, "Practical graph isomorphism", 1981.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/simulator/rank_grid.h"

namespace echelon::simulator {

struct RankClass {
  int64_t representative = 0;  // its first rank
  int64_t ranks = 0;
  int64_t stage_rank = 0;           // coordinate along pp
  std::vector<int32_t> groups;      // by axes, an index into groups; -1: none
  std::vector<int32_t> neighbours;  // by coordinate along pp: the class of the
                                    // rank that differs in it alone
};

/// Groups of ranks whose members are of the same classes.
struct GroupClass {
  AxisMask axes = 0;
  int64_t representative = 0;    // its first rank's number
  std::vector<int32_t> members;  // classes, each once, ascending
};

struct RankClasses {
  std::vector<int32_t> class_of;  // by rank
  std::vector<RankClass> classes;
  std::vector<GroupClass> groups;
  std::vector<AxisMask> axes;  // that RankClass::groups counts by
};

struct RankColours {
  std::vector<AxisMask> axes;     // along which ranks wait for each other
  std::vector<uint64_t> of_rank;  // what is different from the beginning
  /// By coordinate along pp, the others it sends to or receives from.
  std::vector<std::vector<int64_t>> pipeline;
  /// Coordinates along pp: who meets in groups of pp, when `axes` has it.
  std::vector<int64_t> ends;
};

/// `symmetry` off: every rank is a class of its own. 100,000 ranks take about a
/// tenth of a second, more when a difference has to travel along a long
/// pipeline.
RankClasses
find_classes(const RankGrid& grid, const RankColours& colours, bool symmetry);

}  // namespace echelon::simulator
