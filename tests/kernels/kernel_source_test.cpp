#include "echelon/kernels/kernel_source.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "echelon/counting/meta_mode.h"
#include "echelon/kernels/elementwise.h"
#include "echelon/kernels/norm.h"
#include "echelon/kernels/vocab_loss.h"
#include "echelon/layers/computing_device.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/kernels/nvcc.h"
#include "tests/support/error_text.h"

namespace echelon::kernel_source_test {

using kernels::KernelChoices;
using kernels::KernelSource;
using testing::Contains;
using testing::IsEmpty;
using testing::SizeIs;
using torch::Tensor;

const KernelSource kNorms{"norm.cu", "a"};
const KernelSource kLosses{"vocab_loss.cu", "b"};

struct Choosing {
  std::vector<std::string> said;
  KernelChoices choices{
      [this](const std::string& text) { said.push_back(text); }};
  int prepared = 0;

  bool use(const KernelSource& source, int gpu, const std::string& reason) {
    return choices.use(source, gpu, [&] {
      ++prepared;
      return reason;
    });
  }
};

TEST(KernelChoices, PrepareEachSourceOnceOnEachGpu) {
  Choosing one;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(one.use(kNorms, 0, ""));
    EXPECT_TRUE(one.use(kNorms, 1, ""));
    EXPECT_TRUE(one.use(kLosses, 0, ""));
  }
  EXPECT_EQ(one.prepared, 3);
  EXPECT_THAT(one.said, IsEmpty());
  EXPECT_TRUE(one.choices.usable_so_far(kNorms));
}

TEST(KernelChoices, StayAsTheyWereAndAreSaidOnce) {
  Choosing one;
  const std::string reason = "NVRTC is missing\ninstall it";
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(one.use(kNorms, 0, i == 0 ? reason : ""));
    EXPECT_FALSE(one.use(kNorms, 1, reason));
    EXPECT_FALSE(one.use(kLosses, 0, reason));
  }
  EXPECT_EQ(one.prepared, 3);
  ASSERT_THAT(one.said, SizeIs(1));
  EXPECT_THAT(
      one.said[0],
      HasAll(
          "norm.cu cannot be used: NVRTC is missing\ninstall it\n",
          "LibTorch's operators compute instead", "steps are slower"));
  EXPECT_FALSE(one.use(kLosses, 1, "kernel.cu(3): error"));
  ASSERT_THAT(one.said, SizeIs(2));
  EXPECT_THAT(one.said[1], HasAll("vocab_loss.cu", "kernel.cu(3): error"));
}

TEST(KernelChoices, OtherErrorsArePassedOnAndAskedAgain) {
  Choosing one;
  for (int i = 0; i < 2; ++i) {
    const auto text = error_text<std::runtime_error>([&] {
      one.choices.use(kNorms, 0, []() -> std::string {
        throw std::runtime_error("CUDA out of memory");
      });
    });
    EXPECT_EQ(text, "CUDA out of memory");
  }
  EXPECT_TRUE(one.choices.usable_so_far(kNorms));
  EXPECT_TRUE(one.use(kNorms, 0, ""));
  EXPECT_THAT(one.said, IsEmpty());
}

