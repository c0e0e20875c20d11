#include "echelon/parallel/tensor/attention_shape.h"

#include <algorithm>
#include <string>

#include "echelon/error.h"

namespace echelon {
namespace {

// "1, 2, 5 or 10": the divisors of `number`.
std::string divisors(int64_t number) {
  std::string text;
  for (int64_t d = 1; d <= number; ++d) {
    if (number % d != 0) continue;
    if (!text.empty()) text += d == number ? " or " : ", ";
    text += std::to_string(d);
  }
  return text;
}

// The divisors of `number` next to `wanted`: "8 or 16".
std::string divisors_near(int64_t number, int64_t wanted) {
  int64_t below = std::min(wanted, number);
  while (number % below != 0) --below;
  int64_t above = std::min(wanted, number);
  while (number % above != 0) ++above;
  const auto text = std::to_string(below);
  return below == above ? text : text + " or " + std::to_string(above);
}

void check_positive(const char* name, int64_t value) {
  if (value > 0) return;
  throw ConfigError(
      std::string("[model] ") + name + "=" + std::to_string(value) +
      ", but attention needs at least 1");
}

}  // namespace

void check_attention(const AttentionShape& shape, int64_t tp) {
  check_positive("hidden_size", shape.hidden);
  check_positive("heads", shape.heads);
  if (shape.head_size <= 0 && shape.hidden % shape.heads != 0) {
    throw ConfigError(
        "[model] hidden_size=" + std::to_string(shape.hidden) +
        " is not a multiple of heads=" + std::to_string(shape.heads) +
        ": heads share the features evenly; heads=" +
        divisors_near(shape.hidden, shape.heads) + " would fit");
  }
  if (shape.heads % shape.num_kv_heads() != 0) {
    throw ConfigError(
        "[model] heads=" + std::to_string(shape.heads) +
        " is not a multiple of kv_heads=" +
        std::to_string(shape.num_kv_heads()) +
        ": each head of keys and values serves as many heads of queries; "
        "kv_heads may be " +
        divisors(shape.heads));
  }
  if (tp > shape.heads) {
    throw ConfigError(
        "[layout] tp=" + std::to_string(tp) +
        ", but the model has heads=" + std::to_string(shape.heads) +
        ": each tensor-parallel rank needs a head of attention; tp of 1 to " +
        std::to_string(shape.heads) + " fits, and " + divisors(shape.heads) +
        " gives each rank as many");
  }
}

AttentionHeads heads_of(const AttentionShape& shape, int64_t rank, int64_t tp) {
  const int64_t group = shape.group();
  // The kv heads of queries [0, end), of which none is left out.
  const auto kv_end = [group](int64_t end) {
    return (end + group - 1) / group;
  };
  AttentionHeads heads;
  heads.query = even_range(shape.heads, rank, tp);
  heads.kv = {heads.query.begin / group, kv_end(heads.query.end)};
  heads.kv_owned = {
      std::max(heads.kv.begin, kv_end(heads.query.begin)), heads.kv.end};
  for (int64_t other = 1; other < tp; ++other) {
    heads.shares_kv |= even_range(shape.heads, other, tp).begin % group != 0;
  }
  heads.uniform = heads.kv.size() == 1 || (heads.query.begin % group == 0 &&
                                           heads.query.end % group == 0);
  return heads;
}

}  // namespace echelon
