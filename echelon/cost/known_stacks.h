// The stacks that find_stack knows, by family.
#pragma once

#include <vector>

#include "echelon/cost/stack.h"

namespace echelon {

/// Megatron-LM, its forks, DeepSpeed around its layers, NeMo.
std::vector<Stack> megatron_stacks();
/// This project's trainer, FSDP, torchtitan, and what XLA compiles.
std::vector<Stack> sharded_stacks();

}  // namespace echelon
