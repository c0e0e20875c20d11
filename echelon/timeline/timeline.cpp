#include "echelon/timeline/timeline.h"

#include <array>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr std::array<const char*, 7> kKindNames = {
    "forward", "backward",   "optimizer", "communication",
    "data",    "evaluation", "other"};

}  // namespace

const char* span_kind_name(SpanKind kind) {
  return kKindNames[static_cast<size_t>(kind)];
}

SpanKind span_kind_from_name(const std::string& name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (name == kKindNames[i]) return static_cast<SpanKind>(i);
  }
  throw DataError(format(
      "[timeline] '{}' is not a kind of span; known: {}", name,
      join(kKindNames, ", ")));
}

}  // namespace echelon
