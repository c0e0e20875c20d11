// The text that NVRTC compiles for GPUs, compiled for the host.
#include "echelon/kernels/update.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "echelon/counting/meta_mode.h"
#include "echelon/counting/operator_work.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/update_table.h"
#include "echelon/layers/computing_device.h"
#include "echelon/optim/optimizer.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"
#include "tests/support/error_text.h"

namespace echelon::host_kernels {
#include "echelon/kernels/update.cu"
}  // namespace echelon::host_kernels

namespace echelon::update_kernel_test {

namespace host = host_kernels;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

static_assert(host::kUpdateTensors == kernels::kUpdateTensors);
static_assert(host::kUpdateElements == kernels::kUpdateElements);

// The kernels take the table and the numbers by their bytes.
template <class To, class From>
To same_bytes(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(to));
  return to;
}

struct Way {
  std::string name;
  int states = 0;
  double rate = 1e-2;
  kernels::SgdSettings sgd = {};
  kernels::AdamSettings adam = {};
};

std::vector<Way> ways() {
  const kernels::AdamSettings plain{
      .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  auto decayed = plain, decoupled = plain, without = plain;
  decayed.weight_decay = decoupled.weight_decay = 0.1;
  decoupled.decoupled = true;
  without.beta1 = without.beta2 = 0;
  without.epsilon = 1e-3;
  return {
      {.name = "sgd"},
      {.name = "sgd, decay", .sgd = {.weight_decay = 0.1}},
      {.name = "momentum",
       .states = 1,
       .sgd = {.momentum = 0.9, .weight_decay = 0.1}},
      {.name = "nesterov",
       .states = 1,
       .sgd = {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}},
      {.name = "adam", .states = 2, .adam = plain},
      {.name = "adam, decay", .states = 2, .adam = decayed},
      {.name = "adam, no memory", .states = 2, .adam = without},
      {.name = "adamw", .states = 2, .adam = decoupled}};
}

// Parameters, gradients and states, a list of each, and numbers of steps.
struct Tensors {
  std::vector<Tensor> parameters, gradients, first, second, steps;

  Tensors copy() const {
    Tensors to;
    const auto all = {
        std::pair(&parameters, &to.parameters),
        std::pair(&gradients, &to.gradients), std::pair(&first, &to.first),
        std::pair(&second, &to.second), std::pair(&steps, &to.steps)};
    for (const auto& [mine, theirs] : all) {
      // Clones begin at an address of 64 bytes; the copies keep their offsets.
      for (const auto& x : *mine) {
        const auto room = torch::empty({x.numel() + 8}, x.options());
        const auto place = room.narrow(0, x.storage_offset(), x.numel());
        theirs->push_back(place.view(x.sizes()).copy_(x));
      }
    }
    return to;
  }
};

// `offset`: of each tensor from a multiple of 16 bytes, in elements.
Tensors make(
    torch::Dtype dtype, const std::vector<int64_t>& sizes, int64_t offset,
    int64_t steps = 3) {
  Tensors all;
  const auto at = [&](const Tensor& values) {
    const auto room = torch::full({values.numel() + 8}, 7, dtype);
    return room.narrow(0, offset, values.numel()).copy_(values);
  };
  for (const int64_t size : sizes) {
    all.parameters.push_back(at(torch::randn({size})));
    all.gradients.push_back(at(torch::randn({size})));
    all.first.push_back(at(torch::randn({size}) * 0.1));
    all.second.push_back(at(torch::rand({size})));
    all.steps.push_back(torch::full({}, steps, torch::kFloat32));
  }
  return all;
}

struct Here {
  Tensor rate, factor, skip;
};

template <class T>
void launch(const Way& way, const Tensors& all, const Here& here, int threads) {
  const auto number = [](const Tensor& x) {
    return x.defined() ? x.const_data_ptr<float>() : nullptr;
  };
  const host::DeviceNumbers numbers = {
      number(here.rate), number(here.factor), number(here.skip)};
  const kernels::UpdateLists lists{
      .parameters = all.parameters,
      .gradients = all.gradients,
      .first = way.states > 0 ? at::TensorList(all.first) : at::TensorList(),
      .second = way.states > 1 ? at::TensorList(all.second) : at::TensorList(),
      .steps = way.states > 1 ? at::TensorList(all.steps) : at::TensorList()};
  kernels::for_each_table(
      lists, [&](const kernels::UpdatedTensors& given, int64_t blocks) {
        const auto table = same_bytes<host::UpdatedTensors<T>>(given);
        host::launch_in_turn(blocks, threads, [&] {
          if (way.states == 2) {
            host::update<T, host::Adam>(
                table,
                same_bytes<host::AdamNumbers>(
                    kernels::adam_numbers(way.rate, way.adam)),
                numbers);
            return;
          }
          const auto sgd = same_bytes<host::SgdNumbers>(
              kernels::sgd_numbers(way.rate, way.sgd));
          if (way.states == 1) {
            host::update<T, host::Sgd<true>>(table, sgd, numbers);
          } else {
            host::update<T, host::Sgd<false>>(table, sgd, numbers);
          }
        });
      });
}

void run(
    const Way& way, const Tensors& all, const Here& here = {},
    int threads = 16) {
  const auto dtype = all.parameters.front().scalar_type();
  const auto run = dtype == torch::kFloat32    ? launch<float>
                   : dtype == torch::kBFloat16 ? launch<host::BFloat16>
                                               : launch<host::Half>;
  run(way, all, here, threads);
}

struct Exact {
  Tensor parameter, first, second;
};

// What the papers say, in float64; the rate is the kernels'.
Exact exact_of(
    const Way& way, const Tensors& all, size_t i, double factor = 1) {
  const auto wide = [](const Tensor& x) { return x.to(torch::kFloat64); };
  auto p = wide(all.parameters[i]), g = factor * wide(all.gradients[i]);
  auto m = wide(all.first[i]), v = wide(all.second[i]);
  const double rate = static_cast<float>(way.rate);
  if (way.states < 2) {
    g = g + way.sgd.weight_decay * p;
    m = way.sgd.momentum * m + g;
    auto d = way.states == 0 ? g : m;
    if (way.sgd.nesterov) d = g + way.sgd.momentum * m;
    return {p - rate * d, m, v};
  }
  const auto& adam = way.adam;
  const auto steps = all.steps[i].item<double>();
  if (adam.decoupled) {
    p = p - rate * adam.weight_decay * p;
  } else {
    g = g + adam.weight_decay * p;
  }
  m = adam.beta1 * m + (1 - adam.beta1) * g;
  v = adam.beta2 * v + (1 - adam.beta2) * g * g;
  const auto mean = m / (1 - std::pow(adam.beta1, steps));
  const auto square = v / (1 - std::pow(adam.beta2, steps));
  return {p - rate * mean / (square.sqrt() + adam.epsilon), m, v};
}

// Rounding to the nearest, and some of float32's on the way.
double rounding_of(torch::Dtype dtype) {
  return dtype == torch::kFloat32    ? 6e-7
         : dtype == torch::kBFloat16 ? 0x1p-8
                                     : 0x1p-11;
}

void expect_near(const Tensor& found, const Tensor& exact, const char* what) {
  EXPECT_TRUE(torch::allclose(
      found.to(torch::kFloat64), exact, rounding_of(found.scalar_type()) + 1e-6,
      3e-7))
      << what << "\n"
      << (found.to(torch::kFloat64) - exact).abs().max();
}

void compare(const Way& way, const Tensors& start, double factor = 1) {
  const auto all = start.copy();
  const auto scalar = torch::full({}, factor, torch::kFloat32);
  run(way, all, {.factor = factor == 1 ? Tensor() : scalar});
  for (size_t i = 0; i < all.parameters.size(); ++i) {
    const auto exact = exact_of(way, start, i, scalar.item<double>());
    SCOPED_TRACE(
        way.name + ", " + torch::toString(start.parameters[i].dtype()) + " " +
        std::to_string(start.parameters[i].numel()) + " from " +
        std::to_string(start.parameters[i].storage_offset()));
    expect_near(all.parameters[i], exact.parameter, "parameter");
    if (way.states > 0) expect_near(all.first[i], exact.first, "first");
    if (way.states > 1) expect_near(all.second[i], exact.second, "second");
    // Gradients and numbers of steps are only read.
    EXPECT_TRUE(all.gradients[i].equal(start.gradients[i]));
    EXPECT_EQ(all.steps[i].item<float>(), start.steps[i].item<float>());
  }
}

const torch::Dtype kDtypes[] = {
    torch::kFloat32, torch::kBFloat16, torch::kHalf};

TEST(UpdateKernels, ComputeWhatFloat64DoesForEverySizeAndAlignment) {
  torch::manual_seed(1);
  for (const auto dtype : kDtypes) {
    for (const auto& way : ways()) {
      for (const int64_t offset : {0, 1, 4}) {
        compare(
            way, make(dtype, {1, 3, 0, 8, 4095, 4096, 4097, 0, 9001}, offset));
      }
      compare(way, make(dtype, {777}, 0), 0.37);
    }
  }
}

// The corrections of the first steps keep their digits.
TEST(UpdateKernels, CorrectTheMeansOfEveryStep) {
  torch::manual_seed(2);
  for (const auto& way : ways()) {
    if (way.states < 2) continue;
    for (const int64_t steps : {1, 2, 100, 10'000, 10'000'000}) {
      compare(way, make(torch::kFloat32, {100}, 0, steps));
    }
  }
}

// More than one table has, in tensors of one block and of several.
TEST(UpdateKernels, TakeAnyNumberOfTensors) {
  torch::manual_seed(3);
  for (const int64_t count : {63, 64, 65, 150}) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < count; ++i) {
      sizes.push_back(i % 5 == 0 ? 0 : i % 7 == 0 ? 4096 + i : 3 * i);
    }
    for (const auto& way : ways()) {
      compare(way, make(torch::kBFloat16, sizes, 0));
    }
  }
  int tables = 0;
  const auto all = make(torch::kFloat32, std::vector<int64_t>(150, 5000), 0);
  kernels::for_each_table(
      {all.parameters, all.gradients, {}, {}, {}},
      [&](const kernels::UpdatedTensors& table, int64_t blocks) {
        ++tables;
        EXPECT_EQ(blocks, 2 * table.count);
        EXPECT_LE(table.count, kernels::kUpdateTensors);
      });
  EXPECT_EQ(tables, 3);
}

