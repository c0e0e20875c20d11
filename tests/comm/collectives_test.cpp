// The suite that every backend passes: each collective, dtype and world size
// against values computed on one rank. nccl runs it with the label gpu.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/comm/world.h"
#include "echelon/error.h"

namespace echelon {
namespace {

using testing::HasSubstr;
using torch::Tensor;

struct Case {
  BackendKind backend;
  int size;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const char* name =
      info.param.backend == BackendKind::local ? "local" : "gloo";
  return std::string(name) + "_" + std::to_string(info.param.size);
}

class Collectives : public testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size; }
  void run(const std::function<void(World&)>& body) const {
    CommOptions options;
    options.backend = GetParam().backend;
    options.timeout = std::chrono::seconds(60);
    run_ranks(size(), body, options);
  }
};

const std::vector<torch::Dtype> kReduced = {
    torch::kFloat64, torch::kFloat32, torch::kBFloat16, torch::kFloat16,
    torch::kInt64,   torch::kInt32,   torch::kUInt8,    torch::kInt8};
const std::vector<int64_t> kNumels = {0, 1, 7, 1000, 20011};

/// Rank r's values: small whole numbers, so that every dtype sums them exactly.
Tensor values(int rank, int64_t numel, torch::Dtype dtype) {
  return ((torch::arange(numel) * 7 + rank * 3) % 11).to(dtype);
}

std::vector<Tensor> all_values(int size, int64_t numel, torch::Dtype dtype) {
  std::vector<Tensor> all;
  for (int r = 0; r < size; ++r) all.push_back(values(r, numel, dtype));
  return all;
}

Tensor reduced(const std::vector<Tensor>& all, ReduceOp op) {
  const Tensor stacked = torch::stack(all).to(torch::kFloat64);
  switch (op) {
    case ReduceOp::sum: return stacked.sum(0);
    case ReduceOp::avg: return stacked.sum(0) / static_cast<double>(all.size());
    case ReduceOp::min: return std::get<0>(stacked.min(0));
    case ReduceOp::max: return std::get<0>(stacked.max(0));
  }
  return {};
}

void expect_equal(const Tensor& actual, const Tensor& expected,
                  const std::string& what) {
  EXPECT_TRUE(torch::equal(actual, expected.to(actual.dtype())))
      << what << " " << actual.dtype();
}

TEST_P(Collectives, AllReduce) {
  run([](World& world) {
    const Group& group = world.group();
    for (torch::Dtype dtype : kReduced) {
      for (int64_t numel : kNumels) {
        for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min,
                            ReduceOp::max}) {
          if (op == ReduceOp::avg && !torch::isFloatingType(dtype)) continue;
          Tensor tensor = values(group.rank(), numel, dtype);
          group.all_reduce(tensor, op);
          expect_equal(
              tensor, reduced(all_values(group.size(), numel, dtype), op),
              "all_reduce");
        }
      }
    }
  });
}

TEST_P(Collectives, BoolIsOrAndAnd) {
  run([](World& world) {
    const Group& group = world.group();
    Tensor mine = torch::zeros({5}, torch::kBool);
    mine[group.rank()] = true;
    Tensor any = mine.clone();
    group.all_reduce(any, ReduceOp::sum);
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(any[i].item<bool>(), i < group.size());
    }
    Tensor all = mine.clone();
    group.all_reduce(all, ReduceOp::min);
    EXPECT_EQ(all.any().item<bool>(), group.size() == 1);
    Tensor everyone = torch::zeros({5 * group.size()}, torch::kBool);
    group.all_gather(everyone, mine);
    EXPECT_EQ(everyone.sum().item<int64_t>(), group.size());
  });
}

TEST_P(Collectives, AllGatherAndReduceScatter) {
  run([](World& world) {
    const Group& group = world.group();
    const int64_t size = group.size();
    for (torch::Dtype dtype : kReduced) {
      for (int64_t numel : kNumels) {
        const auto all = all_values(group.size(), numel, dtype);
        Tensor gathered = torch::full({size * numel}, 99).to(dtype);
        group.all_gather(gathered, all[static_cast<size_t>(group.rank())]);
        expect_equal(gathered, torch::cat(all), "all_gather");

        const auto wide = all_values(group.size(), numel * size, dtype);
        Tensor slice = torch::full({numel}, 99).to(dtype);
        group.reduce_scatter(slice, wide[static_cast<size_t>(group.rank())]);
        expect_equal(
            slice,
            reduced(wide, ReduceOp::sum)
                .narrow(0, numel * group.rank(), numel),
            "reduce_scatter");
      }
    }
    Tensor average = torch::empty({3}, torch::kFloat64);
    group.reduce_scatter(
        average,
        torch::full({3 * size}, group.rank() + 1.0, torch::kFloat64),
        ReduceOp::avg);
    expect_equal(
        average,
        torch::full({3}, (static_cast<double>(size) + 1) / 2, torch::kFloat64),
        "average");
  });
}

