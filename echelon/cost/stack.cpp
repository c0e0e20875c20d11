#include "echelon/cost/stack.h"

#include <utility>

#include "echelon/cost/known_stacks.h"
#include "echelon/error.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

const std::vector<Stack>& stacks() {
  static const std::vector<Stack> all = [] {
    std::vector<Stack> list = sharded_stacks();
    std::vector<Stack> megatron = megatron_stacks();
    for (Stack& stack : megatron) list.push_back(std::move(stack));
    return list;
  }();
  return all;
}

}  // namespace

const std::vector<std::string>& stack_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Stack& stack : stacks()) list.push_back(stack.name);
    return list;
  }();
  return names;
}

const Stack& find_stack(std::string_view name) {
  for (const Stack& stack : stacks()) {
    if (stack.name == name) return stack;
  }
  std::string known;
  for (const std::string& one : stack_names()) {
    known += (known.empty() ? "" : ", ") + one;
  }
  throw ConfigError(
      "unknown stack \"" + std::string(name) + "\"; known: " + known +
      config::did_you_mean(name, stack_names()));
}

}  // namespace echelon
