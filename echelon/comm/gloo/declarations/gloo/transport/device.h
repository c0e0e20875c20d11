// See ../../README.md.
#pragma once

namespace gloo {
namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = default;
};

}  // namespace transport
}  // namespace gloo
