// A library with a program's own model, data and loss, for the command line:
// `[model] library = "libmine.so"`.
//
//   echelon::OwnParts parts(const echelon::Job& job) { … }
//   ECHELON_PLUGIN(parts);
//
// The library is linked with LibTorch and not with Echelon, whose functions it
// takes from the program that loads it: Echelon::plugin in CMake.
#pragma once

#include <torch/version.h>

#include <cstdint>
#include <string>

#include "echelon/job/job.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// What a library was compiled with. The file has it in a section of its own,
/// which is read before anything of the library runs.
struct PluginTag {
  static constexpr uint32_t kForm = 1;
  char mark[16] = "echelon plugin";
  uint32_t form = kForm;
  uint32_t echelon[3] = {0, 1, 0};
  uint32_t torch[3] = {
      TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH};
  /// The compiler's ABI, and std::string's.
  uint32_t abi[2] = {
#ifdef __GXX_ABI_VERSION
      __GXX_ABI_VERSION,
#else
      0,
#endif
#ifdef _GLIBCXX_USE_CXX11_ABI
      _GLIBCXX_USE_CXX11_ABI
#else
      0
#endif
  };
  /// What passes between the two, by size: a version under development changes
  /// without its number.
  uint32_t sizes[6] = {
      sizeof(Job),   sizeof(OwnParts),        sizeof(SampleSpec),
      sizeof(Batch), sizeof(LayerDefinition), sizeof(Metric)};

  bool operator==(const PluginTag&) const = default;
};

/// The parts of the library that job.model.library names; none where it names
/// no library. Each process of a job calls this once.
///
/// Throws ConfigError when the file is no plugin; when it was compiled with
/// another version of Echelon or LibTorch or for another compiler's ABI, in
/// which case nothing in it has run; when it needs a function that this program
/// has not; when it brings a model or a data set and [model] name or [data]
/// name is not "own", or the other way round; and what the library throws.
OwnParts load_plugin(const Job& job);

namespace detail {

inline constexpr const char* kPluginSection = ".echelon.plugin";

/// The tag in the file, which is not run. Throws ConfigError when there is
/// none.
PluginTag read_plugin_tag(const std::string& path);

/// Empty when `theirs` is as `own`; else what differs.
std::string difference(const PluginTag& theirs, const PluginTag& own);

}  // namespace detail
}  // namespace echelon

/// Once in a library, outside of any namespace. `parts`: a function that takes
/// const echelon::Job& and returns echelon::OwnParts.
#define ECHELON_PLUGIN(parts)                                               \
  extern "C" {                                                              \
  extern __attribute__((visibility("default")))                             \
  const echelon::PluginTag echelon_plugin_tag;                              \
  __attribute__((                                                           \
      used, section(".echelon.plugin"))) constinit const echelon::PluginTag \
      echelon_plugin_tag{};                                                 \
  __attribute__((used, visibility("default"))) void                         \
  echelon_plugin_parts(const echelon::Job& job, echelon::OwnParts& own) {   \
    own = parts(job);                                                       \
  }                                                                         \
  }                                                                         \
  static_assert(true)
