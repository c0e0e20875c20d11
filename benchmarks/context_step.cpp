// What attention over cut sequences costs beside its own products.
//
//   context_step [--ranks N] [--tokens T] [--heads H] [--size D] [--rounds R]
//                [--backend local|gloo]
//
// Forward and backward of causal attention over a sequence of T tokens, cut
// over N ranks of one thread each, in each way. "products alone" computes the
// same blocks with the fused kernel and sends nothing. Ranks are threads of
// this process. A ratio is a variant's time over that of the products in the
// same round (time_in_turn.h).
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/time_in_turn.h"
#include "echelon/comm/world.h"
#include "echelon/parallel/context/attention.h"

namespace {

using namespace echelon;
using torch::Tensor;

struct Settings {
  int ranks = 2;
  int64_t tokens = 4096;
  int64_t heads = 8;
  int64_t size = 64;
  int rounds = 15;
  CommOptions comm;
};

// The blocks of a rank as one after the other gives them to the kernel.
void products(
    const ContextParallel& context, int64_t sequence, const Tensor& query,
    const Tensor& key, const Tensor& value) {
  const auto q = query.transpose(1, 2);
  const auto own = context.pieces_of(sequence);
  for (int owner = 0; owner < context.size(); ++owner) {
    for (const auto& block : echelon::detail::score_blocks(
             own, context.pieces_of(sequence, owner), /*merged=*/true)) {
      const auto rows = q.narrow(2, block.rows.begin, block.rows.size());
      const auto part = [&](const Tensor& x) {
        return x.transpose(1, 2).narrow(
            2, block.columns.begin, block.columns.size());
      };
      const auto k = part(key), v = part(value);
      const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
          rows, k, v, 0.0, block.causal);
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          out, rows, k, v, out, lse, 0.0, block.causal);
    }
  }
}

void run(const Settings& settings, World& world) {
  at::set_num_threads(1);
  const auto random = [&](int64_t tokens) {
    return torch::randn({1, tokens, settings.heads, settings.size});
  };
  const ContextParallel ring{world.group(), {ContextWay::ring}};
  const int64_t own = ring.length_of(settings.tokens);
  const auto q = random(own).requires_grad_();
  const auto k = random(own).requires_grad_();
  const auto v = random(own).requires_grad_();
  const auto up = random(own);
  ContextAttentionCall call{.sequence = settings.tokens, .label = "attn"};
  for (int64_t head = 0; head < settings.heads; ++head) {
    call.kv_of_query.push_back(head);
  }
  // Each clears the gradients that the one before it has made.
  const auto clear = [&] {
    for (const auto& leaf : {q, k, v}) leaf.mutable_grad() = Tensor();
  };
  std::vector<Variant> variants;
  variants.push_back({"products alone", [&] {
                        clear();
                        const torch::NoGradGuard no_grad;
                        products(ring, settings.tokens, q, k, v);
                      }});
  for (const auto way :
       {ContextWay::ring, ContextWay::all_gather, ContextWay::ulysses}) {
    if (way == ContextWay::ulysses && settings.heads < world.size()) continue;
    variants.push_back(
        {to_string(way), [&, way] {
           clear();
           const ContextParallel context{world.group(), {way}};
           context_attention(q, k, v, context, call).backward(up);
         }});
  }
  const auto times =
      time_in_turn(variants, settings.rounds, [&] { world.group().barrier(); });
  if (world.rank() != 0) return;
  for (const auto& one : times) {
    std::printf(
        "%-15s %8.2f ms  ratio %.3f (%.3f to %.3f)\n", one.name.c_str(),
        1e3 * quantile(one.seconds, 0.5), quantile(one.ratios, 0.5),
        quantile(one.ratios, 0.1), quantile(one.ratios, 0.9));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments(argc, argv);
    arguments.allow(
        {"--ranks", "--tokens", "--heads", "--size", "--rounds", "--backend"});
    Settings settings;
    const auto set = [&](const char* name, auto& value) {
      if (arguments.has(name)) {
        value =
            static_cast<std::decay_t<decltype(value)>>(arguments.integer(name));
      }
    };
    set("--ranks", settings.ranks);
    set("--tokens", settings.tokens);
    set("--heads", settings.heads);
    set("--size", settings.size);
    set("--rounds", settings.rounds);
    if (arguments.has("--backend") && arguments.text("--backend") == "gloo") {
      settings.comm.backend = BackendKind::gloo;
    }
    run_ranks(
        settings.ranks, [&](World& world) { run(settings, world); },
        settings.comm);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "context_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