// Preparing on one GPU may wait for a rank that prepares on another.
TEST(KernelChoices, GpusDoNotWaitForEachOther) {
  Choosing one;
  std::atomic<int> arrived = 0;
  std::vector<std::thread> ranks;
  for (int gpu = 0; gpu < 4; ++gpu) {
    ranks.emplace_back([&, gpu] {
      one.choices.use(kNorms, gpu, [&]() -> std::string {
        ++arrived;
        while (arrived < 4) std::this_thread::yield();
        return "no";
      });
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(one.said, SizeIs(1));
}

TEST(UsesKernels, AsksForNoneOnCpus) {
  EXPECT_FALSE(
      kernels::uses_kernels(kernels::norm_source(), torch::ones({2, 8})));
  EXPECT_FALSE(kernels::takes_dropout_mask(torch::ones({2, 8})));
}

// Which operators of ours run, forward and backward, in layers that have
// kernels. The tensors have no numbers and stand for a GPU's.
std::multiset<std::string> our_operators() {
  const CountedFor gpu(torch::kCUDA);
  static std::mutex mutex;
  static std::multiset<std::string> ran;
  ran.clear();
  const auto callback = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& call)
          -> std::unique_ptr<at::ObserverContext> {
        const std::string name = call.name();
        if (name.starts_with("echelon::")) {
          const std::lock_guard lock(mutex);
          ran.insert(name.substr(9));
        }
        return nullptr;
      }));
  const auto like = torch::dtype(torch::kBFloat16).device(torch::kMeta);
  const auto make = [&](at::IntArrayRef sizes) {
    return torch::empty(sizes, like).requires_grad_(true);
  };
  const auto back = [](const Tensor& y) { y.backward(torch::empty_like(y)); };
  const auto integers = torch::dtype(torch::kInt64).device(torch::kMeta);

  LayerList layers;
  const auto add_norm = [&]<class Norm>(const char* name, const Norm*) {
    layers.add(
        name,
        [] {
          auto norm = std::make_shared<Norm>(64, 1e-5, TensorParallel{});
          norm->to(torch::kBFloat16);
          return norm;
        },
        [](Norm& norm, const Tensor& x) { return norm.forward(x); });
  };
  add_norm("rms", static_cast<const RMSNorm*>(nullptr));
  add_norm("layer", static_cast<const LayerNorm*>(nullptr));
  for (size_t i = 0; i < 2; ++i) {
    const auto module = counting::build_on_meta(layers[i]).module;
    const auto x = make({2, 3, 64}), added = make({2, 3, 64});
    if (auto* rms = dynamic_cast<RMSNorm*>(module.get())) {
      back(rms->forward_sum(x, added).norm);
    } else {
      back(dynamic_cast<LayerNorm&>(*module).forward_sum(x, added).norm);
    }
  }
  back(silu_times(make({2, 3, 64}), make({2, 3, 64})));
  back(gelu_with_bias(make({2, 3, 64}), make({64})));
  back(dropout(
      make({2, 3, 64}), torch::empty({2}, integers),
      {.probability = 0.1, .stream = 1}));
  const auto angles = torch::empty({3, 8}, like.dtype(torch::kFloat32));
  back(rotate(make({2, 3, 4, 16}), {angles, angles}));
  const auto parts =
      rotate_queries_and_keys(make({2, 3, 6, 16}), 4, 1, {angles, angles});
  torch::autograd::backward(
      {parts[0], parts[1], parts[2]},
      {torch::empty_like(parts[0]), torch::empty_like(parts[1]),
       torch::empty_like(parts[2])});
  LayerList tables;
  tables.add(
      "table",
      [] {
        auto table = std::make_shared<VocabParallelEmbedding>(
            64, 16, TensorParallel{}, "wte");
        table->to(torch::kBFloat16);
        return table;
      },
      [](VocabParallelEmbedding& table, const Tensor& ids) {
        return table.forward(ids);
      });
  const auto table = counting::build_on_meta(tables[0]).module;
  back(dynamic_cast<VocabParallelEmbedding&>(*table).forward(
      torch::empty({2, 3}, integers)));
  back(vocab_cross_entropy(
      make({2, 3, 64}), torch::empty({2, 3}, integers), 64, {}));
  at::removeCallback(callback);
  return ran;
}

TEST(UsesKernels, ForwardAndBackwardRunTheKernelsOrLibTorchsOperators) {
  auto& choices = kernels::kernel_choices();
  choices.forget();
  const auto with_kernels = our_operators();
  for (const auto& [name, count] : std::vector<std::pair<std::string, int>>{
           {"residual_norm", 2},
           {"residual_norm_gradient", 2},
           {"swiglu", 1},
           {"swiglu_gradient", 1},
           {"gelu", 1},
           {"gelu_gradient", 1},
           {"dropout_mask", 1},
           {"dropout", 2},
           {"rotate", 4},
           {"embedding_gradient", 1},
           {"vocab_sums", 1},
           {"vocab_gradient", 1}}) {
    EXPECT_EQ(with_kernels.count(name), count) << name;
  }
  testing::internal::CaptureStderr();
  for (const auto* source :
       {&kernels::elementwise_source(), &kernels::embedding_source(),
        &kernels::norm_source(), &kernels::vocab_loss_source()}) {
    EXPECT_FALSE(choices.use(*source, 0, [] { return "NVRTC is missing"; }));
  }
  EXPECT_THAT(our_operators(), IsEmpty());
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("warning: "), 0);
  EXPECT_EQ(said.rfind("warning: "), 0) << said;
  choices.forget();
}

// As CUDA's own calculator (cuda_occupancy.h) says.
TEST(Occupancy, IsWhatTheScarcestResourceAllows) {
  const auto& [a100, h100, b200, consumer] = kMultiprocessors;
  EXPECT_EQ(occupancy(h100, 512, 32, 4096), 100);
  EXPECT_EQ(occupancy(h100, 512, 74, 4100), 25);
  EXPECT_EQ(occupancy(a100, 256, 80, 0), 37);
  EXPECT_EQ(occupancy(b200, 256, 48, 8196), 62);
  EXPECT_EQ(occupancy(consumer, 512, 74, 4100), 33);
  EXPECT_EQ(occupancy(consumer, 256, 48, 8196), 83);
  EXPECT_EQ(occupancy(h100, 64, 16, 40000), 15);  // by shared memory
  EXPECT_EQ(occupancy(consumer, 64, 16, 40000), 8);
  EXPECT_EQ(occupancy(h100, 32, 16, 0), 50);  // by the number of blocks
}

}  // namespace echelon::kernel_source_test