// Memory before a tensor's beginning and after its end stays.
TEST(UpdateKernels, WriteNothingElse) {
  for (const auto dtype : kDtypes) {
    for (const int64_t offset : {0, 3}) {
      const auto all = make(dtype, {4096 + 5}, offset);
      run(ways().back(), all);
      for (const auto& list : {all.parameters, all.first, all.second}) {
        const auto room =
            list[0].as_strided({4096 + 5 + 8}, {1}, /*storage_offset=*/0);
        EXPECT_TRUE(room.narrow(0, 0, offset).eq(7).all().item<bool>());
        EXPECT_TRUE(room.narrow(0, offset + 4096 + 5, 8 - offset)
                        .eq(7)
                        .all()
                        .item<bool>());
      }
    }
  }
}

// A tensor whose last elements alone have memory: those behind the 2^31st.
TEST(UpdateKernels, IndexMoreElementsThan32BitsDo) {
  torch::manual_seed(4);
  const Way way = ways().back();
  const auto numbers =
      same_bytes<host::AdamNumbers>(kernels::adam_numbers(way.rate, way.adam));
  for (const int64_t begin : {int64_t{1} << 31, int64_t{1} << 33}) {
    const int64_t behind = begin + 3 * kernels::kUpdateElements;
    const auto all = make(torch::kFloat32, {100}, 0), start = all.copy();
    const auto before = [&](const std::vector<Tensor>& list) {
      return host::begin_of_huge(list[0].data_ptr<float>(), behind);
    };
    const host::Updated<float> one = {before(all.parameters),
                                      before(all.gradients),
                                      before(all.first),
                                      before(all.second),
                                      all.steps[0].data_ptr<float>(),
                                      behind + 100};
    const auto block = static_cast<int>(behind / kernels::kUpdateElements);
    const host::Adam rule(numbers, numbers.rate, one.step);
    host::launch_in_turn(
        1, 16, [&] { host::update_block<float>(one, block, 1, rule); });
    expect_near(
        all.parameters[0], exact_of(way, start, 0).parameter, "parameter");
  }
}

