#include "echelon/comm/trace/label.h"

#include <utility>

namespace echelon {
namespace {

thread_local std::string current_label;

}  // namespace

LabelScope::LabelScope(std::string label)
    : previous_(std::exchange(current_label, std::move(label))) {}

LabelScope::~LabelScope() {
  current_label = std::move(previous_);
}

const std::string& LabelScope::current() {
  return current_label;
}

}  // namespace echelon
