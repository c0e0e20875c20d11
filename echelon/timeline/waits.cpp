#include "echelon/timeline/waits.h"

#include <algorithm>
#include <utility>

#include "echelon/timeline/intervals.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {
namespace {

bool began_in(const Span& span, const Span& outer) {
  return span.begin_ns >= outer.begin_ns && span.begin_ns < outer.end_ns;
}

// The wait in `backward`; empty when there is none to add.
Interval
wait_in(const Span& backward, const std::vector<const Span*>& collectives) {
  Interval wait = {backward.begin_ns, backward.begin_ns};
  const auto first = std::lower_bound(
      collectives.begin(), collectives.end(), backward.begin_ns,
      [](const Span* span, int64_t time) { return span->begin_ns < time; });
  for (auto it = first; it != collectives.end(); ++it) {
    if (!began_in(**it, backward)) break;
    if ((*it)->track == backward.track) return {};
    wait.begin = (*it)->begin_ns;
    wait.end = std::max(wait.end, (*it)->end_ns);
  }
  wait.end = std::min(wait.end, backward.end_ns);
  return wait;
}

}  // namespace

void add_backward_waits(std::vector<Span>& spans) {
  std::vector<const Span*> collectives;
  for (const auto& span : spans) {
    if (span.kind == SpanKind::communication) collectives.push_back(&span);
  }
  std::sort(
      collectives.begin(), collectives.end(),
      [](const Span* a, const Span* b) { return a->begin_ns < b->begin_ns; });
  std::vector<Span> waits;
  for (const auto& span : spans) {
    if (span.kind != SpanKind::backward) continue;
    // A pipeline's backward sends as it ends; it waits outside of its spans.
    if (block_of_name(span.name)) continue;
    const Interval wait = wait_in(span, collectives);
    if (wait.begin >= wait.end) continue;
    Span added = span;
    added.name = "wait for gradients";
    added.kind = SpanKind::communication;
    added.begin_ns = wait.begin;
    added.end_ns = wait.end;
    added.bytes = 0;
    waits.push_back(std::move(added));
  }
  spans.insert(spans.end(), waits.begin(), waits.end());
}

}  // namespace echelon