TEST_P(Collectives, AllToAllEqualAndUnequal) {
  run([](World& world) {
    const Group& group = world.group();
    const int size = group.size();
    const int rank = group.rank();
    for (torch::Dtype dtype : {torch::kFloat32, torch::kInt64,
                               torch::kBFloat16, torch::kBool}) {
      // Row i of rank r goes to rank i: it holds 10 r + i.
      Tensor in = (torch::arange(size) + 10 * rank)
                      .reshape({size, 1}).expand({size, 5}).contiguous()
                      .to(dtype);
      Tensor out = torch::zeros({size, 5}, torch::TensorOptions(dtype));
      group.all_to_all(out, in);
      Tensor expected = (torch::arange(size) * 10 + rank)
                            .reshape({size, 1}).expand({size, 5});
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
      Tensor input = torch::full({rows_in, 4}, rank + 1).to(dtype);
      Tensor output = torch::zeros({rows_out, 4}, torch::TensorOptions(dtype));
      group.all_to_all(output, input, receive, send);
      int64_t row = 0;
      for (int i = 0; i < size; ++i) {
        const int64_t count = receive[static_cast<size_t>(i)];
        expect_equal(output.narrow(0, row, count),
                     torch::full({count, 4}, i + 1), "unequal all_to_all");
        row += count;
      }
    }
  });
}

TEST_P(Collectives, OneToAllAndAllToOne) {
  run([](World& world) {
    const Group& group = world.group();
    const size_t me = static_cast<size_t>(group.rank());
    for (torch::Dtype dtype : {torch::kFloat64, torch::kFloat16,
                               torch::kInt32, torch::kBool}) {
      for (int root = 0; root < group.size(); ++root) {
        const size_t at = static_cast<size_t>(root);
        const auto all = all_values(group.size(), 33, dtype);
        Tensor copy = all[me].clone();
        group.broadcast(copy, root);
        expect_equal(copy, all[at], "broadcast");

        std::vector<Tensor> outputs;
        if (group.rank() == root) {
          for (int i = 0; i < group.size(); ++i) {
            outputs.push_back(torch::zeros({33}, torch::TensorOptions(dtype)));
          }
        }
        group.gather(outputs, all[me], root);
        for (size_t i = 0; i < outputs.size(); ++i) {
          expect_equal(outputs[i], all[i], "gather");
        }

        Tensor part = torch::zeros({33}, torch::TensorOptions(dtype));
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
  });
}

TEST_P(Collectives, SendAndReceive) {
  run([](World& world) {
    const Group& group = world.group();
    const int size = group.size();
    if (size == 1) return;
    const int next = (group.rank() + 1) % size;
    const int previous = (group.rank() + size - 1) % size;
    for (int64_t numel : {0, 1, 1000, 300000}) {
      // Everybody sends before it receives, both tags at once.
      const Tensor one = values(group.rank(), numel, torch::kFloat32);
      const Tensor two = one + 100;
      Tensor got_one = torch::empty_like(one);
      Tensor got_two = torch::empty_like(two);
      group.batch_send_recv({{true, two, next, 2},
                             {true, one, next, 1},
                             {false, got_one, previous, 1},
                             {false, got_two, previous, 2}});
      const Tensor expected = values(previous, numel, torch::kFloat32);
      expect_equal(got_one, expected, "tag 1");
      expect_equal(got_two, expected + 100, "tag 2");
    }
    if (group.rank() == 0) {
      group.send(torch::ones({3}, torch::kInt64), 1);
    } else if (group.rank() == 1) {
      Tensor received = torch::zeros({3}, torch::kInt64);
      group.recv(received, 0);
      expect_equal(received, torch::ones({3}), "recv");
    }
    group.barrier();
  });
}

TEST_P(Collectives, ManyInFlight) {
  run([](World& world) {
    const Group& group = world.group();
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 50; ++i) {
      tensors.push_back(values(group.rank(), 100 + i * 37, torch::kFloat32) + i);
      works.push_back(group.all_reduce(
          tensors.back(), i % 2 == 0 ? ReduceOp::sum : ReduceOp::avg,
          {.label = "tensor " + std::to_string(i), .async = true}));
    }
    for (size_t i = 50; i-- > 0;) {
      works[i].wait();
      works[i].wait();
      EXPECT_TRUE(works[i].done());
      auto all = all_values(group.size(), tensors[i].numel(), torch::kFloat32);
      for (auto& tensor : all) tensor += static_cast<double>(i);
      const Tensor expected = reduced(
          all, i % 2 == 0 ? ReduceOp::sum : ReduceOp::avg);
      EXPECT_TRUE(torch::allclose(
          tensors[i].to(torch::kFloat64), expected, 1e-6));
    }
  });
}

TEST_P(Collectives, Coalesced) {
  run([](World& world) {
    const Group& group = world.group();
    const int64_t size = group.size();
    std::vector<Tensor> tensors;
    for (int64_t numel : {3, 1, 500}) {
      tensors.push_back(values(group.rank(), numel, torch::kFloat64));
    }
    group.all_reduce(tensors, ReduceOp::avg);
    size_t i = 0;
    for (int64_t numel : {3, 1, 500}) {
      EXPECT_TRUE(torch::allclose(
          tensors[i++], reduced(all_values(group.size(), numel,
                                           torch::kFloat64), ReduceOp::avg)));
    }
    std::vector<Tensor> ins = {torch::full({4}, group.rank() + 1.0),
                               torch::full({2}, group.rank() + 5.0)};
    std::vector<Tensor> outs = {torch::zeros({4 * size}),
                                torch::zeros({2 * size})};
    group.all_gather(outs, ins);
    for (int64_t r = 0; r < size; ++r) {
      EXPECT_EQ(outs[0][4 * r].item<float>(), r + 1);
      EXPECT_EQ(outs[1][2 * r + 1].item<float>(), r + 5);
    }
    std::vector<Tensor> slices = {torch::zeros({4}), torch::zeros({2})};
    group.reduce_scatter(slices, outs);
    EXPECT_EQ(slices[0][0].item<float>(),
              static_cast<float>(size * (group.rank() + 1)));
    EXPECT_EQ(slices[1][1].item<float>(),
              static_cast<float>(size * (group.rank() + 5)));
  });
}

TEST_P(Collectives, GroupsOfSomeRanks) {
  run([](World& world) {
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

    Tensor sum = torch::full({1}, world.rank() + 1, torch::kInt64);
    group.all_reduce(sum);
    int64_t expected = 0;
    for (int r = world.rank() % 2; r < size; r += 2) expected += r + 1;
    EXPECT_EQ(sum.item<int64_t>(), expected);

    Tensor order = torch::zeros({size}, torch::kInt64);
    reversed.all_gather(order, torch::full({1}, world.rank(), torch::kInt64));
    EXPECT_EQ(order[0].item<int64_t>(), size - 1);
  });
}

TEST_P(Collectives, EveryCallIsRecorded) {
  run([](World& world) {
    const Group& group = world.group();
    group.all_reduce(torch::ones({2, 3}), ReduceOp::sum, {.label = "first"});
    Tensor tensor = torch::ones({4}, torch::kInt64);
    group.broadcast(tensor, 0);
    if (group.size() == 1) {
      EXPECT_EQ(world.history().count(), 0u);
      return;
    }
    const auto records = world.history().snapshot();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].operation, "all_reduce");
    EXPECT_EQ(records[0].label, "first");
    EXPECT_EQ(records[0].axis, "world");
    EXPECT_EQ(records[0].dtype, "float32");
    EXPECT_THAT(records[0].shape, testing::ElementsAre(2, 3));
    EXPECT_EQ(records[0].bytes, 24);
    EXPECT_EQ(records[1].sequence, 1u);
    for (const auto& record : records) {
      EXPECT_GE(record.end_ns, record.begin_ns);
      EXPECT_GT(record.end_ns, 0);
    }
  });
}

