// Passes through small networks, as something that a processor computes for a
// while.
#pragma once

#include <cstdint>
#include <functional>

namespace echelon {

/// Forwards and backwards of so many images of 8 x 8 through two convolutions,
/// or of so many rows of 64 through eight products; of 32, half a millisecond
/// on a core of today. The network and its input are made now.
std::function<void()> convolutions_pass(int64_t samples);
std::function<void()> products_pass(int64_t samples);

}  // namespace echelon
