// Terms: what an element of memory holds of a declared value, as counts of summands (`ir.analysis.terms`).
#pragma once

#include <map>
#include <string>
#include <unordered_map>

#include "blocks.hpp"
#include "columns.hpp"

namespace meshweave {

using Counts = std::vector<i32>;
using TermParts = std::vector<std::pair<i64, i64>>;  // (basis, number of its counts), by basis; none for an opaque term

constexpr i64 MAX_EXTENT = i64{1} << 40;
constexpr i64 MAX_INDEX = i64{1} << 60;  // elements of a tensor

// Reductions by number; from CUSTOM on words of a function's own.
enum Reduction : i64 { SUM, MAX, MIN, PROD, CUSTOM };

struct ProductRow {
  i64 out, a, b, transpose_a, transpose_b;
  i64 batch_a, batch_b, m, n, k, sums_batch;  // batch_a, batch_b: whether an operand has leading dims
};

// A declared tensor: its shape, and how its summands are combined and numbered.
struct TensorRow {
  Shape shape;
  i64 reduction;      // by which parts of it are combined
  i64 num_summands;   // that a finished element has of it as a basis
  i64 arrived;        // parts in which it arrives; 0 for one that arrives whole
};

class Terms {
 public:
  explicit Terms(const Columns& columns);

  size_t num_tensors() const { return tensors.size(); }
  i32 finished(i64 tensor) const { return finished_[static_cast<size_t>(tensor)]; }
  const Shape& shape(i64 tensor) const { return tensors[static_cast<size_t>(tensor)].shape; }
  // The parts of a term that is neither UNWRITTEN nor ZERO.
  const TermParts& parts(i32 term) const { return terms_[static_cast<size_t>(term)]; }
  // The tensors whose finished elements have a term.
  const std::vector<i64>& tensors_of(i32 term) const {
    static const std::vector<i64> none;
    return static_cast<size_t>(term) < tensors_of_.size() ? tensors_of_[static_cast<size_t>(term)] : none;
  }
  // The tensors that an operand's term may stand for.
  std::vector<i64> factors(i32 term) const;
  // The term of part `place` of a tensor that arrives in parts.
  i32 arriving(i64 tensor, i64 place);
  // The term that has these counts of the summands of a tensor.
  i32 part(i64 basis, Counts&& of);
  // Combines the elements of a block with those of another one of its shape, by a reduction.
  void combine(i64 op, Block& total, const Block& more);
  // The labels of a product (..., M, K) x (..., K, N).
  Block multiply(const Block& a, const Block& b);

  std::vector<TensorRow> tensors;

 private:
  i64 counts(Counts&& of);
  i32 number(const TermParts& parts);
  i32 combined(i64 op, i32 p, i32 q);
  i32 sum(i32 p, i32 q);
  i32 reduced(i64 op, i32 p, i32 q);
  void check_sum(const TermParts& total) const;
  i32 one_term(const Block& of) const;
  bool stands_for(i32 term, i64 tensor) const;
  Counts kronecker(const Counts& of, i32 operand) const;
  bool product(const ProductRow& row, const Block& a, const Block& b, i32 left, i32 right, Block& out);

  std::vector<TermParts> terms_;
  std::map<TermParts, i32> numbers_;
  std::vector<Counts> counts_;
  std::unordered_map<std::string, i64> counts_of_;  // by their bytes
  i64 num_counted_ = 0;                             // numbers in all of them
  std::vector<i32> finished_;
  std::vector<std::vector<i64>> tensors_of_;
  size_t num_wholes_ = 0;
  std::vector<ProductRow> products_;
  std::map<std::array<i64, 3>, i32> combined_;
};

}  // namespace meshweave
