// Notices that another process of the host has ended.
#pragma once

namespace echelon::local {

class Monitor {
 public:
  virtual ~Monitor() = default;
};

}  // namespace echelon::local