TEST_P(Collectives, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  run([](World& world) {
    const Group& group = world.group();
    const auto error_of = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const ConfigError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    Tensor tensor = torch::ones({4, 4});
    EXPECT_THAT(error_of([&] { group.all_reduce(tensor.t()); }),
                HasSubstr("not contiguous"));
    EXPECT_THAT(error_of([&] { group.all_reduce(Tensor()); }),
                HasSubstr("undefined"));
    EXPECT_THAT(error_of([&] { group.broadcast(tensor, group.size()); }),
                HasSubstr("outside the group"));
    EXPECT_THAT(error_of([&] { group.all_gather(tensor.clone(),
                                                torch::ones({17})); }),
                HasSubstr("needs an output of"));
    EXPECT_THAT(
        error_of([&] {
          group.all_gather(torch::ones({4 * group.size()}, torch::kInt64),
                           torch::ones({4}));
        }),
        HasSubstr("must agree"));
    EXPECT_THAT(error_of([&] {
                  group.all_reduce(torch::ones({2}, torch::kInt64),
                                   ReduceOp::avg);
                }),
                HasSubstr("average of"));
    EXPECT_THAT(error_of([&] {
                  group.all_to_all(tensor, tensor, {-1, 5}, {-1, 5});
                }),
                HasSubstr("splits must be"));
    EXPECT_THAT(error_of([&] { group.send(tensor, group.rank()); }),
                HasSubstr("is this rank"));
    EXPECT_THAT(error_of([&] { world.new_group("x", {0, 0}); }),
                HasSubstr("different numbers"));
    group.all_reduce(tensor);
    EXPECT_EQ(tensor[0][0].item<float>(), static_cast<float>(group.size()));
  });
}

std::vector<Case> cases(BackendKind backend) {
  std::vector<Case> all;
  for (int size : {1, 2, 3, 4}) all.push_back({backend, size});
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    Local, Collectives, testing::ValuesIn(cases(BackendKind::local)), name_of);
INSTANTIATE_TEST_SUITE_P(
    Gloo, Collectives, testing::ValuesIn(cases(BackendKind::gloo)), name_of);

}  // namespace
}  // namespace echelon
