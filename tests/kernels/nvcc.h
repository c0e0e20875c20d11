// CUDA's compiler, where the machine has it.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
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

/// What one multiprocessor has room for: "CUDA C++ Programming Guide", compute
/// capabilities. All have 65,536 registers.
struct Multiprocessor {
  const char* architecture;
  int warps, blocks, shared_kib;
};
inline constexpr Multiprocessor kMultiprocessors[] = {
    {"sm_80", 64, 32, 164},
    {"sm_90", 64, 32, 228},
    {"sm_100", 64, 32, 228},
    {"sm_120", 48, 24, 100},
};

/// The share of a multiprocessor's warps that can run at once, in percent, by
/// blocks of `threads` threads with `shared` bytes each.
inline int
occupancy(const Multiprocessor& on, int threads, int registers, int shared) {
  const auto up = [](int x, int unit) { return (x + unit - 1) / unit * unit; };
  const int warps = up(threads, 32) / 32;
  // Each of a multiprocessor's four parts has a quarter of the warps and of the
  // registers, which a warp gets in units of 256. The system reserves 1 KiB of
  // shared memory for each block.
  const int by_registers = 65536 / up(registers * 32, 256) / 4 * 4 / warps;
  const int by_shared = on.shared_kib * 1024 / up(shared + 1024, 128);
  const int blocks =
      std::min({on.blocks, on.warps / warps, by_registers, by_shared});
  return 100 * blocks * warps / on.warps;
}

/// A line for each kernel of what ptxas says, and what follows for blocks of
/// `threads` threads.
inline void print_resources(
    const Multiprocessor& on, const std::string& said, int threads) {
  static const std::regex kernel(
      "Function properties for (\\w+)[^U]*, (\\d+) bytes spill stores[^U]*"
      "Used (\\d+) registers(?:[^\n]*, (\\d+) bytes smem)?");
  std::sregex_iterator it(said.begin(), said.end(), kernel);
  const std::sregex_iterator end;
  EXPECT_NE(it, end) << "ptxas says nothing of a kernel:\n" << said;
  for (; it != end; ++it) {
    const int registers = std::stoi((*it)[3].str());
    const int shared = (*it)[4].matched ? std::stoi((*it)[4].str()) : 0;
    std::printf(
        "%-7s %-34s %3d registers, %s spilled, %5d bytes shared, "
        "occupancy %3d %%\n",
        on.architecture, (*it)[1].str().c_str(), registers,
        (*it)[2].str().c_str(), shared,
        occupancy(on, threads, registers, shared));
  }
}

/// Compiles a file of echelon/kernels after numbers.cu, as NVRTC does, for each
/// architecture. No kernel may spill registers.
///
///   threads  of a block, at most
inline void
expect_compiles_without_spills(const std::string& file, int threads) {
  const TempFolder folder;
  const std::string both = folder.path("both.cu");
  const auto text = [](const std::string& name) {
    return testing_support::read_file(source_path("echelon/kernels/" + name));
  };
  std::ofstream(both) << text("numbers.cu") << text(file);
  for (const auto& on : kMultiprocessors) {
    testing_support::Command compiler(
        {kNvcc, "-cubin", "-std=c++17", "-Xptxas", "-v",
         std::string("-arch=") + on.architecture, "-o", folder.path("cubin"),
         both});
    EXPECT_EQ(compiler.wait(), 0) << compiler.err();
    EXPECT_THAT(compiler.err(), testing::HasSubstr(" 0 bytes spill stores"));
    EXPECT_THAT(
        compiler.err(),
        testing::Not(testing::ContainsRegex("[1-9][0-9]* bytes spill")));
    print_resources(on, compiler.err(), threads);
  }
}

}  // namespace echelon
