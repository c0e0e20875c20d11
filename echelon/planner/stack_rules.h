// What a training software can be told, as far as a search goes through it.
#pragma once

#include <string>
#include <vector>

namespace echelon {

struct StackRules {
  bool context_parallel = true;
  bool expert_parallel = true;
  bool pipelines = true;
  bool tensor_parallel = true;
  std::vector<std::string> schedules;  // of pipelines
  std::vector<int> zero_stages;        // of fsdp > 1
  bool gather_once = false;            // stage 3 may keep parameters for a step
  std::vector<int> orders;             // of axes: indices of axis_orders()
  bool offload = false;                // optimizer and activations to the host
  bool partial_selective = false;      // selective recompute of some layers
  bool sequence_parallel = true;
};

/// The trainer of this project for "echelon": what check_job
/// (train/check_job.h) accepts. Others as their documentation says.
StackRules rules_of_stack(const std::string& stack);

}  // namespace echelon
