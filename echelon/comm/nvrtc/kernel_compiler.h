// NVRTC, CUDA's compiler as a library, which is opened when kernels are first
// wanted. Needs neither CUDA's headers nor a GPU.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::nvrtc {

/// All that decides the machine code of kernels.
struct KernelRecipe {
  std::string_view source;           // CUDA C++
  std::string architecture;          // of the GPU: "sm_90"
  std::string compiler;              // name and version
  std::vector<std::string> options;  // for the compiler
};

/// Kernels cannot be compiled or loaded here. The text has the reason and, on
/// a line of its own, the way out.
class KernelsUnavailable : public std::runtime_error {
 public:
  KernelsUnavailable(const std::string& reason, const std::string& way_out)
      : std::runtime_error(reason + "\n" + way_out) {}
};

class KernelCompiler {
 public:
  /// Opens NVRTC's functions in `library`, or in a library that it links.
  /// Throws KernelsUnavailable.
  explicit KernelCompiler(const char* library);

  /// "NVRTC 13.0".
  const std::string& version() const { return version_; }

  /// The machine code (a cubin). Throws KernelsUnavailable with the first lines
  /// of the compiler's log, and Error when the compiler runs out of memory.
  std::string compile(const KernelRecipe& recipe) const;

 private:
  using Program = void*;

  template <class Function>
  void find(Function& function, const char* name);

  const char* library_name_;
  void* library_;
  std::string version_;
  int (*get_version_)(int* major, int* minor) = nullptr;
  const char* (*error_string_)(int) = nullptr;
  int (*create_)(
      Program*, const char* source, const char* name, int num_headers,
      const char* const* headers, const char* const* header_names) = nullptr;
  int (*destroy_)(Program*) = nullptr;
  int (*compile_)(Program, int count, const char* const* options) = nullptr;
  int (*log_size_)(Program, size_t*) = nullptr;
  int (*log_)(Program, char*) = nullptr;
  int (*binary_size_)(Program, size_t*) = nullptr;
  int (*binary_)(Program, char*) = nullptr;
};

}  // namespace echelon::nvrtc
