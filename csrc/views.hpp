// Resolved views: the elements that an op accesses, and the overlap of two views (`ir.program.views`).
#pragma once

#include <array>

#include "error.hpp"

namespace meshweave {

constexpr int MAX_DIMS = 8;
constexpr i64 LARGEST = i64{1} << 48;  // beyond any index or size; keeps sums and differences within 64 bits

// [start, stop) of a dim; where `stride` is not 0 only the elements in [first + t stride, ... + block).
struct Selector {
  i64 start, stop, first, block, stride;

  bool blocked() const { return stride != 0; }
  bool operator==(const Selector&) const = default;
  // Returns a count whose difference between two positions is the number of block elements between them.
  i64 below(i64 position) const;
  i64 size() const { return blocked() ? below(stop) - below(start) : stop - start; }
};

// Returns whether two selectors share an element. A block-by-block comparison is deducted from `blocks_left`;
// ProgramFault is raised when that is used up.
constexpr i64 MAX_BLOCKS = 1 << 27;  // for all views of a program
bool overlap(const Selector& a, const Selector& b, i64& blocks_left);

enum class Mode : unsigned char { READ, WRITE, UPDATE };

struct Access {
  Mode mode = Mode::READ;
  int dims = 0;
  i32 buffer = 0;
  i64 slot = 0;
  i64 rank = -1;  // position of the rank that owns the buffer, -1: the executing one
  std::array<Selector, MAX_DIMS> selectors;  // only the first `dims` are set

  i64 elements() const;
};

bool overlap(const Access& a, const Access& b, i64& blocks_left);  // of views of one buffer and slot
// Returns whether the ranges of the first two dims meet: most views that share no element do not even there.
bool may_meet(const Access& a, const Access& b);
bool covers(const Access& a, const Access& b);   // whether `a` surely holds every element of `b`

}  // namespace meshweave
