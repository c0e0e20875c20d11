// Updates of parameters: SGD, with and without momentum, and Adam, for several
// tensors in one launch. A table in the launch's parameters has the tensors'
// addresses and lengths. A block has kUpdateElements elements of one tensor; it
// looks up which one in the table's list of first blocks. Each element of a
// parameter and of its state is read and written once, and that of its gradient
// is read once. What the host does not know is read from the device's memory:
// the factor of the gradients, which is multiplied as they are read, and
// whether the step is skipped. Compiled after numbers.cu.

constexpr int kUpdateThreads = 256;    // of a block
constexpr int kUpdateElements = 4096;  // of a block: kUpdateElements of update.h
constexpr int kUpdateTensors = 64;     // of a launch, a power of 2: kUpdateTensors

// A tensor with its gradient and its state, all in one memory order.
template <class T>
struct Updated {
  T* parameter;
  const T* gradient;
  T* first;           // momentum, or Adam's mean of gradients
  T* second;          // Adam's mean of squares
  const float* step;  // Adam's number of steps, this one included
  long long count;    // elements
};

template <class T>
struct UpdatedTensors {
  Updated<T> all[kUpdateTensors];
  int first_block[kUpdateTensors];  // rising, from 0
  int count;                        // of tensors, at least 1
};

// Scalars in the device's memory. Null: the host's rate, 1, and 0.
struct DeviceNumbers {
  const float* rate;
  const float* factor;  // of the gradients
  const float* skip;    // 1: nothing is written
};

struct SgdNumbers {
  float rate;
  float momentum;
  float decay;
  int nesterov;
};

struct AdamNumbers {
  float rate;
  float first_share;  // 1 - beta1
  float beta2;
  float second_share;  // 1 - beta2
  float log_beta1;
  float log_beta2;
  float epsilon;
  float decay;
  int decoupled;  // the decay is no part of the gradient: AdamW
};

// Rules get a parameter, its gradient and its state of kStates numbers, and
// change all but the gradient. They say where a product and a sum are rounded
// as one, so that the compiler has no choice.

template <bool kMomentum>
struct Sgd {
  static constexpr int kStates = kMomentum ? 1 : 0;
  SgdNumbers numbers;
  float rate;

  __device__ Sgd(const SgdNumbers& given, float rate_now, const float*)
      : numbers(given), rate(rate_now) {}

  __device__ void operator()(float& p, float g, float& mean, float&) const {
    if (numbers.decay != 0) g = fmaf(numbers.decay, p, g);
    if (kMomentum) {
      mean = fmaf(numbers.momentum, mean, g);
      g = numbers.nesterov != 0 ? fmaf(numbers.momentum, mean, g) : mean;
    }
    p = fmaf(-rate, g, p);
  }
};

// Kingma and Ba, "Adam", 2014, arXiv:1412.6980, algorithm 1; Loshchilov and
// Hutter, "Decoupled weight decay regularization", 2017, arXiv:1711.05101,
// algorithm 2.
struct Adam {
  static constexpr int kStates = 2;
  AdamNumbers numbers;
  float rate;
  float step_size;     // rate / (1 - beta1^step)
  float inverse_root;  // 1 / sqrt(1 - beta2^step)

  // 1 - beta^step is -expm1(step log(beta)), which keeps its digits in float32.
  __device__ Adam(const AdamNumbers& given, float rate_now, const float* step)
      : numbers(given), rate(rate_now) {
    step_size = rate / -expm1f(*step * given.log_beta1);
    inverse_root = 1 / sqrtf(-expm1f(*step * given.log_beta2));
  }

  __device__ void operator()(float& p, float g, float& mean, float& square) const {
    if (numbers.decay != 0) {
      if (numbers.decoupled != 0) {
        p = fmaf(-(rate * numbers.decay), p, p);
      } else {
        g = fmaf(numbers.decay, p, g);
      }
    }
    mean = fmaf(numbers.first_share, g - mean, mean);
    square = fmaf(numbers.beta2, square, numbers.second_share * g * g);
    const float root = fmaf(sqrtf(square), inverse_root, numbers.epsilon);
    p = fmaf(-step_size, mean / root, p);
  }
};

template <class T, int K>
__device__ inline Packet<T, K> packet_at(const T* x) {
  return *reinterpret_cast<const Packet<T, K>*>(x);
}

