#include "tests/comm/collective_cases.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::HasSubstr;
using torch::Tensor;

const std::vector<torch::Dtype> kReduced = {
    torch::kFloat64, torch::kFloat32, torch::kBFloat16, torch::kFloat16,
    torch::kInt64,   torch::kInt32,   torch::kUInt8,    torch::kInt8};
const std::vector<int64_t> kNumels = {0, 1, 7, 1000, 20011};

/// Rank r's values: small whole numbers, so that every dtype sums them exactly.
Tensor values(int rank, int64_t numel, torch::Dtype dtype, const Place& at) {
  return ((torch::arange(numel) * 7 + rank * 3) % 11).to(at(dtype));
}

std::vector<Tensor>
all_values(int size, int64_t numel, torch::Dtype dtype, const Place& at) {
  std::vector<Tensor> all;
  for (int r = 0; r < size; ++r) all.push_back(values(r, numel, dtype, at));
  return all;
}

Tensor reduced(const std::vector<Tensor>& all, ReduceOp op) {
  const Tensor stacked = torch::stack(all).cpu().to(torch::kFloat64);
  switch (op) {
    case ReduceOp::sum:
      return stacked.sum(0);
    case ReduceOp::avg:
      return stacked.sum(0) / static_cast<double>(all.size());
    case ReduceOp::min:
      return std::get<0>(stacked.min(0));
    case ReduceOp::max:
      return std::get<0>(stacked.max(0));
  }
  return {};
}

void expect_equal(
    const Tensor& actual, const Tensor& expected, const std::string& what) {
  EXPECT_TRUE(
      torch::equal(actual.cpu(), expected.cpu().to(actual.scalar_type())))
      << what << " " << actual.dtype();
}

// On the host an average is the sum divided, and exact. GPUs multiply by 1 / n.
void expect_average(
    const Tensor& actual, const Tensor& expected, const std::string& what) {
  if (actual.is_cpu()) {
    expect_equal(actual, expected, what);
    return;
  }
  const double rounding = actual.scalar_type() == torch::kFloat64    ? 1e-15
                          : actual.scalar_type() == torch::kFloat32  ? 1e-6
                          : actual.scalar_type() == torch::kBFloat16 ? 0.02
                                                                     : 2e-3;
  EXPECT_TRUE(torch::allclose(
      actual.cpu().to(torch::kFloat64), expected.cpu(), rounding, rounding))
      << what << " " << actual.dtype();
}

void all_reduce(World& world, const Place& at) {
  const Group& group = world.group();
  for (torch::Dtype dtype : kReduced) {
    for (int64_t numel : kNumels) {
      for (ReduceOp op :
           {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max}) {
        if (op == ReduceOp::avg && !torch::isFloatingType(dtype)) continue;
        Tensor tensor = values(group.rank(), numel, dtype, at);
        group.all_reduce(tensor, op);
        const auto expect = op == ReduceOp::avg ? expect_average : expect_equal;
        expect(
            tensor, reduced(all_values(group.size(), numel, dtype, at), op),
            "all_reduce");
      }
    }
  }
}

void bool_is_or_and_and(World& world, const Place& at) {
  const Group& group = world.group();
  Tensor mine = torch::zeros({5}, at(torch::kBool));
  mine[group.rank()] = true;
  Tensor any = mine.clone();
  group.all_reduce(any, ReduceOp::sum);
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(any[i].item<bool>(), i < group.size());
  }
  Tensor all = mine.clone();
  group.all_reduce(all, ReduceOp::min);
  EXPECT_EQ(all.any().item<bool>(), group.size() == 1);
  Tensor everyone = torch::zeros({5 * group.size()}, at(torch::kBool));
  group.all_gather(everyone, mine);
  EXPECT_EQ(everyone.sum().item<int64_t>(), group.size());
}

