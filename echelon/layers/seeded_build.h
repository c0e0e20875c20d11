// Building layers so that the random values that they draw depend on nothing
// but the seed and the layer's name.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <string_view>

namespace echelon {

/// While it lives, random operators of this thread on CPU tensors that are not
/// given a generator draw from one of its own, seeded by the seed and the
/// layer's name as torch::manual_seed seeds torch's. The default generator is
/// neither read nor advanced. So other threads, which may be ranks that build
/// their layers or draw their samples, have no influence.
class SeededBuild {
 public:
  SeededBuild(uint64_t seed, std::string_view layer);
  ~SeededBuild();
  SeededBuild(const SeededBuild&) = delete;
  SeededBuild& operator=(const SeededBuild&) = delete;

 private:
  at::Generator generator_;
  at::Generator* outer_;  // of a SeededBuild around this one
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace echelon