// Updates the K elements from `at`; K is 1, or the addresses are multiples of
// K elements.
template <class T, int K, class Rule>
__device__ inline void update_packet(
    const Updated<T>& one, long long at, float factor, const Rule& rule) {
  auto parameters = packet_at<T, K>(one.parameter + at);
  const auto gradients = packet_at<T, K>(one.gradient + at);
  Packet<T, K> firsts;
  Packet<T, K> seconds;
  if (Rule::kStates > 0) firsts = packet_at<T, K>(one.first + at);
  if (Rule::kStates > 1) seconds = packet_at<T, K>(one.second + at);
  ECHELON_UNROLL
  for (int k = 0; k < K; ++k) {
    float parameter = to_float(parameters.values[k]);
    float first = Rule::kStates > 0 ? to_float(firsts.values[k]) : 0;
    float second = Rule::kStates > 1 ? to_float(seconds.values[k]) : 0;
    rule(parameter, factor * to_float(gradients.values[k]), first, second);
    store(parameters.values[k], parameter);
    store(firsts.values[k], first);
    store(seconds.values[k], second);
  }
  *reinterpret_cast<Packet<T, K>*>(one.parameter + at) = parameters;
  if (Rule::kStates > 0) *reinterpret_cast<Packet<T, K>*>(one.first + at) = firsts;
  if (Rule::kStates > 1) *reinterpret_cast<Packet<T, K>*>(one.second + at) = seconds;
}

// Whether all of a tensor's memory begins with an access of 16 bytes.
template <class T>
__device__ inline bool begins_packets(const Updated<T>& one) {
  return (reinterpret_cast<unsigned long long>(one.parameter) |
          reinterpret_cast<unsigned long long>(one.gradient) |
          reinterpret_cast<unsigned long long>(one.first) |
          reinterpret_cast<unsigned long long>(one.second)) %
             16 ==
         0;
}

// Updates what the tensor's block number `block` has.
template <class T, class Rule>
__device__ inline void update_block(
    const Updated<T>& one, int block, float factor, const Rule& rule) {
  constexpr int K = 16 / sizeof(T);
  const long long begin = static_cast<long long>(block) * kUpdateElements;
  const long long left = one.count - begin;
  const int count = left < kUpdateElements ? static_cast<int>(left) : kUpdateElements;
  const int in_packets = begins_packets(one) ? count - count % K : 0;
  for (int i = threadIdx.x * K; i < in_packets; i += blockDim.x * K) {
    update_packet<T, K>(one, begin + i, factor, rule);
  }
  for (int i = in_packets + threadIdx.x; i < count; i += blockDim.x) {
    update_packet<T, 1>(one, begin + i, factor, rule);
  }
}

// The tensor that a block works on: the last whose first block is not after it.
template <class T>
__device__ inline int tensor_of_block(const UpdatedTensors<T>& tensors, int block) {
  int found = 0;
  for (int step = kUpdateTensors / 2; step > 0; step /= 2) {
    const int next = found + step;
    if (next < tensors.count && tensors.first_block[next] <= block) found = next;
  }
  return found;
}

template <class T, class Rule, class Numbers>
__device__ inline void update(
    const UpdatedTensors<T>& tensors, const Numbers& numbers,
    const DeviceNumbers& here) {
  if (here.skip != nullptr && *here.skip != 0) return;
  const int block = blockIdx.x;
  const int index = tensor_of_block(tensors, block);
  const Updated<T> one = tensors.all[index];
  const float factor = here.factor != nullptr ? *here.factor : 1;
  const float rate = here.rate != nullptr ? *here.rate : numbers.rate;
  update_block(
      one, block - tensors.first_block[index], factor,
      Rule(numbers, rate, one.step));
}

#define ECHELON_UPDATE_BY(rule, Rule, Numbers, name, T)                       \
  extern "C" __global__ void __launch_bounds__(kUpdateThreads) rule##_##name( \
      const UpdatedTensors<T> tensors, const Numbers numbers,                 \
      const DeviceNumbers here) {                                             \
    update<T, Rule>(tensors, numbers, here);                                  \
  }
#define ECHELON_UPDATE(name, T)                               \
  ECHELON_UPDATE_BY(sgd, Sgd<false>, SgdNumbers, name, T)     \
  ECHELON_UPDATE_BY(momentum, Sgd<true>, SgdNumbers, name, T) \
  ECHELON_UPDATE_BY(adam, Adam, AdamNumbers, name, T)
ECHELON_UPDATE(float, float)
ECHELON_UPDATE(bfloat16, BFloat16)
ECHELON_UPDATE(half, Half)