TEST(UpdateKernels, ASkippedStepLeavesEveryBit) {
  for (const auto dtype : kDtypes) {
    for (const auto& way : ways()) {
      const auto all = make(dtype, {5000, 17}, 0), start = all.copy();
      all.gradients[0].fill_(NAN);
      run(way, all, {.factor = torch::full({}, NAN), .skip = torch::ones({})});
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(all.parameters[i].equal(start.parameters[i])) << way.name;
        EXPECT_TRUE(all.first[i].equal(start.first[i])) << way.name;
        EXPECT_TRUE(all.second[i].equal(start.second[i])) << way.name;
      }
      all.gradients[0].copy_(start.gradients[0]);
      run(way, all, {.skip = torch::zeros({})});
      run(way, start);
      EXPECT_TRUE(all.parameters[0].equal(start.parameters[0])) << way.name;
      EXPECT_FALSE(all.parameters[0].equal(all.gradients[0]));
    }
  }
}

// The same bits as a pass over the gradients before the update would give.
TEST(UpdateKernels, AFactorMultipliesTheGradientsFirst) {
  torch::manual_seed(5);
  for (const auto& way : ways()) {
    for (const float factor : {0.37F, 0x1p-16F}) {
      const auto folded = make(torch::kFloat32, {5000, 17}, 0);
      const auto before = folded.copy();
      for (auto& gradient : before.gradients) {
        gradient.mul_(1 / 0x1p-16F);  // so that it counts
      }
      const auto scaled = before.copy();
      for (auto& gradient : scaled.gradients) gradient.mul_(factor);
      run(way, before, {.factor = torch::full({}, factor)});
      run(way, scaled);
      EXPECT_TRUE(before.parameters[0].equal(scaled.parameters[0])) << way.name;
      EXPECT_TRUE(before.first[1].equal(scaled.first[1])) << way.name;
      EXPECT_FALSE(before.parameters[0].equal(folded.parameters[0]));
    }
  }
}

