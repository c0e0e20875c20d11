// Ranks that do the same at the same time, found before anything runs.
//
// Each rank starts with a colour for what it computes and how fast. Refinement
// then splits the colours until nothing changes: two ranks keep the same colour
// only if their groups along every axis, and their neighbours in the pipeline,
// also have the same colours. A simulated rank waits for nothing but groups and
// neighbours, so ranks of one colour do the same at the same time, and
// simulating one of each is enough.
//
// Source: equitable partitions; McKay, "Practical graph isomorphism", 1981.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/layout/mesh.h"

namespace echelon::simulator {

/// A set of axes: one bit each, by the number of the Axis.
using AxisMask = uint8_t;
constexpr AxisMask mask_of(Axis axis) {
  return static_cast<AxisMask>(1u << static_cast<unsigned>(axis));
}
/// The axes of the mask, in the order of kAxes.
std::vector<Axis> axes_of(AxisMask mask);

struct RankClass {
  int64_t representative = 0;  // its first rank
  int64_t ranks = 0;
  int64_t stage_rank = 0;       // coordinate along pp
  std::vector<int32_t> groups;  // by axes, an index into groups; -1: none
  /// The classes of the ranks that differ in the coordinate along pp alone, by
  /// that coordinate.
  std::vector<int32_t> neighbours;
};

/// Groups of ranks whose members are of the same classes.
struct GroupClass {
  AxisMask axes = 0;
  int64_t representative = 0;    // its first rank's number
  std::vector<int32_t> members;  // distinct classes, ascending
};

struct RankClasses {
  std::vector<int32_t> class_of;  // by rank
  std::vector<RankClass> classes;
  std::vector<GroupClass> groups;
  std::vector<AxisMask> axes;  // indexed like RankClass::groups
};

struct RankColours {
  std::vector<AxisMask> axes;     // along which ranks wait for each other
  std::vector<uint64_t> of_rank;  // the initial colours
  /// The coordinates along pp that each coordinate exchanges messages with.
  std::vector<std::vector<int64_t>> pipeline;
  /// Coordinates along pp of the members of groups of pp, if `axes` has it.
  std::vector<int64_t> ends;
};

/// With `symmetry` off every rank is a class of its own. 100,000 ranks take
/// about a tenth of a second, more when a difference has to travel along a long
/// pipeline.
RankClasses
find_classes(const Mesh& mesh, const RankColours& colours, bool symmetry);

}  // namespace echelon::simulator