void all_gather_and_reduce_scatter(World& world, const Place& at) {
  const Group& group = world.group();
  const int64_t size = group.size();
  for (torch::Dtype dtype : kReduced) {
    for (int64_t numel : kNumels) {
      const auto all = all_values(group.size(), numel, dtype, at);
      Tensor gathered = torch::full({size * numel}, 99, at(dtype));
      group.all_gather(gathered, all[static_cast<size_t>(group.rank())]);
      expect_equal(gathered, torch::cat(all), "all_gather");

      const auto wide = all_values(group.size(), numel * size, dtype, at);
      Tensor slice = torch::full({numel}, 99, at(dtype));
      group.reduce_scatter(slice, wide[static_cast<size_t>(group.rank())]);
      expect_equal(
          slice,
          reduced(wide, ReduceOp::sum).narrow(0, numel * group.rank(), numel),
          "reduce_scatter");
    }
  }
  // Numbers of elements count, not shapes.
  const Tensor mine =
      torch::full({2, 3}, group.rank() + 1.0, at(torch::kFloat32));
  const Tensor all = torch::arange(1, size + 1, at(torch::kFloat32));
  const Tensor rows = all.unsqueeze(1).expand({size, 6}).contiguous();
  for (const bool list : {false, true}) {
    Tensor gathered = torch::zeros({size, 6}, at(torch::kFloat32));
    Tensor slice = torch::zeros({3, 2}, at(torch::kFloat32));
    if (list) {
      group.all_gather(std::vector<Tensor>{gathered}, {mine});
      group.reduce_scatter(std::vector<Tensor>{slice}, {rows});
    } else {
      group.all_gather(gathered, mine);
      group.reduce_scatter(slice, rows);
    }
    expect_equal(gathered, rows, "all_gather of rows");
    const double sum = static_cast<double>(size) * (group.rank() + 1);
    expect_equal(
        slice, torch::full({3, 2}, sum, at(torch::kFloat32)),
        "reduce_scatter of rows");
  }
  Tensor average = torch::empty({3}, at(torch::kFloat64));
  group.reduce_scatter(
      average, torch::full({3 * size}, group.rank() + 1.0, at(torch::kFloat64)),
      ReduceOp::avg);
  expect_equal(
      average,
      torch::full(
          {3}, (static_cast<double>(size) + 1) / 2, at(torch::kFloat64)),
      "average");
}

void all_to_all_equal_and_unequal(World& world, const Place& at) {
  const Group& group = world.group();
  const int size = group.size();
  const int rank = group.rank();
  for (torch::Dtype dtype :
       {torch::kFloat32, torch::kInt64, torch::kBFloat16, torch::kBool}) {
    // Row i of rank r goes to rank i: it holds 10 r + i.
    Tensor in = (torch::arange(size) + 10 * rank)
                    .reshape({size, 1})
                    .expand({size, 5})
                    .contiguous()
                    .to(at(dtype));
    Tensor out = torch::zeros({size, 5}, at(dtype));
    group.all_to_all(out, in);
    Tensor expected =
        (torch::arange(size) * 10 + rank).reshape({size, 1}).expand({size, 5});
    expect_equal(out, expected, "all_to_all");

    // Rank r sends r + i rows to rank i, some of them none.
    std::vector<int64_t> send;
    std::vector<int64_t> receive;
    for (int i = 0; i < size; ++i) {
      send.push_back((rank + i) % 3);
      receive.push_back((rank + i) % 3);
    }
    int64_t rows_in = 0;
    int64_t rows_out = 0;
    for (int64_t s : send) rows_in += s;
    for (int64_t r : receive) rows_out += r;
    Tensor input = torch::full({rows_in, 4}, rank + 1).to(at(dtype));
    Tensor output = torch::zeros({rows_out, 4}, at(dtype));
    group.all_to_all(output, input, receive, send);
    int64_t row = 0;
    for (int i = 0; i < size; ++i) {
      const int64_t count = receive[static_cast<size_t>(i)];
      expect_equal(
          output.narrow(0, row, count), torch::full({count, 4}, i + 1),
          "unequal all_to_all");
      row += count;
    }
  }
}

void one_to_all_and_all_to_one(World& world, const Place& at) {
  const Group& group = world.group();
  const size_t me = static_cast<size_t>(group.rank());
  for (torch::Dtype dtype :
       {torch::kFloat64, torch::kFloat16, torch::kInt32, torch::kBool}) {
    for (int root = 0; root < group.size(); ++root) {
      const size_t source = static_cast<size_t>(root);
      const auto all = all_values(group.size(), 33, dtype, at);
      Tensor copy = all[me].clone();
      group.broadcast(copy, root);
      expect_equal(copy, all[source], "broadcast");

      std::vector<Tensor> outputs;
      if (group.rank() == root) {
        for (int i = 0; i < group.size(); ++i) {
          outputs.push_back(torch::zeros({33}, at(dtype)));
        }
      }
      group.gather(outputs, all[me], root);
      for (size_t i = 0; i < outputs.size(); ++i) {
        expect_equal(outputs[i], all[i], "gather");
      }

      Tensor part = torch::zeros({33}, at(dtype));
      group.scatter(
          part, group.rank() == root ? all : std::vector<Tensor>{}, root);
      expect_equal(part, all[me], "scatter");

      if (dtype == torch::kBool) continue;
      Tensor sum = all[me].clone();
      group.reduce(sum, root);
      if (group.rank() == root) {
        expect_equal(sum, reduced(all, ReduceOp::sum), "reduce");
      }
    }
  }
}

