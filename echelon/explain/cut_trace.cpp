#include "echelon/explain/cut_trace.h"

#include <algorithm>
#include <set>

#include "echelon/error.h"
#include "echelon/timeline/chrome_trace.h"

namespace echelon {
namespace {

constexpr const char* kEnd = "\n]}\n";

bool is_whole(const std::string& text) {
  const size_t last = text.find_last_not_of(" \t\r\n");
  return last != std::string::npos && last > 0 && text[last] == '}' &&
         text.find_last_not_of(" \t\r\n", last - 1) != std::string::npos &&
         text[text.find_last_not_of(" \t\r\n", last - 1)] == ']';
}

// Each event has a line of its own.
std::string events_before_the_cut(const std::string& text) {
  const size_t last = text.rfind("},\n");
  if (last == std::string::npos) return "";
  return text.substr(0, last + 1) + kEnd;
}

// The span that the file has last: where it broke off.
const Span* last_written(const Timeline& timeline) {
  int32_t rank = -1;
  const Span* last = nullptr;
  for (const Span& span : timeline.spans) {
    if (span.rank < rank) continue;
    rank = span.rank;
    last = &span;
  }
  return last;
}

void leave_out_the_cut_rank(CutTrace& cut) {
  Timeline& timeline = cut.timeline;
  const Span* last = last_written(timeline);
  // Memory comes after all spans: then these are whole.
  if (last == nullptr || !timeline.memory.empty()) return;
  cut.cut_rank = last->rank;
  std::set<int32_t> ranks;
  for (const Span& span : timeline.spans) ranks.insert(span.rank);
  int64_t last_step = -1;
  for (const Span& span : timeline.spans) {
    if (span.rank == cut.cut_rank) last_step = std::max(last_step, span.step);
  }
  std::erase_if(timeline.spans, [&](const Span& span) {
    if (span.rank != cut.cut_rank) return false;
    return ranks.size() > 1 || span.step == last_step;
  });
}

}  // namespace

CutTrace parse_cut_trace(const std::string& text, const std::string& place) {
  if (is_whole(text)) return {parse_chrome_trace(text, place)};
  const std::string whole = events_before_the_cut(text);
  if (whole.empty()) {
    // Its reason says what the text is.
    return {parse_chrome_trace(text, place)};
  }
  CutTrace cut{parse_chrome_trace(whole, place)};
  leave_out_the_cut_rank(cut);
  if (cut.timeline.spans.empty()) {
    throw DataError(
        "[timeline] " + place + " breaks off before its first whole step");
  }
  return cut;
}

}  // namespace echelon
