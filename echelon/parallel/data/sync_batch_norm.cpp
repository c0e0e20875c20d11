// Each rank computes the mean, variance and count of its own batch; one
// all-gather brings them together, and every rank merges them in rank order, so
// the running statistics have the same bits everywhere. Backward sums two
// values per channel over the ranks.
//
// Modules of LibTorch are converted without replacing them: a kernel for
// aten::batch_norm looks up the call's running mean (or weight) in a table and,
// for a converted module in training, runs sync_batch_norm instead.
#include "echelon/parallel/data/sync_batch_norm.h"

#include <ATen/ops/batch_norm_native.h>
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "echelon/error.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

// Statistics of a batch, per channel; C is the number of channels, R of ranks.
struct Statistics {
  Tensor mean_C;
  Tensor variance_C;  // biased
  Tensor count;       // values per channel, a float64 scalar
};

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// The dtype of sums.
torch::Dtype sum_dtype(const Tensor& input) {
  return input.scalar_type() == torch::kFloat64 ? torch::kFloat64
                                                : torch::kFloat32;
}

// A parameter in the dtype of the statistics, as the kernels take it: float32
// when the input has low precision.
Tensor as_statistics(const Tensor& parameter, const Tensor& statistics) {
  return parameter.defined() && statistics.defined()
             ? parameter.to(statistics.scalar_type())
             : parameter;
}

Statistics local_statistics(const Tensor& input) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(sum_dtype(input));
  const auto counted = [&](int64_t values) {
    return torch::full(
        {}, static_cast<double>(values), options.dtype(torch::kFloat64));
  };
  const int64_t count = channels == 0 ? 0 : input.numel() / channels;
  if (count == 0) {
    return {
        torch::zeros({channels}, options), torch::zeros({channels}, options),
        counted(0)};
  }
  // Only their dtype matters: the result has it.
  const auto unread = torch::zeros({channels}, options);
  auto [mean, variance] =
      at::batch_norm_update_stats(input, unread, unread.clone(), 0.0);
  return {
      mean.to(options.dtype()), variance.to(options.dtype()), counted(count)};
}

// Throws DataError for less than two values; on a GPU it is an assertion on the
// device, without waiting.
void check_count(const Tensor& count, const Group& group) {
  if (!count.is_cpu()) {
    at::_assert_async(
        count.ge(2), "[sync batch norm] less than two values per channel");
  } else if (count.item<double>() < 2) {
    throw DataError(format(
        "[sync batch norm] the {} ranks of axis {} have {} values per channel "
        "together; training needs more than one",
        group.size(), group.axis(), count.item<double>()));
  }
}

// Merges means and variances of all ranks in rank order, in float64. There is
// no sum of squares, so nothing cancels. Source: Chan, Golub, LeVeque, 1979.
Statistics global_statistics(const Statistics& local, const Group& group) {
  const int64_t channels = local.mean_C.numel();
  const auto options = local.mean_C.options().dtype(torch::kFloat64);
  const Tensor own = torch::cat(
      {local.mean_C.to(torch::kFloat64), local.variance_C.to(torch::kFloat64),
       local.count.reshape({1})});
  const Tensor all_R = torch::empty({group.size() * own.numel()}, options);
  group.all_gather(all_R, own, {.label = "batch norm"}).wait();
  const Tensor rows = all_R.view({group.size(), own.numel()});
  const Tensor mean_RC = rows.narrow(1, 0, channels);
  const Tensor variance_RC = rows.narrow(1, channels, channels);
  const Tensor count_R1 = rows.narrow(1, 2 * channels, 1);
  const Tensor count = count_R1.sum();
  check_count(count, group);
  const Tensor share_R1 = count_R1 / count;
  const Tensor mean_C = (share_R1 * mean_RC).sum(0);
  const Tensor variance_C =
      (share_R1 * (variance_RC + (mean_RC - mean_C).square())).sum(0);
  return {
      mean_C.to(local.mean_C.dtype()), variance_C.to(local.mean_C.dtype()),
      count};
}

// This is one operator, so that selective recompute keeps the result and does
// not communicate again.
Statistics batch_statistics(const Tensor& input, const Group& group) {
  const auto results =
      profiling::as_one_operator("echelon::batch_statistics", [&] {
        const auto all = global_statistics(local_statistics(input), group);
        return std::vector<Tensor>{all.mean_C, all.variance_C, all.count};
      });
  return {results[0], results[1], results[2]};
}

void update_running(
    const Tensor& running, const Tensor& statistic, double momentum) {
  if (!running.defined()) return;
  running.mul_(1.0 - momentum).add_(statistic.to(running.dtype()), momentum);
}

// [C] -> [1, C, 1, …]
Tensor per_channel(const Tensor& values_C, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = values_C.numel();
  return values_C.view(shape);
}

std::optional<Tensor> optional(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// Runs the fused kernel of evaluation with the given statistics.
Tensor normalise(
    const Tensor& input, const Tensor& weight, const Tensor& bias,
    const Statistics& statistics, double eps) {
  if (input.numel() == 0) return torch::empty_like(input);
  return std::get<0>(at::native_batch_norm(
      input, optional(weight), optional(bias), statistics.mean_C,
      statistics.variance_C,
      /*training=*/false, 0.0, eps));
}

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(Group group) : group(std::move(group)) {}
  Group group;
};

