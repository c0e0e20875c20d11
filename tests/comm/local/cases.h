// The cases of the local backend that threads and processes share. Each is run
// by every rank and throws std::runtime_error when a value is wrong.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace echelon::local::testing {

using Backend = c10d::Backend;

/// Every operation, dtype and reduction, at sizes around each path's limits,
/// against plain arithmetic on one rank.
void reductions(Backend& backend);
void movements(Backend& backend);
/// Lists of tensors, strided tensors, coalesced forms.
void lists(Backend& backend);
/// Tags out of order, all send before they receive, big ones.
void messages(Backend& backend);
/// Hundreds in flight, waited for in any order, through futures too.
void many_in_flight(Backend& backend);
/// Every kind of disagreement; the group is used after each.
void mismatches(Backend& backend);

}  // namespace echelon::local::testing
