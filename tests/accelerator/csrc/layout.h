// The bytes that a tensor covers: a run of bytes, repeated with a stride in each further dimension.
#pragma once
#include <cstdint>
#include <vector>

namespace sim {

struct Dimension {
  uint64_t count, stride;  // stride in bytes
};

struct Layout {
  uintptr_t lo = 0, hi = 0;        // the bounding box: all bytes lie in [lo, hi)
  uint64_t run = 0;                // bytes next to each other
  std::vector<Dimension> dims;     // largest stride first; empty: the run is the whole box
  bool dense() const { return dims.empty(); }
  bool empty() const { return lo == hi; }
};

Layout dense_layout(uintptr_t address, uint64_t nbytes);
Layout strided_layout(uintptr_t address, uint64_t itemsize, const int64_t* sizes, const int64_t* strides, int64_t dim);

// Whether the two share a byte (exact).
bool share_byte(const Layout& a, const Layout& b);
// Whether every byte of `inner` is one of `outer` (may answer false where it is true).
bool covers(const Layout& outer, const Layout& inner);

}  // namespace sim
