#include "echelon/planner/stack_rules.h"

#include "echelon/schedule/options.h"

namespace echelon {

StackRules rules_of_stack(const std::string& stack) {
  if (stack == "echelon") {
    return {
        .context_parallel = false,
        .expert_parallel = false,
        .schedules = schedule_kinds(),
        .zero_stages = {1, 2, 3},
        .gather_once = true,
        .orders = {0, 1, 2},
        .offload = true,
        .partial_selective = true};
  }
  // Megatron-LM of 2021: no distributed optimizer, no sequence parallelism.
  if (stack == "megatron-2021") {
    return {
        .context_parallel = false,
        .expert_parallel = false,
        .schedules = {"gpipe", "1f1b", "interleaved"},
        .zero_stages = {},
        .orders = {1},
        .sequence_parallel = false};
  }
  if (stack.rfind("megatron", 0) == 0) {
    return {
        .schedules = {"1f1b", "interleaved"},
        .zero_stages = {1},
        .orders = {1}};
  }
  if (stack == "fsdp") {
    return {
        .context_parallel = false,
        .expert_parallel = false,
        .pipelines = false,
        .tensor_parallel = false,
        .schedules = {},
        .zero_stages = {2, 3},
        .orders = {0},
        .offload = true};
  }
  return {
      .schedules = schedule_kinds(),
      .zero_stages = {1, 2, 3},
      .gather_once = true,
      .orders = {0, 1, 2},
      .offload = true,
      .partial_selective = true};
}

}  // namespace echelon
