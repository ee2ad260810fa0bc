// Blocks of labels: for each element its term and its place in its tensor (`ir.analysis.labels`), and the copies
// between blocks, views and parts that the ops of a program make.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "views.hpp"

namespace meshweave {

constexpr i32 UNWRITTEN = 0, ZERO = 1, OPAQUE = 2;  // terms: never written, zeros, what an undeclared call made
constexpr i64 MAX_LABELS = i64{1} << 25;  // of all memory together, and of one block

// Where a program does what it should not, or what only the reference knows.
struct Doubt {};

[[noreturn]] inline void doubt() { throw Doubt{}; }

inline void trust(bool condition) {
  if (!condition) doubt();
}

// A column that is read from front to back.
class Stream {
 public:
  explicit Stream(const std::vector<i64>& column) : column_(column) {}
  bool done() const { return at_ == column_.size(); }
  i64 next(i64 low, i64 high) {
    require(at_ < column_.size(), "proof: a column ends too soon");
    const i64 value = column_[at_++];
    require(value >= low && value <= high, "proof: a number out of range");
    return value;
  }
  i64 index(size_t count) { return next(0, static_cast<i64>(count) - 1); }

 private:
  const std::vector<i64>& column_;
  size_t at_ = 0;
};

using Shape = std::vector<i64>;

// The number of elements of a shape that is small enough to be labelled.
inline i64 num_elements(const Shape& shape) {
  i64 total = 1;
  for (const i64 size : shape)
    if (size == 0) return 0;
  for (const i64 size : shape) {
    total = checked_mul(total, size);
    if (total > MAX_LABELS) doubt();
  }
  return total;
}

struct Block {
  Shape shape;
  std::vector<i32> term;
  std::vector<i64> index;

  Block() = default;
  explicit Block(Shape of, i32 filled = ZERO) : shape(std::move(of)) {
    term.assign(static_cast<size_t>(num_elements(shape)), filled);
    index.assign(term.size(), 0);
  }
  size_t size() const { return term.size(); }
  bool all_are(i32 one) const {
    return std::all_of(term.begin(), term.end(), [one](i32 other) { return other == one; });
  }
  void take(size_t at, const Block& from, size_t place, size_t count) {
    std::memcpy(term.data() + at, from.term.data() + place, count * sizeof(i32));
    std::memcpy(index.data() + at, from.index.data() + place, count * sizeof(i64));
  }
};

inline Shape shape_of(const Access& view) {
  Shape shape;
  for (int dim = 0; dim < view.dims; ++dim) shape.push_back(view.selectors[static_cast<size_t>(dim)].size());
  return shape;
}

// Calls visit(place in the memory, place in the view, count) for the runs of neighbours that a view selects.
template <class Visit>
void each_run(const Access& view, const Shape& memory, Visit visit) {
  const auto dims = static_cast<size_t>(view.dims);
  for (size_t dim = 0; dim < dims; ++dim)
    if (view.selectors[dim].size() == 0) return;
  // Trailing dims that are selected whole are one run with the dim before them.
  size_t last = dims;
  i64 inner = 1;
  while (last > 0) {
    const Selector& of = view.selectors[last - 1];
    if (of.blocked() || of.start != 0 || of.stop != memory[last - 1]) break;
    inner *= memory[--last];
  }
  size_t place = 0;
  if (last == 0) {
    visit(size_t{0}, place, static_cast<size_t>(inner));
    return;
  }
  const auto pieces = [&](size_t dim, auto&& each) {  // calls each(start, count) for the runs along a dim
    const Selector& of = view.selectors[dim];
    if (!of.blocked()) {
      each(of.start, of.stop - of.start);
      return;
    }
    if (of.block == 0) return;
    for (i64 at = of.first + floor_div(of.start - of.first, of.stride) * of.stride; at < of.stop; at += of.stride) {
      const i64 from = std::max(at, of.start), to = std::min(at + of.block, of.stop);
      if (from < to) each(from, to - from);
    }
  };
  const auto walk = [&](auto&& self, size_t dim, i64 base) -> void {
    pieces(dim, [&](i64 start, i64 count) {
      if (dim + 1 == last) {
        visit(static_cast<size_t>((base * memory[dim] + start) * inner), place, static_cast<size_t>(count * inner));
        place += static_cast<size_t>(count * inner);
        return;
      }
      for (i64 at = start; at < start + count; ++at) self(self, dim + 1, base * memory[dim] + at);
    });
  };
  walk(walk, 0, 0);
}

// Calls visit(place in the whole, place in the part, count) for the part of `size` from `start` on along `dim`.
template <class Visit>
void along(const Shape& whole, size_t dim, i64 start, i64 size, Visit visit) {
  i64 outer = 1, inner = 1;
  for (size_t at = 0; at < whole.size(); ++at)
    if (at != dim) (at < dim ? outer : inner) *= whole[at];
  for (i64 o = 0; o < outer; ++o)
    visit(static_cast<size_t>((o * whole[dim] + start) * inner), static_cast<size_t>(o * size * inner), static_cast<size_t>(size * inner));
}

inline Block part(const Block& of, size_t dim, i64 start, i64 size) {
  if (dim >= of.shape.size() || start < 0 || size < 0 || start > of.shape[dim] - size) doubt();
  Shape shape = of.shape;
  shape[dim] = size;
  Block out(shape);
  if (out.size())
    along(of.shape, dim, start, size, [&](size_t from, size_t to, size_t count) { out.take(to, of, from, count); });
  return out;
}

inline Block joined(const std::vector<Block>& parts, size_t dim) {
  Shape shape = parts[0].shape;
  if (dim >= shape.size()) doubt();
  shape[dim] = 0;
  for (const Block& one : parts) {
    if (one.shape.size() != shape.size()) doubt();
    for (size_t at = 0; at < shape.size(); ++at)
      if (at != dim && one.shape[at] != shape[at]) doubt();
    shape[dim] = checked_add(shape[dim], one.shape[dim]);
  }
  Block out(shape);
  i64 start = 0;
  for (const Block& one : parts) {
    if (one.size())
      along(shape, dim, start, one.shape[dim], [&](size_t to, size_t from, size_t count) { out.take(to, one, from, count); });
    start += one.shape[dim];
  }
  return out;
}

// The block with its last two dims changed about.
inline Block transposed(const Block& of) {
  Shape shape = of.shape;
  const size_t dims = shape.size();
  std::swap(shape[dims - 2], shape[dims - 1]);
  Block out(shape);
  const auto rows = static_cast<size_t>(of.shape[dims - 2]), columns = static_cast<size_t>(of.shape[dims - 1]);
  for (size_t base = 0; base < of.size(); base += rows * columns)
    for (size_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < columns; ++j) {
        const size_t to = base + j * rows + i, from = base + i * columns + j;
        out.term[to] = of.term[from], out.index[to] = of.index[from];
      }
  return out;
}

}  // namespace meshweave
