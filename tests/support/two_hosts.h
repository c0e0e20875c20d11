// Two hosts for a test: network namespaces with a cable between them, and host
// names of their own. They are 10.83.0.1 and 10.83.0.2; their ports are free.
#pragma once

#include <string>
#include <vector>

namespace echelon::testing_support {

class TwoHosts {
 public:
  TwoHosts();
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// Why there are none (not root, …); empty when there are. A test that gets a
  /// reason is skipped with it.
  const std::string& reason() const { return reason_; }
  static std::string address(int host);
  /// `words` as a command on a host.
  std::vector<std::string>
  on(int host, const std::vector<std::string>& words) const;
  /// Takes the link of host 1 down.
  void cut_cable() const;

 private:
  std::string make();

  std::string names_[2];
  std::string cables_[2];
  std::string reason_;
};

}  // namespace echelon::testing_support
