// What LibTorch asks of a device: its streams and events, its memory, its
// random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/test_device/memory.h"
#include "tests/test_device/operators.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

/// What c10::Event holds.
struct EventState {
  int device = 0;
  MarkPtr mark;
};

int stream_id(const c10::Stream& stream) {
  return static_cast<int>(stream.id());
}
Device& device_of_stream(const c10::Stream& stream) {
  return device_of(stream.device_index());
}
int index_or_current(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}
c10::Device place(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    set_current_device(index_or_current(device));
    return place(before);
  }
  c10::Device getDevice() const override { return place(current_device()); }
  void setDevice(c10::Device device) const override {
    set_current_device(index_or_current(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(index_or_current(device));
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_or_current(device);
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_or_current(device), 0);
  }
  c10::Stream
  getStreamFromGlobalPool(c10::Device device, bool high) const override {
    const int index = index_or_current(device);
    return stream_of(index, device_of(index).stream_of_pool(high));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_or_current(device);
    return stream_of(index, device_of(index).new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    return stream_of(index, exchange_current_stream(index, stream_id(stream)));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    device_of_stream(stream).check();  // cudaEventRecord tells errors too
    if (*event == nullptr) *event = new EventState;
    auto* const state = static_cast<EventState*>(*event);
    state->device = stream.device_index();
    state->mark = device_of_stream(stream).mark(stream_id(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* const state = static_cast<EventState*>(event);
    if (state == nullptr || !state->mark) return;
    if (state->device != stream.device_index()) {
      state->mark->wait();  // the clocks of two devices are not compared
      return;
    }
    device_of_stream(stream).block(stream_id(stream), state->mark);
  }
  bool queryEvent(void* event) const override {
    auto* const state = static_cast<EventState*>(event);
    if (state == nullptr || !state->mark) return true;
    return device_of(state->device).query(state->mark);
  }
  void synchronizeEvent(void* event) const override {
    auto* const state = static_cast<EventState*>(event);
    if (state == nullptr || !state->mark) return;
    // A step that reads numbers one step late finds them there: no wait.
    Device& device = device_of(state->device);
    if (!device.query(state->mark)) device.wait(state->mark, "event");
  }
  void
  destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(
      void* first, void* second, const c10::DeviceIndex) const override {
    const auto at = [](void* event) {
      auto* const state = static_cast<EventState*>(event);
      TORCH_CHECK(
          state != nullptr && state->mark && state->mark->reached(),
          "test device: an event was not recorded, or is not over");
      return state->mark->seconds();
    };
    return 1000 * (at(second) - at(first));
  }

  bool queryStream(const c10::Stream& stream) const override {
    return device_of_stream(stream).idle(stream_id(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Device& device = device_of_stream(stream);
    device.wait(device.mark(stream_id(stream)), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    device_of(index).synchronize("device");
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream_id(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current_device();
    set_current_device(index);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return place(device_of_address(data));
  }
  // The kernels are the CPU's, and so are the random numbers.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(
      const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  c10::register_privateuse1_backend("test");
  c10::SetAllocator(kType, device_allocator(), 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

}  // namespace
}  // namespace echelon::test_device
