// A cluster file as `echelon bench --save -n 2` might write it.
#pragma once

namespace echelon {

/// A processor of which 2 ranks have half each.
inline constexpr const char* kMeasuredDesk = R"(
name = "desk, measured"
[devices.cpu]
memory = "8 GiB"
memory_rate = "10 GB/s"
peak = { fp32 = "0.05 TFLOP/s", fp64 = "0.025 TFLOP/s" }
[[nodes]]
device = "cpu"
devices = 2
inside = { name = "shared memory", rate = "3 GB/s", latency = "20 us" }
)";

}  // namespace echelon
