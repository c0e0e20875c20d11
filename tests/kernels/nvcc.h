// CUDA's compiler, where the machine has it.
#pragma once

#include <gmock/gmock.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>

#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace echelon {

inline constexpr const char* kNvcc = "/usr/local/cuda/bin/nvcc";

#define ECHELON_NEED_NVCC() \
  if (!std::filesystem::exists(kNvcc)) GTEST_SKIP() << "no " << kNvcc

/// A line for each kernel of what ptxas says: registers of a thread, shared
/// memory of a block.
inline void
print_resources(const std::string& architecture, const std::string& said) {
  static const std::regex kernel(
      "Function properties for (\\w+)[^U]*Used (\\d+) registers"
      "(?:[^\n]*, (\\d+) bytes smem)?");
  for (std::sregex_iterator it(said.begin(), said.end(), kernel), end;
       it != end; ++it) {
    const std::string shared = (*it)[3].matched ? (*it)[3].str() : "0";
    std::printf(
        "%-8s %-36s %4s registers %6s bytes shared\n", architecture.c_str(),
        (*it)[1].str().c_str(), (*it)[2].str().c_str(), shared.c_str());
  }
}

/// Compiles a file of echelon/kernels after numbers.cu, as NVRTC does, for each
/// architecture. No kernel may spill registers.
inline void expect_compiles_without_spills(const std::string& file) {
  const TempFolder folder;
  const std::string both = folder.path("both.cu");
  const auto text = [](const std::string& name) {
    return testing_support::read_file(source_path("echelon/kernels/" + name));
  };
  std::ofstream(both) << text("numbers.cu") << text(file);
  for (const char* architecture : {"sm_80", "sm_90", "sm_100", "sm_120"}) {
    testing_support::Command compiler(
        {kNvcc, "-cubin", "-std=c++17", "-Xptxas", "-v",
         std::string("-arch=") + architecture, "-o", folder.path("cubin"),
         both});
    EXPECT_EQ(compiler.wait(), 0) << compiler.err();
    EXPECT_THAT(compiler.err(), testing::HasSubstr(" 0 bytes spill stores"));
    EXPECT_THAT(
        compiler.err(),
        testing::Not(testing::ContainsRegex("[1-9][0-9]* bytes spill")));
    print_resources(architecture, compiler.err());
  }
}

}  // namespace echelon
