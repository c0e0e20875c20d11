// A small checkpoint of two "ranks" that each have half of a matrix. One also
// has a vector and, if asked for, a table of a given size.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/rank_file.h"

namespace echelon {

/// Element i of the matrix "fc.weight" [4, 3], and, negative, of "fc.bias" [5].
inline float small_value(int64_t step, int64_t i) {
  return static_cast<float>(step) + static_cast<float>(i) / 16;
}

inline CheckpointManifest
small_manifest(int64_t step, std::map<std::string, double> metrics = {}) {
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.total_steps = 1000;
  manifest.layout = "dp=1,tp=2";
  manifest.ranks = 2;
  manifest.metrics = std::move(metrics);
  return manifest;
}

inline void write_small_rank(
    const std::filesystem::path& partial, int64_t step, int64_t rank,
    int64_t table_bytes = 0) {
  std::vector<float> weight, bias;
  for (int64_t i = 0; i < 6; ++i) {
    weight.push_back(small_value(step, 6 * rank + i));
  }
  for (int64_t i = 0; i < 5; ++i) bias.push_back(-small_value(step, i));
  std::vector<SliceBytes> slices;
  slices.push_back(
      {.name = "fc.weight",
       .dtype = "F32",
       .shape = {4, 3},
       .box = {{2 * rank, 0}, {2, 3}},
       .bytes = std::as_bytes(std::span(weight))});
  if (rank == 0) {
    slices.push_back(
        {.name = "fc.bias",
         .dtype = "F32",
         .shape = {5},
         .box = {{0}, {5}},
         .bytes = std::as_bytes(std::span(bias))});
  }
  std::vector<uint8_t> table(static_cast<size_t>(rank == 0 ? table_bytes : 0));
  uint32_t word = static_cast<uint32_t>(step);
  for (auto& byte : table) {
    word = word * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(word >> 24);
  }
  if (!table.empty()) {
    slices.push_back(
        {.name = "table",
         .dtype = "U8",
         .shape = {table_bytes},
         .box = {{0}, {table_bytes}},
         .bytes = std::as_bytes(std::span(table))});
  }
  write_rank_file(partial.string(), rank_file_name(rank), slices);
}

/// A complete save, as rank 0 and the other ranks do it.
inline std::filesystem::path save_small(
    const std::filesystem::path& folder, int64_t step,
    std::map<std::string, double> metrics = {}, int64_t table_bytes = 0) {
  const auto partial = begin_checkpoint(folder, step, 4096 + table_bytes);
  for (int64_t rank = 0; rank < 2; ++rank) {
    write_small_rank(partial, step, rank, table_bytes);
  }
  return commit_checkpoint(folder, small_manifest(step, std::move(metrics)), 2);
}

}  // namespace echelon
