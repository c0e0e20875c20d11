// The files of CUDA C++, and whether their kernels are used. Where they cannot
// be compiled or loaded, LibTorch's operators compute instead.
#pragma once

#include <torch/types.h>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace echelon::kernels {

struct KernelSource {
  std::string file;
  std::string text;  // numbers.cu and the file
};

const KernelSource& elementwise_source();
const KernelSource& embedding_source();
const KernelSource& norm_source();
const KernelSource& update_source();
const KernelSource& vocab_loss_source();
const KernelSource& fp8_source();

/// What was found about each source on each GPU.
class KernelChoices {
 public:
  using Say = std::function<void(const std::string&)>;

  /// `say` gets a warning for each reason why kernels are not used, once.
  explicit KernelChoices(Say say) : say_(std::move(say)) {}

  /// Whether the kernels are used. The first call for a source and a GPU calls
  /// `prepare`, which returns why the kernels cannot be used there, or nothing.
  /// Later calls return the same: forward and backward compute alike. What
  /// `prepare` throws is passed on, and the next call calls it again.
  bool
  use(const KernelSource& source, int gpu,
      const std::function<std::string()>& prepare);

  /// False once the kernels cannot be used on some GPU.
  bool usable_so_far(const KernelSource& source);

  /// Forgets all that was found and said.
  void forget();

 private:
  struct Choice {
    std::mutex mutex;  // preparing may wait for this GPU, but for no other
    std::optional<bool> used;
  };

  Say say_;
  std::mutex mutex_;  // of what follows
  std::map<std::pair<const KernelSource*, int>, Choice> choices_;
  std::set<const KernelSource*> refused_;
  std::set<std::string> said_;
};

/// The process's choices; warnings go to standard error.
KernelChoices& kernel_choices();

/// Whether kernels of `source` compute on the GPU of `like`. They are compiled
/// and loaded at the first call. For a meta tensor that stands for a GPU's:
/// usable_so_far(). False for a tensor of another device.
bool uses_kernels(const KernelSource& source, const torch::Tensor& like);

}  // namespace echelon::kernels
