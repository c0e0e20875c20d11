#include "echelon/timeline/span_file.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "echelon/error.h"
#include "echelon/timeline/pipeline_blocks.h"
#include "echelon/timeline/text_file.h"
#include "echelon/timeline/waits.h"

namespace echelon {
namespace {

using Json = nlohmann::ordered_json;

std::string to_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

void read_header(const Json& json, RankSpans& result) {
  if (json.at("echelon_spans") != 1) {
    throw DataError("it is of another version of Echelon");
  }
  result.rank = json.at("rank").get<int32_t>();
  if (result.rank < 0 || result.rank > 1 << 20) {
    throw DataError("rank " + std::to_string(result.rank) + " cannot be");
  }
  result.rank_name = json.at("rank_name").get<std::string>();
  result.clock_offset_ns = json.at("clock_offset_ns").get<int64_t>();
}

Span read_span(const Json& json, int32_t rank) {
  Span span;
  span.rank = rank;
  span.begin_ns = json.at(0).get<int64_t>();
  span.end_ns = json.at(1).get<int64_t>();
  span.kind = span_kind_from_name(json.at(2).get<std::string>());
  span.track = json.at(3).get<std::string>();
  span.name = json.at(4).get<std::string>();
  span.step = json.at(5).get<int64_t>();
  span.bytes = json.at(6).get<int64_t>();
  return span;
}

void read_line(std::string_view line, int64_t number, RankSpans& result) {
  const Json json = Json::parse(line);
  if (number == 1) {
    read_header(json, result);
  } else {
    result.spans.push_back(read_span(json, result.rank));
  }
}

[[noreturn]] void fail(
    const std::filesystem::path& path,
    int64_t number,
    const std::string& reason) {
  throw DataError(
      path.string() + ":" + std::to_string(number) +
      ": no spans of a rank: " + reason);
}

}  // namespace

void write_span_file(
    const std::filesystem::path& path, const RankSpans& spans) {
  std::string text = to_line(Json{
      {"echelon_spans", 1},
      {"rank", spans.rank},
      {"rank_name", spans.rank_name},
      {"clock_offset_ns", spans.clock_offset_ns}});
  for (const auto& s : spans.spans) {
    text += to_line(Json::array(
        {s.begin_ns,
         s.end_ns,
         span_kind_name(s.kind),
         s.track,
         s.name,
         s.step,
         s.bytes}));
  }
  write_text_file(path, text);
}

RankSpans read_span_file(const std::filesystem::path& path) {
  const std::string text = read_text_file(path);
  RankSpans result;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    ++number;
    try {
      read_line(
          std::string_view(text).substr(begin, end - begin), number, result);
    } catch (const nlohmann::json::exception& error) {
      fail(path, number, error.what());
    } catch (const DataError& error) {
      fail(path, number, error.what());
    }
    begin = end + 1;
  }
  if (number == 0) fail(path, 1, "its first line is missing");
  return result;
}

Timeline merge_spans(std::vector<RankSpans> ranks, std::string title) {
  Timeline timeline;
  timeline.title = std::move(title);
  std::set<int32_t> seen;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (auto& rank : ranks) {
    if (!seen.insert(rank.rank).second) {
      throw DataError(
          "[timeline] the spans of rank " + std::to_string(rank.rank) +
          " are there twice; each rank writes one file");
    }
    add_backward_waits(rank.spans);
    for (auto& span : rank.spans) {
      span.rank = rank.rank;
      span.begin_ns += rank.clock_offset_ns;
      span.end_ns += rank.clock_offset_ns;
      origin = std::min(origin, span.begin_ns);
    }
  }
  const size_t num_ranks = seen.empty() ? 0 : *seen.rbegin() + 1;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    timeline.rank_names.push_back("rank " + std::to_string(rank));
  }
  for (auto& rank : ranks) {
    if (!rank.rank_name.empty()) {
      timeline.rank_names[rank.rank] = rank.rank_name;
    }
    for (auto& span : rank.spans) {
      span.begin_ns -= origin;
      span.end_ns -= origin;
      timeline.spans.push_back(std::move(span));
    }
  }
  trim_receives(timeline);
  std::stable_sort(
      timeline.spans.begin(),
      timeline.spans.end(),
      [](const Span& a, const Span& b) {
        return std::tuple(a.begin_ns, a.rank, -a.end_ns) <
               std::tuple(b.begin_ns, b.rank, -b.end_ns);
      });
  return timeline;
}

}  // namespace echelon
