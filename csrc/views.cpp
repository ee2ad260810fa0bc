#include "views.hpp"

#include <algorithm>

namespace meshweave {
i64 Selector::below(i64 position) const {
  const i64 distance = checked_sub(position, first);
  const i64 turns = floor_div(distance, stride);
  return checked_add(checked_mul(turns, block), std::min(distance - turns * stride, block));
}

bool overlap(const Selector& a, const Selector& b, i64& blocks_left) {
  const i64 low = std::max(a.start, b.start);
  i64 high = std::min(a.stop, b.stop);
  if (low >= high) return false;
  if (!a.blocked()) return !b.blocked() || b.below(high) > b.below(low);
  if (!b.blocked()) return a.below(high) > a.below(low);
  // Two whole periods hold every way in which patterns of one stride can meet.
  if (a.stride == b.stride && (high - low) / 2 > a.stride) high = low + 2 * a.stride;
  blocks_left -= (high - low) / a.stride;
  if (blocks_left < 0) throw ProgramFault("views of too many blocks");
  for (i64 at = a.first + floor_div(low - a.first, a.stride) * a.stride; at < high; at += a.stride) {
    const i64 from = std::max(at, low), to = std::min(at + a.block, high);
    if (from < to && b.below(to) > b.below(from)) return true;
  }
  return false;
}

i64 Access::elements() const {
  i64 count = 1;
  for (int dim = 0; dim < dims; ++dim) count = checked_mul(count, selectors[static_cast<size_t>(dim)].size());
  return count;
}

bool overlap(const Access& a, const Access& b, i64& blocks_left) {
  for (int dim = 0; dim < a.dims; ++dim)
    if (!overlap(a.selectors[static_cast<size_t>(dim)], b.selectors[static_cast<size_t>(dim)], blocks_left)) return false;
  return true;
}

bool may_meet(const Access& a, const Access& b) {
  for (size_t dim = 0; dim < 2 && static_cast<int>(dim) < a.dims; ++dim)
    if (a.selectors[dim].start >= b.selectors[dim].stop || b.selectors[dim].start >= a.selectors[dim].stop) return false;
  return true;
}

bool covers(const Access& a, const Access& b) {
  for (int dim = 0; dim < a.dims; ++dim) {
    const Selector &mine = a.selectors[static_cast<size_t>(dim)], &theirs = b.selectors[static_cast<size_t>(dim)];
    if (mine == theirs) continue;
    if (mine.blocked() || mine.start > theirs.start || mine.stop < theirs.stop) return false;
  }
  return true;
}

}  // namespace meshweave