// A graph reads the rate on the device, an eager step gets it from the host.
TEST(UpdateKernels, GiveTheSameBitsWhereverTheRateIsAndHoweverManyThreads) {
  torch::manual_seed(6);
  for (const auto dtype : kDtypes) {
    for (auto way : ways()) {
      const auto eager = make(dtype, {5000, 17}, 0);
      const auto captured = eager.copy();
      run(way, eager);
      const auto rate = torch::full({}, way.rate, torch::kFloat32);
      way.rate = 123;
      run(way, captured, {.rate = rate}, /*threads=*/64);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(captured.parameters[i].equal(eager.parameters[i]));
        EXPECT_TRUE(captured.first[i].equal(eager.first[i]));
        EXPECT_TRUE(captured.second[i].equal(eager.second[i]));
      }
    }
  }
}

void run_libtorchs(const Way& way, const Tensors& all) {
  if (way.states < 2) {
    at::_fused_sgd_(
        all.parameters, all.gradients,
        way.states == 0 ? at::TensorList() : all.first, way.sgd.weight_decay,
        way.sgd.momentum, way.rate, 0, way.sgd.nesterov, false, false);
    return;
  }
  const auto kernel = way.adam.decoupled ? &at::_ops::_fused_adamw_::call
                                         : &at::_ops::_fused_adam_::call;
  kernel(
      all.parameters, all.gradients, all.first, all.second, {}, all.steps,
      way.rate, way.adam.beta1, way.adam.beta2, way.adam.weight_decay,
      way.adam.epsilon, false, false, std::nullopt, std::nullopt);
}

// LibTorch's kernels for CPUs: a run of some steps, and one step in 16 bits.
TEST(UpdateKernels, FollowLibTorchs) {
  torch::manual_seed(7);
  for (const auto& way : ways()) {
    const auto ours = make(torch::kFloat32, {1000}, 0, 0);
    for (const auto& list : {ours.first, ours.second}) list[0].zero_();
    const auto theirs = ours.copy();
    for (int step = 0; step < 20; ++step) {
      const auto gradient = torch::randn({1000});
      for (const auto& all : {ours, theirs}) {
        all.steps[0].add_(1);
        all.gradients[0].copy_(gradient);
      }
      run(way, ours);
      run_libtorchs(way, theirs);
      EXPECT_TRUE(
          torch::allclose(ours.parameters[0], theirs.parameters[0], 1e-6, 1e-6))
          << way.name << " " << step << "\n"
          << (ours.parameters[0] - theirs.parameters[0]).abs().max();
    }
    if (way.states < 2)
      continue;  // LibTorch's for SGD has a bug: optimizer.cpp
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      const auto low = make(dtype, {1000}, 0), other = low.copy();
      run(way, low);
      run_libtorchs(way, other);
      const auto wide = other.parameters[0].to(torch::kFloat64);
      // One rounding of each.
      EXPECT_TRUE(torch::allclose(
          low.parameters[0].to(torch::kFloat64), wide, 2 * rounding_of(dtype),
          1e-6))
          << way.name << dtype;
    }
  }
}

