// Every configuration in wrong/ is refused by the real program with the message
// next to it, before any rank starts. A configuration may open with
//   # arguments: -n 4        what else the command line has
//   # exit code: 3           2 when it does not say
//
// ECHELON_UPDATE_EXPECTED=1 writes the messages anew; read them before you
// commit them.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>

#include "echelon/checkpoint/format/safetensors.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon::wrong_test {

namespace fs = std::filesystem;

const fs::path kWrong = source_path("tests/config/wrong");

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kWrong)) {
    if (entry.path().extension() == ".toml") {
      names.push_back(entry.path().stem());
    }
  }
  std::ranges::sort(names);
  return names;
}

// A safetensors file from parts, which need not be right.
std::string raw_safetensors(const std::string& header, size_t data_bytes) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    text[i] = static_cast<char>(header.size() >> (8 * i) & 255);
  }
  return text + header + std::string(data_bytes, '\0');
}

struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
};

void write_tensors(
    const std::string& path, const std::vector<Tensor>& tensors) {
  static const std::vector<std::byte> zeros(1 << 20);
  std::vector<safetensors::TensorBytes> list;
  for (const auto& tensor : tensors) {
    uint64_t bytes = safetensors::dtype_bytes(tensor.dtype);
    for (int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    list.push_back(
        {tensor.name, tensor.dtype, tensor.shape,
         std::span(zeros).first(bytes)});
  }
  safetensors::write(path, list);
}

// simple_cnn on the digits.
std::vector<Tensor> weights() {
  return {{"conv1.weight", "F32", {16, 1, 3, 3}},  {"conv1.bias", "F32", {16}},
          {"conv2.weight", "F32", {32, 16, 3, 3}}, {"conv2.bias", "F32", {32}},
          {"fc.weight", "F32", {10, 128}},         {"fc.bias", "F32", {10}}};
}

// Makes the files that the configurations name.
void make_files(const TempFolder& folder) {
  folder.write("taken", "a file\n");
  folder.write("runs/done/config.toml", "");
  folder.write("runs/mine/notes.txt", "mine\n");
  folder.make_folder("empty");
  folder.write("photos/cats/1.jpg", "");
  folder.write("photos/dogs/1.jpg", "");
  folder.write("strange/owls/1.jpg", "");
  folder.write("gap/cats/1.jpg", "");
  folder.write("gap/dogs/readme.txt", "");

  const auto file = [&](const std::string& name) {
    return folder.path(name + ".safetensors");
  };
  write_tensors(file("inputs_only"), {{"inputs", "F32", {8, 4}}});
  write_tensors(
      file("lengths"),
      {{"inputs", "F32", {8, 1, 8, 8}}, {"targets", "I64", {7}}});
  write_tensors(
      file("float_targets"),
      {{"inputs", "F32", {8, 1, 8, 8}}, {"targets", "F32", {8}}});
  write_tensors(
      file("vectors"), {{"inputs", "F32", {8, 20}}, {"targets", "I64", {8}}});
  write_tensors(file("weights"), weights());
  const std::string whole = read_file(file("weights"));
  folder.write("truncated.safetensors", whole.substr(0, whole.size() - 100));

  auto renamed = weights();
  renamed[0].name = "conv_1.weight";
  renamed.push_back({"extra.bias", "F32", {3}});
  write_tensors(file("weights_names"), renamed);
  auto reshaped = weights();
  reshaped[4].shape = {10, 64};
  write_tensors(file("weights_shape"), reshaped);
  auto retyped = weights();
  for (auto& tensor : retyped) tensor.dtype = "F64";
  write_tensors(file("weights_dtype"), retyped);

  folder.write("not_json.safetensors", raw_safetensors("{\"a\": [1, 2}", 16));
  folder.write("long_header.safetensors", std::string(7, '\xff') + "\x7f{}");
  folder.write(
      "overlap.safetensors",
      raw_safetensors(
          "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
          "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
          12));
  folder.write(
      "twice.safetensors",
      raw_safetensors(
          "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
          "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
          16));
}

struct Outcome {
  int exit_code = -1;
  std::string message;
  double seconds = 0;
};

// Runs `echelon train NAME.toml …` in the current folder.
Outcome check(const std::string& name, const std::string& arguments) {
  const std::string command = program("echelon") + " train " + name + ".toml " +
                              arguments + " 2>&1 >/dev/null";
  const auto begin = std::chrono::steady_clock::now();
  FILE* pipe = ::popen(command.c_str(), "r");
  Outcome outcome;
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    outcome.message.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  outcome.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return outcome;
}

// The rest of the line behind `key` in the file's opening comments.
std::string setting(const std::string& text, const std::string& key) {
  const size_t begin = text.find("# " + key + ": ");
  if (begin == std::string::npos) return "";
  const size_t value = begin + key.size() + 4;
  return text.substr(value, text.find('\n', value) - value);
}

class WrongConfiguration : public testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() {
    folder_.emplace();
    before_ = fs::current_path();
    fs::current_path(folder_->path());
    ::setenv("ECHELON_CACHE", folder_->path("cache").c_str(), 1);
    make_files(*folder_);
  }
  static void TearDownTestSuite() {
    fs::current_path(before_);
    folder_.reset();
    std::cout << "slowest: " << slowest_ << " in " << slowest_seconds_ * 1000
              << " ms\n";
  }

  static inline std::optional<TempFolder> folder_;
  static inline fs::path before_;
  static inline std::string slowest_;
  static inline double slowest_seconds_ = 0;
};

TEST_P(WrongConfiguration, IsRefusedWithItsMessage) {
  const std::string name = GetParam();
  const std::string text = read_file(kWrong / (name + ".toml"));
  folder_->write(name + ".toml", text);
  const Outcome outcome = check(name, setting(text, "arguments"));
  if (outcome.seconds > slowest_seconds_) {
    slowest_ = name;
    slowest_seconds_ = outcome.seconds;
  }
  const fs::path expected = kWrong / (name + ".expected");
  if (std::getenv("ECHELON_UPDATE_EXPECTED") != nullptr) {
    std::ofstream(expected, std::ios::binary) << outcome.message;
  }
  ASSERT_TRUE(fs::exists(expected)) << "there is no " << expected;
  EXPECT_EQ(outcome.message, read_file(expected));
  const std::string code = setting(text, "exit code");
  EXPECT_EQ(outcome.exit_code, code.empty() ? 2 : std::stoi(code));
  EXPECT_FALSE(outcome.message.empty());
  EXPECT_LE(std::ranges::count(outcome.message, '\n'), 5);
  // The folder that a run would have made before its ranks.
  EXPECT_FALSE(fs::exists(folder_->path("runs/run")));
}

INSTANTIATE_TEST_SUITE_P(
    Wrong, WrongConfiguration, testing::ValuesIn(names()),
    [](const auto& info) { return info.param; });

TEST(WrongConfigurations, AreManyAndEachHasItsMessage) {
  EXPECT_GE(names().size(), 60u);
  for (const auto& entry : fs::directory_iterator(kWrong)) {
    if (entry.path().extension() == ".expected") {
      fs::path toml = entry.path();
      EXPECT_TRUE(fs::exists(toml.replace_extension(".toml"))) << entry.path();
    }
  }
}

}  // namespace echelon::wrong_test
