#include "echelon/timeline/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/json_reason.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

using Json = nlohmann::json;

// A JSON string; bytes that are no UTF-8 become U+FFFD.
std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string microseconds(int64_t ns) {
  char text[40];
  const char* sign = ns < 0 ? "-" : "";
  const uint64_t size = ns < 0 ? 0 - static_cast<uint64_t>(ns) : ns;
  std::snprintf(
      text, sizeof text, "%s%llu.%03llu", sign,
      static_cast<unsigned long long>(size / 1000),
      static_cast<unsigned long long>(size % 1000));
  return text;
}

// Compute first, as one reads it; tracks of one's own at the end.
int track_order(const std::string& track) {
  if (track == "compute") return 0;
  if (track == "comm") return 1;
  if (track == "loader" || track == "data") return 2;
  return 3;
}

using TrackKey = std::tuple<int32_t, int, std::string>;  // rank, order, track

// Puts each span of a track on the first lane where it nests or stands apart.
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
            quoted(timeline.title);
    if (timeline.simulated) text_ += ",\"simulated\":true";
    text_ += "},\n\"traceEvents\":[";
  }

  void metadata(
      const char* name, int64_t pid, int64_t tid, const std::string& args) {
    next();
    text_ += std::string("{\"ph\":\"M\",\"name\":\"") + name +
             "\",\"pid\":" + std::to_string(pid) +
             ",\"tid\":" + std::to_string(tid) + ",\"args\":{" + args + "}}";
  }

  void span(const Span& span, int64_t tid, bool other_lane) {
    next();
    text_ += "{\"ph\":\"X\",\"name\":" + quoted(span.name) + ",\"cat\":\"" +
             span_kind_name(span.kind) +
             "\",\"pid\":" + std::to_string(span.rank) +
             ",\"tid\":" + std::to_string(tid) +
             ",\"ts\":" + microseconds(span.begin_ns) +
             ",\"dur\":" + microseconds(span.end_ns - span.begin_ns) +
             ",\"args\":{\"step\":" + std::to_string(span.step);
    if (span.bytes != 0) text_ += ",\"bytes\":" + std::to_string(span.bytes);
    if (!span.axis.empty()) text_ += ",\"axis\":" + quoted(span.axis);
    if (other_lane) text_ += ",\"track\":" + quoted(span.track);
    text_ += "}}";
  }

  void memory(int32_t rank, const MemorySample& sample) {
    next();
    text_ +=
        "{\"ph\":\"C\",\"name\":\"memory\",\"pid\":" + std::to_string(rank) +
        ",\"ts\":" + microseconds(sample.time_ns) + ",\"args\":{";
    for (const MemoryKind kind : kMemoryKinds) {
      if (kind != kMemoryKinds.front()) text_ += ",";
      text_ += "\"" + std::string(to_string(kind)) +
               "\":" + std::to_string(sample.memory[kind]);
    }
    text_ += "}}";
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
  std::stable_sort(
      spans.begin(), spans.end(), [](const Span* a, const Span* b) {
        return std::pair(a->begin_ns, -a->end_ns) <
               std::pair(b->begin_ns, -b->end_ns);
      });
  const Span& first = *spans.front();
  const int64_t first_tid = tid;
  Lanes lanes;
  for (const Span* span : spans) {
    const auto lane = static_cast<int64_t>(lanes.place(*span));
    if (first_tid + lane == tid) {
      const auto suffix =
          lane == 0 ? "" : " (" + std::to_string(lane + 1) + ")";
      trace.metadata(
          "thread_name", first.rank, tid,
          "\"name\":" + quoted(first.track + suffix));
      trace.metadata(
          "thread_sort_index", first.rank, tid,
          "\"sort_index\":" + std::to_string(tid));
      ++tid;
    }
    trace.span(*span, first_tid + lane, lane > 0);
  }
}

void write_memory(TraceText& trace, const RankMemory& memory) {
  trace.metadata(
      "memory", memory.rank, 0,
      "\"planned\":" + std::to_string(memory.planned_bytes) +
          ",\"limit\":" + std::to_string(memory.limit_bytes));
  for (const auto& sample : memory.samples) trace.memory(memory.rank, sample);
}

int64_t to_ns(const Json& microseconds) {
  const double value = microseconds.get<double>() * 1e3;
  if (!(std::abs(value) < 4e18)) {  // two of them can be added
    throw DataError("a time is out of range");
  }
  return std::llround(value);
}

// Takes events as they are read: of a large run all of them as JSON would need
// ten times the memory of the file.
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
    std::stable_sort(
        timeline_.spans.begin(), timeline_.spans.end(),
        [](const Span& a, const Span& b) {
          return std::pair(a.rank, a.begin_ns) < std::pair(b.rank, b.begin_ns);
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
      throw DataError("a process is no rank: " + std::to_string(rank));
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
    RankMemory& memory = memory_[rank];
    memory.rank = rank;
    return memory;
  }

  void read_limits(const Json& event) {
    RankMemory& memory = memory_of(event);
    const Json& args = event.at("args");
    memory.planned_bytes = args.at("planned").get<int64_t>();
    memory.limit_bytes = args.at("limit").get<int64_t>();
  }

  // In the order of the file, which is that of time.
  void read_sample(const Json& event) {
    const Json& args = event.at("args");
    MemorySample sample{.time_ns = to_ns(event.at("ts"))};
    for (const MemoryKind kind : kMemoryKinds) {
      sample.memory[kind] =
          args.at(std::string(to_string(kind))).get<int64_t>();
    }
    memory_of(event).samples.push_back(sample);
  }

  Timeline timeline_;
  std::map<std::pair<int32_t, int64_t>, std::string> tracks_;
  std::vector<std::pair<size_t, int64_t>> unnamed_;  // span, thread
  std::map<int32_t, RankMemory> memory_;             // by rank
};

Timeline read_timeline(const std::string& text) {
  EventReader events;
  std::string table;  // of the file, in which the reading is
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
    if (timeline.rank_names[rank].empty()) continue;  // not among those shown
    trace.metadata(
        "process_name", rank, 0,
        "\"name\":" + quoted(timeline.rank_names[rank]));
    trace.metadata(
        "process_sort_index", rank, 0,
        "\"sort_index\":" + std::to_string(rank));
  }
  std::map<TrackKey, std::vector<const Span*>> tracks;
  for (const auto& span : timeline.spans) {
    tracks[{span.rank, track_order(span.track), span.track}].push_back(&span);
  }
  int64_t tid = 1;  // unique in the file: some viewers forget the process
  for (auto& [key, spans] : tracks) write_track(trace, spans, tid);
  for (const auto& memory : timeline.memory) write_memory(trace, memory);
  return std::move(trace).finish();
}

void write_chrome_trace(
    const std::filesystem::path& path, const Timeline& timeline) {
  write_text_file(path, to_chrome_trace(timeline));
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
  throw DataError(
      "[timeline] " + place + " is no trace that Echelon wrote: " + reason);
}

}  // namespace echelon