void send_and_receive(World& world, const Place& at) {
  const Group& group = world.group();
  const int size = group.size();
  if (size == 1) return;
  const int next = (group.rank() + 1) % size;
  const int previous = (group.rank() + size - 1) % size;
  for (int64_t numel : {0, 1, 1000, 300000}) {
    // Everybody sends before it receives, both tags at once.
    const Tensor one = values(group.rank(), numel, torch::kFloat32, at);
    const Tensor two = one + 100;
    Tensor got_one = torch::empty_like(one);
    Tensor got_two = torch::empty_like(two);
    group.batch_send_recv(
        {{true, two, next, 2},
         {true, one, next, 1},
         {false, got_one, previous, 1},
         {false, got_two, previous, 2}});
    const Tensor expected = values(previous, numel, torch::kFloat32, at);
    expect_equal(got_one, expected, "tag 1");
    expect_equal(got_two, expected + 100, "tag 2");
  }
  if (group.rank() == 0) {
    group.send(torch::ones({3}, at(torch::kInt64)), 1);
  } else if (group.rank() == 1) {
    Tensor received = torch::zeros({3}, at(torch::kInt64));
    group.recv(received, 0);
    expect_equal(received, torch::ones({3}), "recv");
  }
  group.barrier();
}

void many_in_flight(World& world, const Place& at) {
  const Group& group = world.group();
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 50; ++i) {
    tensors.push_back(
        values(group.rank(), 100 + i * 37, torch::kFloat32, at) + i);
    works.push_back(group.all_reduce(
        tensors.back(), i % 2 == 0 ? ReduceOp::sum : ReduceOp::avg,
        {.label = "tensor " + std::to_string(i), .async = true}));
  }
  for (size_t i = 50; i-- > 0;) {
    works[i].wait();
    works[i].wait();
    auto all =
        all_values(group.size(), tensors[i].numel(), torch::kFloat32, at);
    for (auto& tensor : all) tensor += static_cast<double>(i);
    const Tensor expected =
        reduced(all, i % 2 == 0 ? ReduceOp::sum : ReduceOp::avg);
    EXPECT_TRUE(
        torch::allclose(tensors[i].to(torch::kFloat64), expected, 1e-6));
    EXPECT_TRUE(works[i].done());  // the result has been read
  }
}

void each_kind_in_flight(World& world, const Place& at) {
  const Group& group = world.group();
  const int64_t size = group.size();
  const auto real = at(torch::kFloat32);
  const auto mine = torch::full({3}, group.rank() + 1.0, real);
  const auto wide = torch::full({3 * size}, group.rank() + 1.0, real);
  const Call call{.label = "in flight", .async = true};
  std::vector<Tensor> outs;
  for (const auto& like : {wide, wide, wide, wide, mine, mine, mine}) {
    outs.push_back(torch::zeros_like(like));
  }
  const Tensor copied = mine.clone();
  const Tensor reduced = mine.clone();
  std::vector<Work> works = {
      group.all_gather(outs[0], mine, call),
      group.reduce_scatter(outs[4], wide, ReduceOp::sum, call),
      group.all_gather({outs[1], outs[2]}, {mine, mine}, call),
      group.reduce_scatter(
          {outs[5], outs[6]}, {wide, wide}, ReduceOp::sum, call),
      group.all_to_all(outs[3], wide, {}, {}, call),
      group.broadcast(copied, 0, call),
      group.reduce(reduced, 0, ReduceOp::sum, call)};
  for (const auto& work : works) work.wait();
  const double sum = 3 * static_cast<double>(size * (size + 1)) / 2;
  for (const auto& out : outs) EXPECT_EQ(out.sum().item<double>(), sum);
  EXPECT_EQ(copied.sum().item<double>(), 3);
  if (group.rank() == 0) {
    EXPECT_EQ(reduced.sum().item<double>(), sum);
  }
}

