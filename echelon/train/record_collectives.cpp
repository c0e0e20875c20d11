#include "echelon/train/record_collectives.h"

#include <cstdint>
#include <utility>

namespace echelon {

void record_collectives(
    World& world, std::shared_ptr<timeline::Recorder> recorder) {
  world.history().mark_with([recorder] { return recorder->mark(); });
  world.history().on_end([recorder](const CollectiveRecord& record) {
    // What a device did may be told after the recorded steps.
    if (record.begin_mark < 0 && !recorder->active()) return;
    const auto moment = [](int64_t mark, int64_t ns) {
      return mark >= 0 ? timeline::Moment{mark, true} : timeline::Moment{ns};
    };
    const auto begin = moment(record.begin_mark, record.begin_ns);
    const auto end = moment(record.end_mark, record.end_ns);
    timeline::Span span{
        .track = "comm",
        .name =
            record.operation + (record.label.empty() ? "" : " " + record.label),
        .kind = timeline::SpanKind::communication,
        .bytes = record.bytes,
        .axis = record.axis};
    recorder->add(span, begin, end);
    // A pipeline records its own waits, with the actions that it waits for.
    const bool waited = record.wait_begin_ns != 0 || record.wait_mark >= 0;
    if (!waited || record.axis == "pp") return;
    span.track = "compute";
    span.name = "wait for " + span.name;
    span.bytes = 0;
    span.axis.clear();
    recorder->add(
        std::move(span), moment(record.wait_mark, record.wait_begin_ns), end);
  });
}

}  // namespace echelon