class Normalise : public torch::autograd::Function<Normalise> {
 public:
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& input,
      const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
      const Tensor& mean_C, const Tensor& variance_C, const Tensor& count,
      double eps, const Group& group) {
    context->save_for_backward(
        {input, weight.value_or(Tensor()), mean_C, variance_C, count});
    context->saved_data["eps"] = eps;
    context->saved_data["group"] =
        c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(group));
    return normalise(
        input, weight.value_or(Tensor()), bias.value_or(Tensor()),
        {mean_C, variance_C, count}, eps);
  }

  // With xhat = (x - mean) / sigma and means over the global batch:
  //   dx = weight / sigma * (dy - mean(dy) - xhat * mean(dy * xhat))
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    if (torch::GradMode::is_enabled()) {
      throw ConfigError(
          "[sync batch norm] backward with create_graph: it cannot be "
          "differentiated twice; use BatchNorm where second derivatives are "
          "needed");
    }
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const Tensor &mean_C = saved[2], &variance_C = saved[3];
    const double eps = context->saved_data["eps"].toDouble();
    const Tensor& count = saved[4];
    const auto capsule = context->saved_data["group"].toCapsule();
    const Group& group = static_cast<const GroupHolder&>(*capsule).group;

    const Tensor dy = grads[0].contiguous(x.suggest_memory_format());
    const Tensor inverse_C = (variance_C + eps).rsqrt();
    const auto dims = all_but_channels(x);
    const auto dtype = mean_C.scalar_type();
    const Tensor xhat =
        (x.to(dtype) - per_channel(mean_C, x)) * per_channel(inverse_C, x);
    const Tensor sum_dy_C = dy.sum(dims, false, dtype);
    const Tensor sum_dy_xhat_C = (dy * xhat).sum(dims, false, dtype);

    Tensor dx;
    // All ranks take part in the sum, also those that need no dx.
    const Tensor sums = torch::cat({sum_dy_C, sum_dy_xhat_C});
    group.all_reduce(sums, ReduceOp::sum, {.label = "batch norm backward"})
        .wait();
    if (context->needs_input_grad(0)) {
      const int64_t channels = x.size(1);
      Tensor scale_C = inverse_C;
      if (weight.defined()) scale_C = scale_C * weight.to(dtype);
      const Tensor mean_dy = sums.narrow(0, 0, channels) / count;
      const Tensor mean_dy_xhat = sums.narrow(0, channels, channels) / count;
      dx = (dy - per_channel(mean_dy, x) - xhat * per_channel(mean_dy_xhat, x))
               .mul(per_channel(scale_C, x))
               .to(x.dtype());
    }
    // These are the sums of this rank alone: data parallelism reduces them with
    // all other gradients.
    const auto to_weight = [&](const Tensor& sum_C) {
      return weight.defined() ? sum_C.to(weight.dtype()) : sum_C.to(x.dtype());
    };
    return {
        dx,
        context->needs_input_grad(1) ? to_weight(sum_dy_xhat_C) : Tensor(),
        context->needs_input_grad(2) ? to_weight(sum_dy_C) : Tensor(),
        Tensor(),
        Tensor(),
        Tensor(),
        Tensor(),
        Tensor()};
  }
};

}  // namespace

Tensor sync_batch_norm(
    const Tensor& input, const Tensor& weight, const Tensor& bias,
    const Tensor& running_mean, const Tensor& running_var, double momentum,
    double eps, const Group& group) {
  if (input.dim() < 2) {
    throw ConfigError(format(
        "[sync batch norm] the input has {} dimensions; [N, C, …] is expected",
        input.dim()));
  }
  Statistics statistics;
  {
    torch::NoGradGuard no_grad;
    statistics = batch_statistics(input, group);
    const Tensor& n = statistics.count;
    update_running(running_mean, statistics.mean_C, momentum);
    // Running variances are unbiased, as those of PyTorch are.
    update_running(
        running_var, statistics.variance_C * (n / (n - 1)), momentum);
  }
  return Normalise::apply(
      input, optional(as_statistics(weight, statistics.mean_C)),
      optional(as_statistics(bias, statistics.mean_C)), statistics.mean_C,
      statistics.variance_C, statistics.count, eps, group);
}

// -------------------------------------------------------------------- module

SyncBatchNormImpl::SyncBatchNormImpl(
    const torch::nn::BatchNormOptions& options, Group group)
    : NormImplBase(options), group_(std::move(group)) {}

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == options.num_features()) return;
  std::ostringstream sizes;
  sizes << input.sizes();
  throw ConfigError(format(
      "[sync batch norm] the input is {}, but [N, C, …] with C={} channels is "
      "expected",
      sizes.str(), options.num_features()));
}

