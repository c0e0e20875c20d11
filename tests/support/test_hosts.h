// Hosts for a test: network namespaces with a switch between them, and host
// names of their own. They are 10.83.0.1, 10.83.0.2, …; their ports are free.
#pragma once

#include <string>
#include <vector>

namespace echelon::testing_support {

class TestHosts {
 public:
  explicit TestHosts(int number = 2);
  ~TestHosts();
  TestHosts(const TestHosts&) = delete;
  TestHosts& operator=(const TestHosts&) = delete;

  /// Why there are none (not root, …); empty when there are. A test that gets a
  /// reason is skipped with it.
  const std::string& reason() const { return reason_; }
  static std::string address(int host);
  /// `words` as a command on a host.
  std::vector<std::string>
  on(int host, const std::vector<std::string>& words) const;
  /// Gives a host a worse cable: packets take so long, and a share of them is
  /// lost. Before anything uses the host. Returns why it cannot; empty: it did.
  std::string worsen(int host, int delay_ms, double loss);
  /// Cuts a host off from the others, and connects it again.
  void cut(int host) const;
  void mend(int host) const;
  /// Kills every process of a host, as a loss of its power does.
  void kill_all(int host) const;

 private:
  std::string make(int number);
  std::string cable(int host) const;

  std::string id_;
  std::string switch_;              // a namespace
  std::vector<int> cables_;         // processes that pass packets on
  std::vector<std::string> names_;  // of namespaces
  std::string reason_;
};

}  // namespace echelon::testing_support