// The operators of an optimizer's step for parameters that stand for a GPU's,
// and the bytes of those that move some for each element.
struct Counted {
  std::vector<std::string> ours;
  double bytes = 0;
};
Counted counted_step(OptimizerKind kind, double momentum, torch::Dtype dtype) {
  struct Observer : counting::detail::OperatorObserver {
    Counted counted;
    bool counts_whole(const std::string&) const override { return false; }
    void
    ran(const std::string& op, const std::vector<c10::IValue>& arguments,
        at::ArrayRef<c10::IValue> results) override {
      if (op.starts_with("echelon::")) counted.ours.push_back(op.substr(9));
      for (const auto& work : counting::operator_work(op, arguments, results)) {
        if (work.bytes > 1e4) counted.bytes += work.bytes;
      }
    }
  } observer;
  const CountedFor gpu(torch::kCUDA);
  const auto like = torch::dtype(dtype).device(torch::kMeta);
  OptimizerOptions options;
  options.name = kind;
  options.momentum = momentum;
  NamedTensors parameters;
  for (int i = 0; i < 3; ++i) {
    auto parameter = torch::empty({100, 1000}, like).set_requires_grad(true);
    parameter.mutable_grad() = torch::empty({100, 1000}, like);
    parameters.emplace_back("p" + std::to_string(i), parameter);
  }
  const auto optimizer = make_optimizer(options, parameters);
  const auto number = torch::dtype(torch::kFloat32).device(torch::kMeta);
  const counting::detail::MetaMode mode(&observer);
  optimizer->step(torch::empty({}, number), torch::empty({}, number));
  return observer.counted;
}

TEST(UpdateKernels, MoveTheLeastBytesThatAnUpdateCan) {
  auto& choices = kernels::kernel_choices();
  choices.forget();
  struct Case {
    OptimizerKind kind;
    double momentum;
    const char* kernel;
    double reads, writes;  // elements: of gradient, parameter and state
  };
  for (const Case& one :
       {Case{OptimizerKind::adamw, 0, "adam_update_", 4, 3},
        Case{OptimizerKind::adam, 0, "adam_update_", 4, 3},
        Case{OptimizerKind::sgd, 0.9, "sgd_update_", 3, 2},
        Case{OptimizerKind::sgd, 0, "sgd_update_", 2, 1}}) {
    for (const auto dtype : kDtypes) {
      const auto step = counted_step(one.kind, one.momentum, dtype);
      EXPECT_THAT(step.ours, ElementsAre(one.kernel));
      const auto element = static_cast<double>(c10::elementSize(dtype));
      const double least = (one.reads + one.writes) * element;
      const double moved = step.bytes / 300'000;
      std::printf(
          "%-14s %-10s %5.2f bytes an element, %5.2f at least\n", one.kernel,
          c10::toString(dtype), moved, least);
      EXPECT_NEAR(moved, least, 0.01);
    }
  }
  // LibTorch's operators, which know no meta tensors, compute elsewhere; those
  // of 16 and 32 bits multiply the gradients first.
  const auto libtorchs = [](torch::Dtype dtype) {
    return error_text<c10::Error>(
        [&] { counted_step(OptimizerKind::adamw, 0, dtype); });
  };
  EXPECT_THAT(libtorchs(torch::kFloat64), HasSubstr("aten::_fused_adamw_"));
  testing::internal::CaptureStderr();
  EXPECT_FALSE(choices.use(
      kernels::update_source(), 0, [] { return "NVRTC is missing"; }));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("update.cu"));
  EXPECT_THAT(
      libtorchs(torch::kFloat32),
      HasSubstr("aten::_amp_foreach_non_finite_check_and_unscale_"));
  choices.forget();
}

// With CUDA's compiler, where there is one.
TEST(UpdateKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("update.cu", host::kUpdateThreads);
}

}  // namespace echelon::update_kernel_test
