// What the collectives that a thread starts are for.
#pragma once

#include <string>

namespace echelon {

/// Names the collectives started by this thread until it is destroyed; scopes
/// nest. The label appears in the history, the timeline and every error.
class LabelScope {
 public:
  explicit LabelScope(std::string label);
  ~LabelScope();
  LabelScope(const LabelScope&) = delete;
  LabelScope& operator=(const LabelScope&) = delete;

  /// The innermost label of this thread, or "".
  static const std::string& current();

 private:
  std::string previous_;
};

}  // namespace echelon