void coalesced(World& world, const Place& at) {
  const Group& group = world.group();
  const int64_t size = group.size();
  std::vector<Tensor> tensors;
  for (int64_t numel : {3, 1, 500}) {
    tensors.push_back(values(group.rank(), numel, torch::kFloat64, at));
  }
  group.all_reduce(tensors, ReduceOp::avg);
  size_t i = 0;
  for (int64_t numel : {3, 1, 500}) {
    EXPECT_TRUE(torch::allclose(
        tensors[i++], reduced(
                          all_values(group.size(), numel, torch::kFloat64, at),
                          ReduceOp::avg)));
  }
  const auto real = at(torch::kFloat32);
  std::vector<Tensor> ins = {
      torch::full({4}, group.rank() + 1.0, real),
      torch::full({2}, group.rank() + 5.0, real)};
  std::vector<Tensor> outs = {
      torch::zeros({4 * size}, real), torch::zeros({2 * size}, real)};
  group.all_gather(outs, ins);
  for (int64_t r = 0; r < size; ++r) {
    EXPECT_EQ(outs[0][4 * r].item<float>(), r + 1);
    EXPECT_EQ(outs[1][2 * r + 1].item<float>(), r + 5);
  }
  std::vector<Tensor> slices = {
      torch::zeros({4}, real), torch::zeros({2}, real)};
  group.reduce_scatter(slices, outs);
  EXPECT_EQ(
      slices[0][0].item<float>(),
      static_cast<float>(size * (group.rank() + 1)));
  EXPECT_EQ(
      slices[1][1].item<float>(),
      static_cast<float>(size * (group.rank() + 5)));
}

void groups_of_some_ranks(World& world, const Place& at) {
  const int size = world.size();
  std::vector<int> even;
  std::vector<int> odd;
  for (int r = 0; r < size; ++r) (r % 2 == 0 ? even : odd).push_back(r);
  Group group = world.new_group("even", even);
  if (!odd.empty()) {
    Group other = world.new_group("odd", odd);
    if (world.rank() % 2 == 1) group = other;
  }
  std::vector<int> backwards;
  for (int r = size - 1; r >= 0; --r) backwards.push_back(r);
  const Group reversed = world.new_group("backwards", backwards);
  EXPECT_EQ(reversed.rank(), size - 1 - world.rank());

  Tensor sum = torch::full({1}, world.rank() + 1, at(torch::kInt64));
  group.all_reduce(sum);
  int64_t expected = 0;
  for (int r = world.rank() % 2; r < size; r += 2) expected += r + 1;
  EXPECT_EQ(sum.item<int64_t>(), expected);

  Tensor order = torch::zeros({size}, at(torch::kInt64));
  reversed.all_gather(order, torch::full({1}, world.rank(), at(torch::kInt64)));
  EXPECT_EQ(order[0].item<int64_t>(), size - 1);
}

void every_call_is_recorded(World& world, const Place& at) {
  const Group& group = world.group();
  const uint64_t before = world.history().count();
  group.all_reduce(
      torch::ones({2, 3}, at(torch::kFloat32)), ReduceOp::sum,
      {.label = "first"});
  Tensor tensor = torch::ones({4}, at(torch::kInt64));
  group.broadcast(tensor, 0);
  if (group.size() == 1) {
    EXPECT_EQ(world.history().count(), before);
    return;
  }
  ASSERT_EQ(world.history().count(), before + 2);
  const auto last_two = [&] {
    auto records = world.history().snapshot();
    records.erase(records.begin(), records.end() - 2);
    return records;
  };
  auto records = last_two();
  // Calls on a device end when the observer has asked the device.
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (at(torch::kFloat32).device().is_cuda() && records[1].end_ns == 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    records = last_two();
  }
  EXPECT_EQ(records[0].operation, "all_reduce");
  EXPECT_EQ(records[0].label, "first");
  EXPECT_EQ(records[0].axis, "world");
  EXPECT_EQ(records[0].dtype, "float32");
  EXPECT_THAT(records[0].shape, testing::ElementsAre(2, 3));
  EXPECT_EQ(records[0].bytes, 24);
  EXPECT_EQ(records[1].sequence, records[0].sequence + 1);
  for (const auto& record : records) {
    EXPECT_GE(record.end_ns, record.begin_ns);
    EXPECT_GT(record.end_ns, 0);
  }
}

