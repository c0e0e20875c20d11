#include <algorithm>
#include <cctype>
#include <regex>

#include "benchmarks/published/row_cluster.h"
#include "benchmarks/published/row_strategy.h"

namespace echelon {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

struct Rule {
  const char* word;  // in source, table, notes or file
  const char* framework;
};

// In this order; the first word that is there decides.
const Rule kRules[] = {
    {"llm-foundry", "fsdp"},
    {"mosaicml", "fsdp"},
    {"composer", "fsdp"},
    {"torchtitan", "torchtitan"},
    {"maxtext", "maxtext"},
    {"paxml", "paxml"},
    {"llm.c", "llm.c"},
    {"automodel", "torchtitan"},
    {"zero-3 via deepspeed", "deepspeed"},
    {"zero bubble", "zero-bubble"},
    {"2401.10241", "zero-bubble"},
    {"accumulating gradients in fp32", "megatron-deepspeed-bf16"},
    {"vtrain", "megatron-vtrain"},
    {"megatron-deepspeed", "megatron-deepspeed"},
    {"bigscience", "megatron-deepspeed"},
    {"2104.04473", "megatron-2021"},
    {"readme jan 2021", "megatron-2021"},
    {"readme sep 2020", "megatron-2021"},
    {"nemo container", "megatron-bridge"},
    {"megatron-bridge", "megatron-bridge"},
    {"nemo-framework-launcher readme.md@tag 23", "nemo-2023"},
    {"nemo", "megatron-core"},
    {"dgxc", "megatron-core"},
    {"megatron-lm readme", "megatron-core"},
    {"2205.05198", "megatron-2022"},
};

std::string torchtitan(const std::string& text) {
  if (text.find("torch.compile=0") != std::string::npos)
    return "torchtitan-eager";
  const bool asynchronous = text.find("async_tp=1") != std::string::npos ||
                            text.find("asynctp+") != std::string::npos;
  if (asynchronous) return "torchtitan-async-tp";
  // By the date in a page's name: "llama3_h100_202506_torchtitan.md".
  static const std::regex date(R"(_20(\d\d)-?(\d\d)_)");
  std::smatch found;
  if (!std::regex_search(text, found, date)) return "torchtitan";
  const int month = 12 * std::stoi(found[1]) + std::stoi(found[2]);
  return month >= 12 * 25 + 4 ? "torchtitan-2025" : "torchtitan";
}

/// By the container's age: "26.06.01 NeMo Container".
std::string megatron_bridge(const std::string& text) {
  static const std::regex container(R"((\d\d)\.(\d\d)[0-9.]* nemo container)");
  std::smatch found;
  if (!std::regex_search(text, found, container)) return "megatron-bridge";
  const int month = 12 * std::stoi(found[1]) + std::stoi(found[2]);
  if (month >= 12 * 26 + 6) return "megatron-bridge-26.06";
  return month < 12 * 26 ? "megatron-bridge-25" : "megatron-bridge";
}

/// The authors' own schedules; those of Megatron-LM run as it runs them.
std::string zero_bubble(const StepRow& row) {
  const std::string schedule = lower(row.schedule);
  if (schedule.starts_with("1f1b")) return "megatron-2023";
  const bool waits = schedule.find("all-reduce sync") != std::string::npos;
  return waits ? "zero-bubble-synchronous" : "zero-bubble";
}

bool since_hopper(const StepRow& row) {
  const std::string device = device_of(row.gpu);
  return device.starts_with("h") || device.starts_with("gh");
}

bool since_blackwell(const StepRow& row) {
  const std::string device = device_of(row.gpu);
  return device.starts_with("b") || device.starts_with("gb");
}

/// A source never seen.
std::string usual_framework(const StepRow& row) {
  const std::string sharding = lower(row.sharding);
  if (sharding.find("fsdp2") != std::string::npos) return "torchtitan";
  if (sharding.find("deepspeed") != std::string::npos) return "deepspeed";
  if (sharding.find("fsdp") != std::string::npos ||
      sharding.find("zero3") != std::string::npos) {
    return "fsdp";
  }
  if (since_blackwell(row)) return "megatron-bridge";
  if (since_hopper(row)) return "megatron-core";
  return lower(row.recompute).starts_with("sel") ? "megatron-2022"
                                                 : "megatron-2021";
}

}  // namespace

std::string framework_of(const StepRow& row) {
  const std::string text = row.text();
  for (const auto& rule : kRules) {
    if (text.find(rule.word) == std::string::npos) continue;
    const std::string framework = rule.framework;
    if (framework == "torchtitan") return torchtitan(text);
    if (framework == "zero-bubble") return zero_bubble(row);
    return framework == "megatron-bridge" ? megatron_bridge(text) : framework;
  }
  return usual_framework(row);
}

}  // namespace echelon
