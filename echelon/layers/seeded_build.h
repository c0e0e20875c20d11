// Building layers so that the values they draw depend on nothing else.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <string_view>

namespace echelon {

/// While it lives, random operators of this thread on CPU tensors that are not
/// given a generator draw from one of its own, which begins at the seed and
/// the layer's name as torch's begins at torch::manual_seed. The default
/// generator is neither read nor moved: other threads, which may be ranks that
/// build their layers or draw their samples, have no say.
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
