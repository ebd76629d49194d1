// The exact test whether two strided sets of bytes share one.
#include "layout.h"

#include <algorithm>

namespace sim {

Layout dense_layout(uintptr_t address, uint64_t nbytes) { return {address, address + nbytes, nbytes, {}}; }

Layout strided_layout(uintptr_t address, uint64_t itemsize, const int64_t* sizes, const int64_t* strides, int64_t dim) {
  Layout layout{address, address + itemsize, itemsize, {}};
  std::vector<Dimension> dims;
  for (int64_t i = 0; i < dim; i++) {
    if (sizes[i] == 0) return {address, address, 0, {}};
    if (sizes[i] > 1 && strides[i] != 0) dims.push_back({uint64_t(sizes[i]), uint64_t(strides[i]) * itemsize});
  }
  std::sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  for (auto& d : dims) {
    layout.hi += (d.count - 1) * d.stride;
    if (layout.dims.empty() && d.stride <= layout.run) {
      layout.run += (d.count - 1) * d.stride;  // the repetitions touch: one longer run
    } else {
      layout.dims.insert(layout.dims.begin(), d);
    }
  }
  return layout;
}

// Whether the set that starts at `base`, from dimension `k` on, has a byte in [lo, hi).
static bool has_byte(const Layout& set, size_t k, uint64_t extent, uintptr_t base, uintptr_t lo, uintptr_t hi) {
  if (base >= hi || base + extent <= lo) return false;
  if (k == set.dims.size()) return true;
  if (lo <= base) return true;  // the first byte of every set is one of its own
  const auto& d = set.dims[k];
  uint64_t inner = extent - (d.count - 1) * d.stride;
  // The repetitions that can reach [lo, hi): start below hi and end after lo.
  uint64_t first = lo >= base + inner ? (lo - base - inner) / d.stride + 1 : 0;
  uint64_t last = std::min<uint64_t>(d.count - 1, (hi - 1 - base) / d.stride);
  for (uint64_t i = first; i <= last; i++)
    if (has_byte(set, k + 1, inner, base + i * d.stride, lo, hi)) return true;
  return false;
}

static uint64_t num_runs(const Layout& set) {
  uint64_t n = 1;
  for (auto& d : set.dims) n *= d.count;
  return n;
}

static bool any_run_meets(const Layout& set, size_t k, uint64_t extent, uintptr_t base, const Layout& other) {
  if (base >= other.hi || base + extent <= other.lo) return false;
  if (k == set.dims.size()) return has_byte(other, 0, other.hi - other.lo, other.lo, base, base + set.run);
  const auto& d = set.dims[k];
  uint64_t inner = extent - (d.count - 1) * d.stride;
  uint64_t first = other.lo >= base + inner ? (other.lo - base - inner) / d.stride + 1 : 0;
  uint64_t last = std::min<uint64_t>(d.count - 1, (other.hi - 1 - base) / d.stride);
  for (uint64_t i = first; i <= last; i++)
    if (any_run_meets(set, k + 1, inner, base + i * d.stride, other)) return true;
  return false;
}

bool share_byte(const Layout& a, const Layout& b) {
  if (a.empty() || b.empty() || a.lo >= b.hi || b.lo >= a.hi) return false;
  if (a.dense() && b.dense()) return true;
  const Layout& few = num_runs(a) <= num_runs(b) ? a : b;
  return any_run_meets(few, 0, few.hi - few.lo, few.lo, &few == &a ? b : a);
}

bool covers(const Layout& outer, const Layout& inner) {
  if (outer.lo > inner.lo || outer.hi < inner.hi) return false;
  if (outer.dense()) return true;
  if (outer.lo != inner.lo || outer.run != inner.run || outer.dims.size() != inner.dims.size()) return false;
  for (size_t i = 0; i < outer.dims.size(); i++)
    if (outer.dims[i].count != inner.dims[i].count || outer.dims[i].stride != inner.dims[i].stride) return false;
  return true;
}

}  // namespace sim
