// First values of parameters that depend on the seed and the parameter's name
// alone: not on the layout, the thread count, the device, or the order in which
// a model is built. Any slice of a parameter can be made without the rest, so a
// rank that keeps a shard makes just that.
//
// Element i of a parameter comes from word i of a Philox4x32-10 stream whose
// key is the XXH3 hash of the name, seeded by the seed: the words that
// at::Philox4_32(key, 0, i / 4) gives.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string_view>

#include "echelon/architecture/initial_value.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// The key of a parameter's stream. Fixed: results of old seeds stay.
uint64_t parameter_key(uint64_t seed, std::string_view name);

/// Fills `slice` with elements [first_element, first_element + slice.numel())
/// of the parameter `name`, in row-major order, uniform in (-bound, bound).
///
///   slice   contiguous, any floating dtype, any device; its shape is not read
///
/// Values are made in float64 from 32 random bits each and rounded to the
/// dtype, so a float32 parameter is the rounded float64 one. One core
/// makes a million in 2.5 ms, as torch's own uniform_ does.
void fill_uniform(
    const torch::Tensor& slice, uint64_t seed, std::string_view name,
    int64_t first_element, double bound);

/// The same, normal with mean 0 (Box-Muller on pairs of words; the largest
/// magnitude is 6.8 standard deviations). A million take about 5 ms.
void fill_normal(
    const torch::Tensor& slice, uint64_t seed, std::string_view name,
    int64_t first_element, double standard_deviation);

/// Whichever of the two, or the constant, `initial` says.
void fill_initial(
    const torch::Tensor& slice, uint64_t seed, std::string_view name,
    int64_t first_element, const InitialValue& initial);

/// The same for a part of a parameter: each element is that of the whole one,
/// bit for bit. Nothing else of the whole is made.
///
///   part  contiguous, of shard.local_shape()
void fill_initial(
    const torch::Tensor& part, uint64_t seed, std::string_view name,
    const Shard& shard, const InitialValue& initial);

}  // namespace echelon
