// Chrome's viewer draws one thread as spans that nest. Spans of a track may
// overlap without nesting, so each goes to the first lane where it nests or
// stands apart, and a further lane is a thread of its own whose spans name
// their track. The reader undoes this. It takes events from the parser one by
// one, since all events as JSON would need ten times the file's memory.
#include "echelon/timeline/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::timeline {
namespace {

using Json = nlohmann::json;

// A JSON string; bytes that are not UTF-8 become U+FFFD.
std::string json_text(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string microseconds(int64_t ns) {
  const uint64_t size = ns < 0 ? 0 - static_cast<uint64_t>(ns) : ns;
  return format("{}{}.{:03}", ns < 0 ? "-" : "", size / 1000, size % 1000);
}

// Computation first, then communication and data; other tracks at the end.
int track_order(const std::string& track) {
  if (track == "compute") return 0;
  if (track == "comm") return 1;
  if (track == "loader" || track == "data") return 2;
  return 3;
}

using TrackKey = std::tuple<int32_t, int, std::string>;  // rank, order, track

// Puts each span of a track on the first lane where it is nested in the open
// spans, or apart from all others.
class Lanes {
 public:
  size_t place(const Span& span) {
    for (size_t lane = 0; lane < open_.size(); ++lane) {
      auto& ends = open_[lane];
      while (!ends.empty() && ends.back() <= span.begin_ns) ends.pop_back();
      if (ends.empty() || span.end_ns <= ends.back()) {
        ends.push_back(span.end_ns);
        return lane;
      }
    }
    open_.push_back({span.end_ns});
    return open_.size() - 1;
  }

 private:
  std::vector<std::vector<int64_t>> open_;  // per lane: ends, innermost last
};

class TraceText {
 public:
  explicit TraceText(const Timeline& timeline) {
    text_ = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"title\":" +
            json_text(timeline.title);
    if (timeline.simulated) text_ += ",\"simulated\":true";
    if (!timeline.rank_classes.empty()) {
      text_ +=
          format(",\"rank_classes\":[{}]", join(timeline.rank_classes, ","));
    }
    text_ += "},\n\"traceEvents\":[";
  }

  void metadata(
      const char* name, int64_t pid, int64_t tid, const std::string& args) {
    next();
    text_ += format(
        R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", name,
        pid, tid, args);
  }

  void span(const Span& span, int64_t tid, bool other_lane) {
    next();
    text_ += format(
        R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},)"
        R"("ts":{},"dur":{},"args":{{"step":{})",
        json_text(span.name), span_kind_name(span.kind), span.rank, tid,
        microseconds(span.begin_ns), microseconds(span.end_ns - span.begin_ns),
        span.step);
    if (span.bytes != 0) text_ += format(",\"bytes\":{}", span.bytes);
    if (!span.axis.empty()) {
      text_ += format(",\"axis\":{}", json_text(span.axis));
    }
    if (other_lane) text_ += format(",\"track\":{}", json_text(span.track));
    text_ += "}}";
  }

  void memory(int32_t rank, const MemorySample& sample) {
    next();
    text_ += format(
        R"({{"ph":"C","name":"memory","pid":{},"ts":{},"args":{{{}}}}})", rank,
        microseconds(sample.time_ns),
        join(kMemoryKinds, ",", [&](MemoryKind kind) {
          return format("\"{}\":{}", to_string(kind), sample.memory[kind]);
        }));
  }

  std::string finish() && { return std::move(text_) + "\n]}\n"; }

 private:
  void next() {
    text_ += first_ ? "\n" : ",\n";
    first_ = false;
  }

  std::string text_;
  bool first_ = true;
};

