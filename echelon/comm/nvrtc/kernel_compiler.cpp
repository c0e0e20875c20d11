#include "echelon/comm/nvrtc/kernel_compiler.h"

#include <dlfcn.h>

#include <cstddef>
#include <memory>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::nvrtc {
namespace {

// Of nvrtcResult.
constexpr int kOutOfMemory = 1;
constexpr int kInvalidOption = 5;

constexpr const char* kInstall =
    "LibTorch needs all the CUDA wheels it asks for: install them with \"pip "
    "install torch==2.11.0\"";

// The first lines of a compiler's log.
std::string beginning_of(const std::string& log) {
  constexpr size_t kLines = 4;
  constexpr size_t kBytes = 600;
  size_t end = 0;
  for (size_t line = 0; line < kLines && end != std::string::npos; ++line) {
    end = log.find('\n', end == 0 ? 0 : end + 1);
  }
  auto text = log.substr(0, std::min(end, kBytes));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\0')) {
    text.pop_back();
  }
  return text;
}

}  // namespace

KernelCompiler::KernelCompiler(const char* library)
    : library_name_(library), library_(dlopen(library, RTLD_NOW)) {
  if (library_ == nullptr) {
    const char* reason = dlerror();
    throw KernelsUnavailable(
        format(
            "NVRTC, CUDA's compiler, is missing: cannot load {} ({})", library,
            reason != nullptr ? reason : "no reason given"),
        kInstall);
  }
  find(get_version_, "nvrtcVersion");
  find(error_string_, "nvrtcGetErrorString");
  find(create_, "nvrtcCreateProgram");
  find(destroy_, "nvrtcDestroyProgram");
  find(compile_, "nvrtcCompileProgram");
  find(log_size_, "nvrtcGetProgramLogSize");
  find(log_, "nvrtcGetProgramLog");
  find(binary_size_, "nvrtcGetCUBINSize");
  find(binary_, "nvrtcGetCUBIN");
  int major = 0, minor = 0;
  get_version_(&major, &minor);
  version_ = format("NVRTC {}.{}", major, minor);
}

template <class Function>
void KernelCompiler::find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library_, name));
  if (function == nullptr) {
    throw KernelsUnavailable(
        format("{} lacks NVRTC's function {}", library_name_, name), kInstall);
  }
}

std::string KernelCompiler::compile(const KernelRecipe& recipe) const {
  std::vector<std::string> all = {"--gpu-architecture=" + recipe.architecture};
  all.insert(all.end(), recipe.options.begin(), recipe.options.end());
  std::vector<const char*> options;
  for (const auto& option : all) options.push_back(option.c_str());

  const std::string source(recipe.source);
  Program program = nullptr;
  int failed =
      create_(&program, source.c_str(), "kernel.cu", 0, nullptr, nullptr);
  const auto destroy = [this](Program* one) {
    if (*one != nullptr) destroy_(one);
  };
  const std::unique_ptr<Program, decltype(destroy)> owner(&program, destroy);
  if (failed == 0) {
    failed =
        compile_(program, static_cast<int>(options.size()), options.data());
  }
  size_t size = 0;
  std::string code;
  if (failed == 0) failed = binary_size_(program, &size);
  if (failed == 0) {
    code.resize(size);
    failed = binary_(program, code.data());
  }
  if (failed == 0 && !code.empty()) return code;

  if (failed == kOutOfMemory) {
    throw Error(format(
        "{} ran out of memory while it compiled a kernel for {}; give the host "
        "more memory, or start fewer processes on it",
        version_, recipe.architecture));
  }
  std::string log;
  if (program != nullptr && log_size_(program, &size) == 0) {
    log.resize(size);
    log_(program, log.data());
  }
  throw KernelsUnavailable(
      format(
          "{} cannot compile for {} ({}): {}", version_, recipe.architecture,
          failed != 0 ? error_string_(failed) : "there is no code",
          beginning_of(log)),
      failed == kInvalidOption
          ? "this NVRTC does not know the GPU: use a LibTorch that is built "
            "for it"
          : "report this text as an error of Echelon");
}

}  // namespace echelon::nvrtc
