// CUDA's check of the host compiler. Its wheel is not fetched;
// nothing here is compiled for a device.
#pragma once