void wrong_arguments_are_refused(World& world, const Place& at) {
  const Group& group = world.group();
  const int64_t size = group.size();
  const Tensor tensor = torch::ones({4, 4}, at(torch::kFloat32));
  const auto real = [&](int64_t numel) {
    return torch::ones({numel}, at(torch::kFloat32));
  };
  const auto whole = [&](int64_t numel) {
    return torch::ones({numel}, at(torch::kInt64));
  };
  const std::vector<std::pair<const char*, std::function<void()>>> refused = {
      {"not contiguous", [&] { group.all_reduce(tensor.t()); }},
      {"undefined", [&] { group.all_reduce(Tensor()); }},
      {"list of tensors is empty",
       [&] { group.all_reduce(std::vector<Tensor>{}); }},
      {"outside the group", [&] { group.broadcast(tensor, group.size()); }},
      {"outside the group", [&] { group.send(tensor, group.size()); }},
      {"outside the group", [&] { group.recv(tensor, -1); }},
      {"is this rank", [&] { group.send(tensor, group.rank()); }},
      {"needs an output of",
       [&] { group.all_gather(tensor.clone(), real(17)); }},
      {"needs an output of",
       [&] { group.reduce_scatter(real(3), real(size)); }},
      {"must agree", [&] { group.all_gather(whole(4 * size), real(4)); }},
      {"must agree", [&] { group.all_to_all(whole(size), real(size)); }},
      {"average of", [&] { group.all_reduce(whole(2), ReduceOp::avg); }},
      {"splits must be",
       [&] {
         group.all_to_all(tensor, tensor, {-1, 5}, {-1, 5});
       }},
      {"splits must be",
       [&] {
         group.all_to_all(real(size), real(size), {}, {size, size});
       }},
      {"different numbers", [&] {
         world.new_group("x", {0, 0});
       }}};
  for (const auto& [text, call] : refused) {
    EXPECT_THAT(error_text<ConfigError>(call), HasSubstr(text));
  }
  if (size > 1) {
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { group.reduce_scatter(real(1), real(size + 1)); }),
        HasSubstr("does not divide into"));
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { group.all_to_all(real(size), real(size + 1)); }),
        HasSubstr("does not divide along dim 0"));
  }
  group.all_reduce(tensor);
  EXPECT_EQ(tensor[0][0].item<float>(), static_cast<float>(size));
}

// One rank alone makes every call. If anything were sent, it would wait for
// ever.
void meta_tensors_send_nothing(World& world, const Place& at) {
  const Group& group = world.group();
  const uint64_t before = world.history().count();
  if (group.rank() == group.size() - 1) {
    const auto meta = torch::dtype(torch::kFloat32).device(torch::kMeta);
    const int64_t size = group.size();
    const auto part = torch::empty({3, 2}, meta);
    const auto whole = torch::empty({3 * size, 2}, meta);
    group.all_reduce(part, ReduceOp::avg, {.async = true}).wait();
    group.all_gather(whole, part);
    group.reduce_scatter(part, whole);
    group.all_to_all(whole, whole);
    group.broadcast(part, 0);
    group.reduce(part, 0);
    group.gather(
        group.rank() == 0 ? std::vector<Tensor>{part} : std::vector<Tensor>{},
        part, 0);
    group.scatter(
        part,
        group.rank() == 0 ? std::vector<Tensor>{part} : std::vector<Tensor>{},
        0);
    group.all_reduce(std::vector<Tensor>{part, whole});
    group.all_gather(std::vector<Tensor>{whole}, std::vector<Tensor>{part});
    group.reduce_scatter(std::vector<Tensor>{part}, std::vector<Tensor>{whole});
    if (size > 1) {
      group.send(part, 0);
      group.recv(part, 0);
      group.batch_send_recv(
          {{.tensor = part, .peer = 0},
           {.send = false, .tensor = part, .peer = 0}});
    }
    // The arguments are checked nevertheless.
    EXPECT_THROW(
        group.all_gather(torch::empty({99, 2}, meta), part), ConfigError);
    EXPECT_THROW(group.all_reduce(whole.t()), ConfigError);
    const Tensor real = torch::ones({3, 2}, at(torch::kFloat32));
    EXPECT_THROW(group.reduce_scatter(real, whole), ConfigError);
  }
  group.barrier();
  // The barrier alone.
  EXPECT_LE(world.history().count(), before + 1);
}

}  // namespace

torch::TensorOptions Place::operator()(torch::Dtype dtype) const {
  return torch::TensorOptions(dtype).device(device);
}

const std::vector<CollectiveCase>& collective_cases() {
  static const std::vector<CollectiveCase> cases = {
      {"AllReduce", all_reduce},
      {"BoolIsOrAndAnd", bool_is_or_and_and},
      {"AllGatherAndReduceScatter", all_gather_and_reduce_scatter},
      {"AllToAllEqualAndUnequal", all_to_all_equal_and_unequal},
      {"OneToAllAndAllToOne", one_to_all_and_all_to_one},
      {"SendAndReceive", send_and_receive},
      {"ManyInFlight", many_in_flight},
      {"EachKindInFlight", each_kind_in_flight},
      {"Coalesced", coalesced},
      {"GroupsOfSomeRanks", groups_of_some_ranks},
      {"EveryCallIsRecorded", every_call_is_recorded},
      {"WrongArgumentsAreRefusedBeforeAnythingIsSent",
       wrong_arguments_are_refused},
      {"MetaTensorsSendNothing", meta_tensors_send_nothing},
  };
  return cases;
}

}  // namespace echelon