// Follows the forward of torch::nn's BatchNorm modules.
Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  _check_input_dim(input);
  const bool training = is_training();
  double momentum = options.momentum().value_or(0.0);
  if (training && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) {
      momentum = 1.0 / num_batches_tracked.item<double>();
    }
  }
  if (training && group_.size() > 1) {
    return sync_batch_norm(
        input, weight, bias, running_mean, running_var, momentum, options.eps(),
        group_);
  }
  return torch::batch_norm(
      input, as_statistics(weight, running_mean),
      as_statistics(bias, running_mean), running_mean, running_var,
      training || !options.track_running_stats(), momentum, options.eps(),
      /*cudnn_enabled=*/true);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "echelon::SyncBatchNorm("
         << options.num_features() << ", eps=" << options.eps()
         << ", axis=" << group_.axis() << ", ranks=" << group_.size() << ")";
}

// ---------------------------------------------------------------- conversion

namespace {

struct Converted {
  std::weak_ptr<torch::nn::Module> module;
  Group group;
};

// Converted modules, by the tensor that identifies their calls. One table for
// the process, whose threads may be ranks.
class Conversions {
 public:
  void
  add(const Tensor& key, const std::shared_ptr<torch::nn::Module>& module,
      const Group& group) {
    std::lock_guard lock(mutex_);
    table_.insert_or_assign(
        key.unsafeGetTensorImpl(), Converted{module, group});
    size_ = table_.size();
  }

  void remove(const Tensor& key) {
    std::lock_guard lock(mutex_);
    table_.erase(key.unsafeGetTensorImpl());
    size_ = table_.size();
  }

  /// The group of a converted module that is in training.
  std::optional<Group> find(const std::optional<Tensor>& key) const {
    if (size_ == 0 || !key.has_value() || !key->defined()) return std::nullopt;
    std::lock_guard lock(mutex_);
    const auto found = table_.find(key->unsafeGetTensorImpl());
    if (found == table_.end()) return std::nullopt;
    const auto module = found->second.module.lock();
    if (!module || !module->is_training()) return std::nullopt;
    return found->second.group;
  }

 private:
  mutable std::mutex mutex_;
  std::map<c10::TensorImpl*, Converted> table_;
  std::atomic<size_t> size_ = 0;
};

Conversions& conversions() {
  static Conversions instance;
  return instance;
}

Tensor batch_norm_kernel(
    const Tensor& input, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var, bool training, double momentum,
    double eps, bool cudnn_enabled) {
  if (training) {
    auto group = conversions().find(running_mean);
    if (!group) group = conversions().find(weight);
    if (group) {
      return sync_batch_norm(
          input, weight.value_or(Tensor()), bias.value_or(Tensor()),
          running_mean.value_or(Tensor()), running_var.value_or(Tensor()),
          momentum, eps, *group);
    }
  }
  return at::native::batch_norm(
      input, weight, bias, running_mean, running_var, training, momentum, eps,
      cudnn_enabled);
}

// aten::batch_norm is composed of other operators and has no autograd kernel
// that this would replace.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("batch_norm", batch_norm_kernel);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("batch_norm", batch_norm_kernel);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {  // of the tests
  library.impl("batch_norm", batch_norm_kernel);
}

// The tensor that identifies this module's calls of batch_norm; nullopt unless
// the module is an Impl.
template <class Impl>
std::optional<Tensor> key_of(torch::nn::Module& module) {
  const auto* norm = dynamic_cast<Impl*>(&module);
  if (norm == nullptr) return std::nullopt;
  return norm->running_mean.defined() ? norm->running_mean : norm->weight;
}

}  // namespace

ConvertedBatchNorms::ConvertedBatchNorms(std::vector<Tensor> keys)
    : keys_(std::move(keys)) {}

ConvertedBatchNorms&
ConvertedBatchNorms::operator=(ConvertedBatchNorms&& other) noexcept {
  std::swap(keys_, other.keys_);
  return *this;
}

ConvertedBatchNorms::~ConvertedBatchNorms() {
  for (const auto& key : keys_) conversions().remove(key);
}

ConvertedBatchNorms
convert_sync_batch_norm(torch::nn::Module& module, const Group& group) {
  std::vector<Tensor> keys;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const auto visit = [&](const std::string& name, torch::nn::Module& child) {
    auto key = key_of<torch::nn::BatchNorm2dImpl>(child);
    if (!key) key = key_of<torch::nn::BatchNorm1dImpl>(child);
    if (!key) key = key_of<torch::nn::BatchNorm3dImpl>(child);
    if (!key) return;
    if (!key->defined()) {
      throw ConfigError(format(
          "[sync batch norm] \"{}\" has neither running statistics nor a "
          "weight, so its calls cannot be recognised; build it as "
          "echelon::SyncBatchNorm",
          name));
    }
    keys.push_back(*key);
    modules.push_back(child.shared_from_this());
  };
  if (group.size() == 1) return {};
  visit("", module);
  for (const auto& item : module.named_modules({}, /*include_self=*/false)) {
    visit(item.key(), *item.value());
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    conversions().add(keys[i], modules[i], group);
  }
  return ConvertedBatchNorms(std::move(keys));
}

}  // namespace echelon
