#include "echelon/train/gather_spans.h"

#include <torch/types.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

namespace echelon {
namespace {

using nlohmann::json;

std::vector<uint8_t> to_bytes(const RankSpans& spans) {
  json rows = json::array();
  for (const auto& s : spans.spans) {
    rows.push_back(json::array(
        {s.begin_ns, s.end_ns, static_cast<int>(s.kind), s.track, s.name,
         s.step, s.bytes, s.axis}));
  }
  json samples = json::array();
  for (const auto& sample : spans.memory.samples) {
    samples.push_back(json::array({sample.time_ns, sample.memory.bytes}));
  }
  return json::to_msgpack(json::array(
      {spans.rank_name, spans.clock_offset_ns, std::move(rows),
       std::move(samples), spans.memory.planned_bytes,
       spans.memory.limit_bytes}));
}

RankSpans from_bytes(int rank, const uint8_t* bytes, size_t size) {
  const json all = json::from_msgpack(bytes, bytes + size);
  RankSpans result;
  result.rank = rank;
  result.rank_name = all.at(0).get<std::string>();
  result.clock_offset_ns = all.at(1).get<int64_t>();
  for (const auto& row : all.at(2)) {
    Span span;
    span.rank = rank;
    span.begin_ns = row.at(0).get<int64_t>();
    span.end_ns = row.at(1).get<int64_t>();
    span.kind = static_cast<SpanKind>(row.at(2).get<int>());
    span.track = row.at(3).get<std::string>();
    span.name = row.at(4).get<std::string>();
    span.step = row.at(5).get<int64_t>();
    span.bytes = row.at(6).get<int64_t>();
    span.axis = row.at(7).get<std::string>();
    result.spans.push_back(std::move(span));
  }
  for (const auto& row : all.at(3)) {
    MemorySample sample{.time_ns = row.at(0).get<int64_t>()};
    sample.memory.bytes = row.at(1).get<decltype(sample.memory.bytes)>();
    result.memory.samples.push_back(sample);
  }
  result.memory.planned_bytes = all.at(4).get<int64_t>();
  result.memory.limit_bytes = all.at(5).get<int64_t>();
  return result;
}

void send(World& world, const RankSpans& spans) {
  const auto bytes = to_bytes(spans);
  const auto size = static_cast<int64_t>(bytes.size());
  auto message = torch::empty({size}, torch::kUInt8);
  std::memcpy(message.data_ptr(), bytes.data(), bytes.size());
  const Call call{.label = "spans"};
  world.group().send(
      torch::full({1}, size, torch::kInt64).to(world.device()), 0, 0, call);
  world.group().send(message.to(world.device()), 0, 0, call);
}

RankSpans receive(World& world, int rank) {
  const Call call{.label = "spans"};
  auto size =
      torch::zeros({1}, torch::dtype(torch::kInt64).device(world.device()));
  world.group().recv(size, rank, 0, call);
  auto message = torch::empty(
      {size.item<int64_t>()},
      torch::dtype(torch::kUInt8).device(world.device()));
  world.group().recv(message, rank, 0, call);
  message = message.cpu();
  return from_bytes(
      rank, message.data_ptr<uint8_t>(), static_cast<size_t>(message.numel()));
}

}  // namespace

std::vector<RankSpans> gather_spans(World& world, RankSpans own) {
  if (world.rank() != 0) {
    send(world, own);
    return {};
  }
  std::vector<RankSpans> all = {std::move(own)};
  for (int rank = 1; rank < world.size(); ++rank) {
    all.push_back(receive(world, rank));
  }
  return all;
}

}  // namespace echelon
