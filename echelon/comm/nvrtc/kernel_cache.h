// Compiled GPU kernels on disk, so that later processes need not compile them.
//
// An entry is a file whose name is the hash of its recipe. It also has that
// hash and a checksum inside of it. Files are code: one that another user owns
// or may write is not read.
#pragma once

#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "echelon/comm/nvrtc/kernel_compiler.h"

namespace echelon::nvrtc {

class KernelCache {
 public:
  using Say = std::function<void(const std::string&)>;

  /// `folder` is made when an entry is first written; with an empty one nothing
  /// is kept. `say` gets one warning when entries cannot be written.
  KernelCache(std::filesystem::path folder, Say say);

  /// Loads the kernels of a recipe: gives `load` the entry's code, or else what
  /// `compile` returns. `load` returns whether the driver takes the code. Code
  /// that it takes is kept. An entry that it does not take is made anew.
  /// Returns false when `load` does not take compiled code either. What the two
  /// throw is passed on.
  ///
  /// Threads and processes may call this at once; several may then compile.
  bool load(
      const KernelRecipe& recipe, const std::function<std::string()>& compile,
      const std::function<bool(const std::string& code)>& load);

  /// Where the entry of a recipe is.
  std::filesystem::path path_of(const KernelRecipe& recipe) const;

 private:
  std::optional<std::string> find(const KernelRecipe& recipe) const;
  void keep(const KernelRecipe& recipe, std::string_view code);

  std::filesystem::path folder_;
  Say say_;
  std::once_flag said_;
};

/// The folder of the user's kernels, in cache_folder(); empty without a home.
std::filesystem::path kernel_cache_folder();

}  // namespace echelon::nvrtc
