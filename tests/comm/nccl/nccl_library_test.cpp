// Loads libechelon_nccl.so where LibTorch's CUDA libraries are, GPU or not: the
// loader then resolves every symbol that the linker left open.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include "echelon/comm/nccl/nccl_plugin.h"
#include "tests/support/places.h"

namespace echelon::nccl_library_test {

namespace fs = std::filesystem;

fs::path cache_folder() {
  if (const char* cache = std::getenv("ECHELON_CACHE")) return cache;
  if (const char* cache = std::getenv("XDG_CACHE_HOME")) {
    return fs::path(cache) / "echelon";
  }
  const char* home = std::getenv("HOME");
  return fs::path(home != nullptr ? home : "/") / ".cache" / "echelon";
}

/// The CUDA libraries of the virtual environment of setup/extras.sh, by name.
/// Those of another version lack symbols that LibTorch's CUDA libraries need.
std::map<std::string, fs::path> cuda_libraries() {
  std::map<std::string, fs::path> found;
  const auto lib = cache_folder() / "pytorch-" TORCH_VERSION / "lib";
  if (!fs::exists(lib)) return found;
  for (const auto& python : fs::directory_iterator(lib)) {
    const auto nvidia = python.path() / "site-packages" / "nvidia";
    if (!fs::exists(nvidia)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(nvidia)) {
      found.emplace(entry.path().filename(), entry.path());
    }
  }
  return found;
}

TEST(NcclLibrary, LoadsWhereAllCudaLibrariesAre) {
  const auto libraries = cuda_libraries();
  if (libraries.empty()) {
    GTEST_SKIP() << "Python's PyTorch " TORCH_VERSION
                    " is not set up (make extras)";
  }
  void* library = nullptr;
  std::string reason;
  // The loader names one missing library at a time.
  for (size_t i = 0; i < libraries.size() && library == nullptr; ++i) {
    library = dlopen(
        program("../lib/libechelon_nccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reason = dlerror();
      const auto missing = libraries.find(reason.substr(0, reason.find(':')));
      ASSERT_NE(missing, libraries.end()) << reason;
      ASSERT_NE(
          dlopen(missing->second.c_str(), RTLD_NOW | RTLD_GLOBAL), nullptr)
          << dlerror();
    }
  }
  ASSERT_NE(library, nullptr) << reason;
  using Entry = const nccl::Plugin* (*)();
  const auto entry =
      reinterpret_cast<Entry>(dlsym(library, "echelon_nccl_plugin"));
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry()->version, nccl::Plugin::kVersion);
  EXPECT_GE(entry()->device_count(), 0);
}

}  // namespace echelon::nccl_library_test