void write_track(
    TraceText& trace, std::vector<const Span*>& spans, int64_t& tid) {
  std::ranges::stable_sort(spans, {}, [](const Span* span) {
    return std::pair(span->begin_ns, -span->end_ns);
  });
  const Span& first = *spans.front();
  const int64_t first_tid = tid;
  Lanes lanes;
  for (const Span* span : spans) {
    const auto lane = static_cast<int64_t>(lanes.place(*span));
    if (first_tid + lane == tid) {
      trace.metadata(
          "thread_name", first.rank, tid,
          "\"name\":" + json_text(
                            lane == 0
                                ? first.track
                                : format("{} ({})", first.track, lane + 1)));
      trace.metadata(
          "thread_sort_index", first.rank, tid,
          format("\"sort_index\":{}", tid));
      ++tid;
    }
    trace.span(*span, first_tid + lane, lane > 0);
  }
}

void write_memory(TraceText& trace, const RankMemory& memory) {
  trace.metadata(
      "memory", memory.rank, 0,
      format(
          R"("planned":{},"limit":{})", memory.planned_bytes,
          memory.limit_bytes));
  for (const auto& sample : memory.samples) trace.memory(memory.rank, sample);
}

int64_t to_ns(const Json& microseconds) {
  const double value = microseconds.get<double>() * 1e3;
  if (!(std::abs(value) < 4e18)) {  // two of them can be added
    throw DataError("a time is out of range");
  }
  return std::llround(value);
}

// Takes events one by one as they are parsed: as JSON, all events of a large
// run would need ten times the memory of the file.
class EventReader {
 public:
  void read(const Json& event) {
    const Json& kind = event.at("ph");
    const bool memory = event.at("name") == "memory";
    if (kind == "M") read_name(event);
    if (kind == "X") read_span(event);
    if (memory && kind == "M") read_limits(event);
    if (memory && kind == "C") read_sample(event);
  }

  // Thread names come before or after the events that they name.
  Timeline take() {
    for (const auto& [at, tid] : unnamed_) {
      Span& span = timeline_.spans[at];
      span.track = tracks_.at({span.rank, tid});
    }
    for (auto& [_, memory] : memory_) {
      timeline_.memory.push_back(std::move(memory));
    }
    std::ranges::stable_sort(timeline_.spans, {}, [](const Span& span) {
      return std::pair(span.rank, span.begin_ns);
    });
    return std::move(timeline_);
  }

 private:
  void read_name(const Json& event) {
    const auto pid = event.at("pid").get<int32_t>();
    const Json& name = event.at("name");
    if (name == "process_name") {
      name_rank(pid, event.at("args").at("name").get<std::string>());
    } else if (name == "thread_name") {
      tracks_[{pid, event.at("tid").get<int64_t>()}] =
          event.at("args").at("name").get<std::string>();
    }
  }

  void name_rank(int32_t rank, std::string name) {
    if (rank < 0 || rank > 1 << 20) {
      throw DataError(format("a process is no rank: {}", rank));
    }
    auto& names = timeline_.rank_names;
    if (names.size() <= static_cast<size_t>(rank)) names.resize(rank + 1);
    names[rank] = std::move(name);
  }

  void read_span(const Json& event) {
    Span span;
    span.rank = event.at("pid").get<int32_t>();
    const auto tid = event.at("tid").get<int64_t>();
    const Json& args = event.at("args");
    if (const auto track = args.find("track"); track != args.end()) {
      span.track = track->get<std::string>();
    } else {
      unnamed_.emplace_back(timeline_.spans.size(), tid);
    }
    span.name = event.at("name").get<std::string>();
    span.kind = span_kind_from_name(event.at("cat").get<std::string>());
    span.begin_ns = to_ns(event.at("ts"));
    span.end_ns = span.begin_ns + to_ns(event.at("dur"));
    span.step = args.at("step").get<int64_t>();
    span.bytes = args.value("bytes", int64_t{0});
    span.axis = args.value("axis", std::string());
    timeline_.spans.push_back(std::move(span));
  }

  RankMemory& memory_of(const Json& event) {
    const auto rank = event.at("pid").get<int32_t>();
    memory_[rank].rank = rank;
    return memory_[rank];
  }

  void read_limits(const Json& event) {
    RankMemory& memory = memory_of(event);
    const Json& args = event.at("args");
    memory.planned_bytes = args.at("planned").get<int64_t>();
    memory.limit_bytes = args.at("limit").get<int64_t>();
  }

