#include "echelon/kernels/kernel_source.h"

#include <c10/core/DeviceGuard.h>

#include <cstdio>
#include <string_view>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/layers/computing_device.h"

namespace echelon::kernels {

namespace sources {
extern const std::string_view numbers_cu;
extern const std::string_view elementwise_cu;
extern const std::string_view embedding_cu;
extern const std::string_view norm_cu;
extern const std::string_view update_cu;
extern const std::string_view vocab_loss_cu;
extern const std::string_view fp8_cu;
}  // namespace sources

namespace {

KernelSource after_numbers(const char* file, std::string_view text) {
  return {file, std::string(sources::numbers_cu).append(text)};
}

std::string warning_of(const KernelSource& source, const std::string& reason) {
  return "the GPU kernels of " + source.file + " cannot be used: " + reason +
         "\nLibTorch's operators compute instead. Results are the same up to "
         "rounding, but norms, rotary positions, SwiGLU, GELU, dropout, "
         "rounding to 8 bits, embeddings, the loss over a vocabulary and "
         "updates, where their kernels are missing, pass over memory several "
         "times: steps are slower and may need more memory.";
}

}  // namespace

const KernelSource& elementwise_source() {
  static const auto source =
      after_numbers("elementwise.cu", sources::elementwise_cu);
  return source;
}

const KernelSource& embedding_source() {
  static const auto source =
      after_numbers("embedding.cu", sources::embedding_cu);
  return source;
}

const KernelSource& norm_source() {
  static const auto source = after_numbers("norm.cu", sources::norm_cu);
  return source;
}

const KernelSource& update_source() {
  static const auto source = after_numbers("update.cu", sources::update_cu);
  return source;
}

const KernelSource& vocab_loss_source() {
  static const auto source =
      after_numbers("vocab_loss.cu", sources::vocab_loss_cu);
  return source;
}

const KernelSource& fp8_source() {
  static const auto source = after_numbers("fp8.cu", sources::fp8_cu);
  return source;
}

bool KernelChoices::use(
    const KernelSource& source, int gpu,
    const std::function<std::string()>& prepare) {
  std::unique_lock lock(mutex_);
  Choice& choice = choices_[{&source, gpu}];
  lock.unlock();
  const std::lock_guard one(choice.mutex);
  if (choice.used) return *choice.used;
  const std::string reason = prepare();
  choice.used = reason.empty();
  if (*choice.used) return true;
  lock.lock();
  refused_.insert(&source);
  const bool first = said_.insert(reason).second;
  lock.unlock();
  if (first) say_(warning_of(source, reason));
  return false;
}

bool KernelChoices::usable_so_far(const KernelSource& source) {
  const std::lock_guard lock(mutex_);
  return !refused_.contains(&source);
}

void KernelChoices::forget() {
  const std::lock_guard lock(mutex_);
  choices_.clear();
  refused_.clear();
  said_.clear();
}

KernelChoices& kernel_choices() {
  // Leaked: threads may still compute when static objects are destroyed.
  static auto* const choices = new KernelChoices([](const std::string& text) {
    std::fprintf(stderr, "warning: %s\n", text.c_str());
  });
  return *choices;
}

bool uses_kernels(const KernelSource& source, const torch::Tensor& like) {
  if (computing_device(like) != torch::kCUDA) return false;
  if (like.is_meta()) return kernel_choices().usable_so_far(source);
  return kernel_choices().use(source, like.device().index(), [&] {
    const c10::DeviceGuard guard(like.device());
    return prepare_kernels(source.text);
  });
}

}  // namespace echelon::kernels
