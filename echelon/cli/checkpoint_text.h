// What the commands of `echelon checkpoint` share: how they print.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/manifest.h"

namespace echelon::cli {

struct CheckpointArguments {
  std::string path;
  std::string other;
  bool json = false;
  bool all = false;     // show: every tensor; diff: every state
  bool config = false;  // show: the configuration alone
};

// checkpoint.cpp, checkpoint_show.cpp, checkpoint_diff.cpp: exit codes
int list_checkpoints(const CheckpointArguments& arguments);
int verify_checkpoints(const CheckpointArguments& arguments);
int show_checkpoint(const CheckpointArguments& arguments);
int diff_checkpoints(const CheckpointArguments& arguments);

/// Of a path, its manifest.json. Throws CheckpointError.
CheckpointManifest read_manifest(const std::filesystem::path& checkpoint);
/// Of all files but the manifest.
int64_t total_bytes(const CheckpointManifest& manifest);

/// "2026-11-21 10:04:28", of this host's time zone; "?" when unknown.
std::string saved_at(const std::filesystem::path& checkpoint);
/// Four digits that count: "0.3124", "1.3e-05".
std::string number_text(double value);
/// "62 parameters", "1 parameter"
std::string counted(int64_t number, const std::string& what);
/// Control characters of a name replaced: a file does not command a terminal.
std::string plain(std::string text);
/// NaN and infinity, which JSON has not, as texts.
nlohmann::ordered_json json_number(double value);

/// The text between these, where standard output has colours.
std::string bold(const std::string& text);
std::string dim(const std::string& text);
std::string red(const std::string& text);

/// How far a long reading is: one line on a terminal, a line now and then
/// elsewhere, nothing when it is over soon. On standard error.
class ReadingProgress {
 public:
  ReadingProgress(std::string what, int64_t total_bytes);
  ~ReadingProgress();
  void operator()(int64_t done_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  int64_t total_bytes_;
  bool on_terminal_;
  bool shown_ = false;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point next_;
};

}  // namespace echelon::cli