  // In the order of the file, which is that of time. Files of earlier versions
  // call unsharded parameters "gathered".
  void read_sample(const Json& event) {
    const Json& args = event.at("args");
    MemorySample sample{.time_ns = to_ns(event.at("ts"))};
    for (const MemoryKind kind : kMemoryKinds) {
      std::string name(to_string(kind));
      if (!args.contains(name) && kind == MemoryKind::unsharded) {
        name = "gathered";
      }
      sample.memory[kind] = args.at(name).get<int64_t>();
    }
    memory_of(event).samples.push_back(sample);
  }

  Timeline timeline_;
  std::map<std::pair<int32_t, int64_t>, std::string> tracks_;
  std::vector<std::pair<size_t, int64_t>> unnamed_;  // span, thread
  std::map<int32_t, RankMemory> memory_;             // by rank
};

// The callback of the parser takes each event when it is complete and drops it,
// so that the JSON that is left has no events.
Timeline read_timeline(const std::string& text) {
  EventReader events;
  std::string table;  // the key of the file that is being read
  const auto take_event = [&](int depth, Json::parse_event_t what,
                              Json& value) {
    if (what == Json::parse_event_t::key && depth == 1) {
      table = value.get<std::string>();
    }
    if (what != Json::parse_event_t::object_end || depth != 2 ||
        table != "traceEvents") {
      return true;
    }
    events.read(value);
    return false;  // it is taken
  };
  const Json rest = Json::parse(text, take_event);
  const Json& about = rest.at("otherData");
  if (!rest.at("traceEvents").empty()) {
    throw DataError("an event is no object");
  }
  Timeline timeline = events.take();
  timeline.title = about.at("title").get<std::string>();
  timeline.simulated = about.value("simulated", false);
  timeline.rank_classes = about.value("rank_classes", std::vector<int32_t>());
  return timeline;
}

bool is_of_another_program(const std::string& text) {
  return (text.find("\"otherData\"") == std::string::npos ||
          text.find("\"traceEvents\"") == std::string::npos) &&
         Json::accept(text);
}

}  // namespace

std::string to_chrome_trace(const Timeline& timeline) {
  TraceText trace(timeline);
  for (size_t rank = 0; rank < timeline.rank_names.size(); ++rank) {
    if (timeline.rank_names[rank].empty())
      continue;  // not a rank that is shown
    trace.metadata(
        "process_name", rank, 0,
        "\"name\":" + json_text(timeline.rank_names[rank]));
    trace.metadata(
        "process_sort_index", rank, 0, format("\"sort_index\":{}", rank));
  }
  std::map<TrackKey, std::vector<const Span*>> tracks;
  for (const auto& span : timeline.spans) {
    tracks[{span.rank, track_order(span.track), span.track}].push_back(&span);
  }
  int64_t tid = 1;  // unique in the file: some viewers ignore the process
  for (auto& [key, spans] : tracks) write_track(trace, spans, tid);
  for (const auto& memory : timeline.memory) write_memory(trace, memory);
  return std::move(trace).finish();
}

void write_chrome_trace(
    const std::filesystem::path& path, const Timeline& timeline) {
  write_file_atomically(path, to_chrome_trace(timeline));
}

Timeline read_chrome_trace(const std::filesystem::path& path) {
  return parse_chrome_trace(read_text_file(path), path.string());
}

Timeline parse_chrome_trace(const std::string& text, const std::string& place) {
  std::string reason;
  try {
    if (!is_of_another_program(text)) return read_timeline(text);
    reason = "it is another program's JSON";
  } catch (const nlohmann::json::exception& error) {
    reason = json_reason(error);
  } catch (const std::out_of_range&) {
    reason = "an event is on a thread without a name";
  } catch (const DataError& error) {
    reason = error.what();
  }
  throw DataError(format(
      "[timeline] {} is no trace that Echelon wrote: {}", place, reason));
}

}  // namespace echelon::timeline
