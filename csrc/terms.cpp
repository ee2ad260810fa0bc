#include "terms.hpp"

namespace meshweave {
namespace {

bool is_idempotent(i64 op) { return op == MAX || op == MIN; }

// The positions of a block along the free dim and along k of an operand. Free positions are numbered (batch, row) per
// leading dim and row of the block; where the product is summed over its batch, those along k are numbered (batch, k).
struct Axes {
  std::vector<i64> free, inner;
};

// Returns whether a block is one of a declared operand, and sets its axes. The block is (..., free, k) already.
bool axes_of(const Block& block, const Shape& tensor, bool transposed, bool sums_batch, bool is_left, Axes& out) {
  const size_t dims = block.shape.size();
  const i64 rows = tensor[tensor.size() - 2], columns = tensor[tensor.size() - 1];
  if (rows < 1 || columns < 1) return false;
  const auto num_rows = static_cast<size_t>(block.shape[dims - 2]), num_columns = static_cast<size_t>(block.shape[dims - 1]);
  const size_t num_blocks = block.size() / (num_rows * num_columns), num_free = is_left ? num_rows : num_columns;
  const bool free_is_row = is_left != transposed;  // whether the free position counts rows of the tensor
  const i64 extent_free = free_is_row ? rows : columns, extent_inner = free_is_row ? columns : rows;
  out.free.resize(num_blocks * num_free);
  out.inner.resize(is_left ? num_columns : num_rows);
  const auto positions = [&](i64 index, i64& free, i64& inner) {
    const i64 at = index / columns, column = index % columns, leading = at / rows, row = at % rows;
    free = free_is_row ? row : column, inner = free_is_row ? column : row;
    if (sums_batch) inner += leading * extent_inner;
    else free += leading * extent_free;
  };
  i64 free, inner;
  for (size_t at = 0; at < out.inner.size(); ++at) {
    positions(block.index[is_left ? at : at * num_columns], free, inner);
    out.inner[at] = inner;
  }
  if (tensor.size() == 2) {  // an index is then the sum of what its row and its column of the block say
    const i64 step_free = free_is_row ? columns : 1, step_inner = free_is_row ? 1 : columns;
    std::vector<i64> offsets(num_columns);
    for (size_t base = 0; base < num_blocks; ++base) {
      const i64* of = block.index.data() + base * num_rows * num_columns;
      for (size_t at = 0; at < num_free; ++at) {
        positions(of[is_left ? at * num_columns : at], free, inner);
        out.free[base * num_free + at] = free;
      }
      for (size_t j = 0; j < num_columns; ++j)
        offsets[j] = is_left ? out.inner[j] * step_inner : out.free[base * num_free + j] * step_free;
      for (size_t i = 0; i < num_rows; ++i) {
        const i64 start = is_left ? out.free[base * num_free + i] * step_free : out.inner[i] * step_inner;
        for (size_t j = 0; j < num_columns; ++j)
          if (of[i * num_columns + j] != start + offsets[j]) return false;
      }
    }
    return true;
  }
  for (size_t base = 0; base < num_blocks; ++base)
    for (size_t i = 0; i < num_rows; ++i)
      for (size_t j = 0; j < num_columns; ++j) {
        positions(block.index[(base * num_rows + i) * num_columns + j], free, inner);
        const size_t place = is_left ? i : j, along_k = is_left ? j : i;
        i64& known = out.free[base * num_free + place];
        if (along_k == 0) known = free;
        if (known != free || out.inner[along_k] != inner) return false;
      }
  return true;
}

}  // namespace

Terms::Terms(const Columns& columns) {
  Stream rows(column(columns, "tensors"));
  while (!rows.done()) {
    TensorRow tensor;
    for (i64 dims = rows.next(0, 64); dims > 0; --dims) tensor.shape.push_back(rows.next(0, MAX_EXTENT));
    i64 total = 1;
    for (const i64 size : tensor.shape) total = checked_mul(total, std::max<i64>(size, 1));
    trust(total <= MAX_INDEX);
    tensor.reduction = rows.next(0, 1 << 20);
    tensor.num_summands = rows.next(0, MAX_EXTENT);
    tensor.arrived = rows.next(0, 1 << 20);
    tensors.push_back(std::move(tensor));
  }
  terms_.resize(3);
  numbers_[{}] = OPAQUE;
  Stream finished(column(columns, "finished"));
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    TermParts parts;
    for (i64 left = finished.next(1, 1 << 20); left > 0; --left) {
      const i64 basis = finished.index(tensors.size());
      const i64 size = finished.next(0, MAX_LABELS), count = finished.next(0, 1 << 20);
      parts.push_back({basis, counts(Counts(static_cast<size_t>(size), static_cast<i32>(count)))});
    }
    std::sort(parts.begin(), parts.end());
    const i32 term = number(parts);
    finished_.push_back(term);
    if (static_cast<size_t>(term) >= tensors_of_.size()) tensors_of_.resize(static_cast<size_t>(term) + 1);
    tensors_of_[static_cast<size_t>(term)].push_back(static_cast<i64>(tensor));
  }
  num_wholes_ = terms_.size();
  Stream products(column(columns, "products"));
  while (!products.done()) {
    const i64 out = products.index(tensors.size()), a = products.index(tensors.size()), b = products.index(tensors.size());
    ProductRow row{out, a, b, products.next(0, 1), products.next(0, 1), 0, 0, 0, 0, 0, 0};
    const Shape &of_a = shape(a), &of_b = shape(b);
    require(of_a.size() >= 2 && of_b.size() >= 2 && shape(out).size() >= 2, "proof: a product of what is no matrix");
    row.batch_a = of_a.size() > 2, row.batch_b = of_b.size() > 2;
    row.sums_batch = row.batch_a && row.batch_b && shape(out).size() == 2;
    row.m = of_a[of_a.size() - (row.transpose_a ? 1 : 2)], row.k = of_a[of_a.size() - (row.transpose_a ? 2 : 1)];
    row.n = of_b[of_b.size() - (row.transpose_b ? 2 : 1)];
    if (row.m < 1 || row.n < 1) continue;  // which has no elements to be told apart
    for (const Shape* of : {&of_a, &of_b}) {  // no position of a result exceeds 64 bits
      i64 most = checked_mul(row.m, row.n);
      for (size_t dim = 0; dim + 2 < of->size(); ++dim) most = checked_mul(most, (*of)[dim]);
      trust(most <= MAX_INDEX);
    }
    products_.push_back(row);
  }
}

std::vector<i64> Terms::factors(i32 term) const {
  if (!tensors_of(term).empty()) return tensors_of(term);
  std::vector<i64> bases;
  for (const auto& [basis, of] : parts(term)) bases.push_back(basis);
  return bases;
}

i32 Terms::arriving(i64 tensor, i64 place) {
  Counts own(static_cast<size_t>(tensors[static_cast<size_t>(tensor)].arrived), 0);
  require(place < static_cast<i64>(own.size()), "proof: no such part");
  own[static_cast<size_t>(place)] = 1;
  return part(tensor, std::move(own));
}

i32 Terms::part(i64 basis, Counts&& of) {
  if (is_idempotent(tensors[static_cast<size_t>(basis)].reduction))
    for (i32& count : of) count = std::min(count, 1);
  return number({{basis, counts(std::move(of))}});
}

i64 Terms::counts(Counts&& of) {
  std::string key(reinterpret_cast<const char*>(of.data()), of.size() * sizeof(i32));
  const auto [known, is_new] = counts_of_.try_emplace(std::move(key), static_cast<i64>(counts_.size()));
  if (is_new) {
    num_counted_ += static_cast<i64>(of.size());
    trust(num_counted_ <= MAX_LABELS);
    counts_.push_back(std::move(of));
  }
  return known->second;
}

i32 Terms::number(const TermParts& parts) {
  const auto [known, is_new] = numbers_.try_emplace(parts, static_cast<i32>(terms_.size()));
  if (is_new) terms_.push_back(parts);
  return known->second;
}

// --- sums and reductions ----------------------------------------------------------------------------------------------

void Terms::combine(i64 op, Block& total, const Block& more) {
  if (total.size() != more.size()) doubt();
  i32 p = -1, q = -1, both = -1;  // the last two terms and their combination
  for (size_t at = 0; at < total.size(); ++at) {
    i32& term = total.term[at];
    if (op != SUM) trust(term != ZERO && more.term[at] != ZERO);
    if (more.term[at] == ZERO) continue;
    if (term == ZERO) {
      term = more.term[at], total.index[at] = more.index[at];
      continue;
    }
    if (term != p || more.term[at] != q) p = term, q = more.term[at], both = combined(op, p, q);
    trust(total.index[at] == more.index[at] || both == OPAQUE);
    term = both;
  }
}

i32 Terms::combined(i64 op, i32 p, i32 q) {
  if (p > q) std::swap(p, q);
  const auto [known, is_new] = combined_.try_emplace({op, p, q}, 0);
  if (is_new) known->second = op == SUM ? sum(p, q) : reduced(op, p, q);
  return known->second;
}

i32 Terms::sum(i32 p, i32 q) {
  const TermParts left = parts(p), right = parts(q);
  if (left.empty() || right.empty()) return OPAQUE;
  TermParts total;
  for (auto a = left.begin(), b = right.begin(); a != left.end() || b != right.end();) {
    if (b == right.end() || (a != left.end() && a->first < b->first)) total.push_back(*a++);
    else if (a == left.end() || b->first < a->first) total.push_back(*b++);
    else {
      Counts added = counts_[static_cast<size_t>(a->second)];
      const Counts& more = counts_[static_cast<size_t>(b->second)];
      if (added.size() != more.size()) doubt();
      for (size_t at = 0; at < added.size(); ++at) {
        trust(added[at] < 1 << 29 && more[at] < 1 << 29);
        added[at] += more[at];
      }
      total.push_back({a->first, counts(std::move(added))});
      ++a, ++b;
    }
  }
  check_sum(total);
  return number(total);
}

// Bases add up only where some declared tensor has them all, and finished elements only as often as it has them.
void Terms::check_sum(const TermParts& total) const {
  for (const auto& [basis, of] : total) trust(tensors[static_cast<size_t>(basis)].reduction == SUM);
  std::map<i64, i32> most;
  bool is_declared = false;
  for (size_t whole = OPAQUE + 1; whole < num_wholes_; ++whole) {
    std::map<i64, i64> has(terms_[whole].begin(), terms_[whole].end());
    if (!std::all_of(total.begin(), total.end(), [&](const auto& part) { return has.contains(part.first); })) continue;
    is_declared = true;
    for (const auto& [basis, number] : has) {
      const Counts& counted = counts_[static_cast<size_t>(number)];
      if (counted.size() == 1) most[basis] = std::max(most[basis], counted[0]);
    }
  }
  if (!is_declared) doubt();
  for (const auto& [basis, number] : total) {
    const Counts& counted = counts_[static_cast<size_t>(number)];
    if (counted.size() == 1 && counted[0] > most[basis]) doubt();
  }
}

i32 Terms::reduced(i64 op, i32 p, i32 q) {
  const TermParts left = parts(p), right = parts(q);
  if (p == q && is_idempotent(op) && (left.empty() || !tensors_of(p).empty())) return p;
  if (left.empty() || right.empty()) return OPAQUE;
  trust(left.size() == 1 && right.size() == 1 && left[0].first == right[0].first);
  const i64 basis = left[0].first;
  trust(tensors[static_cast<size_t>(basis)].reduction == op);
  Counts added = counts_[static_cast<size_t>(left[0].second)];
  const Counts& more = counts_[static_cast<size_t>(right[0].second)];
  trust(added.size() == more.size());
  for (size_t at = 0; at < added.size(); ++at) {
    trust(added[at] < 1 << 29 && more[at] < 1 << 29);
    added[at] += more[at];
  }
  return part(basis, std::move(added));
}

// --- products ---------------------------------------------------------------------------------------------------------

Block Terms::multiply(const Block& a, const Block& b) {
  const size_t dims_a = a.shape.size(), dims_b = b.shape.size();
  trust(dims_a >= 2 && dims_b >= 2 && a.shape[dims_a - 1] == b.shape[dims_b - 2]);
  const Block& leading = dims_a > 2 ? a : b;
  Shape shape(leading.shape.begin(), leading.shape.end() - 2);
  if (dims_a > 2 && dims_b > 2) trust(std::equal(a.shape.begin(), a.shape.end() - 2, b.shape.begin(), b.shape.end() - 2));
  shape.push_back(a.shape[dims_a - 2]), shape.push_back(b.shape[dims_b - 1]);
  Block out(shape);
  if (!a.size() || !b.size() || a.all_are(ZERO) || b.all_are(ZERO)) return out;
  const i32 left = one_term(a), right = one_term(b);
  for (const ProductRow& row : products_)
    if (stands_for(left, row.a) && stands_for(right, row.b) && product(row, a, b, left, right, out)) return out;
  doubt();
}

bool Terms::product(const ProductRow& row, const Block& a, const Block& b, i32 left, i32 right, Block& out) {
  Axes of_a, of_b;
  if (!axes_of(a, shape(row.a), row.transpose_a != 0, row.sums_batch != 0, true, of_a)) return false;
  if (!axes_of(b, shape(row.b), row.transpose_b != 0, row.sums_batch != 0, false, of_b)) return false;
  if (of_a.inner != of_b.inner) return false;
  const TensorRow &tensor_a = tensors[static_cast<size_t>(row.a)], &tensor_b = tensors[static_cast<size_t>(row.b)];
  const i64 operands = checked_mul(std::max<i64>(tensor_a.arrived, 1), std::max<i64>(tensor_b.arrived, 1));
  const i64 num_k = tensors[static_cast<size_t>(row.out)].num_summands / operands;
  trust(num_k <= MAX_LABELS);
  Counts counted(static_cast<size_t>(num_k), 0);
  for (const i64 at : of_a.inner) {
    trust(at >= 0 && at < static_cast<i64>(counted.size()));
    ++counted[static_cast<size_t>(at)];
  }
  const auto rows = static_cast<size_t>(a.shape[a.shape.size() - 2]), columns = static_cast<size_t>(b.shape[b.shape.size() - 1]);
  const size_t num_blocks = out.size() / (rows * columns), blocks_a = of_a.free.size() / rows, blocks_b = of_b.free.size() / columns;
  trust((blocks_a == num_blocks || blocks_a == 1) && (blocks_b == num_blocks || blocks_b == 1));
  for (size_t base = 0; base < num_blocks; ++base)
    for (size_t i = 0; i < rows; ++i) {
      const i64 m = of_a.free[(blocks_a == 1 ? 0 : base) * rows + i], batch_a = m / row.m, row_at = m % row.m;
      i64* to = out.index.data() + (base * rows + i) * columns;
      for (size_t j = 0; j < columns; ++j) {
        const i64 n = of_b.free[(blocks_b == 1 ? 0 : base) * columns + j];
        if (row.batch_b) {
          const i64 batch_b = n / row.n;
          if (!row.sums_batch && row.batch_a && batch_a != batch_b) return false;
          const i64 batch = row.sums_batch ? 0 : row.batch_a ? batch_a : batch_b;
          to[j] = (batch * row.m + row_at) * row.n + n % row.n;
        } else {
          to[j] = (batch_a * row.m + row_at) * row.n + n;
        }
      }
    }
  if (tensor_a.arrived) counted = kronecker(counted, left);
  if (tensor_b.arrived) counted = kronecker(counted, right);
  std::fill(out.term.begin(), out.term.end(), part(row.out, std::move(counted)));
  return true;
}

i32 Terms::one_term(const Block& of) const {
  const i32 term = of.term[0];
  if (term <= OPAQUE || !of.all_are(term)) doubt();
  return term;
}

// Whether elements of a term may be multiplied as those of a tensor: its finished ones, or parts in which it arrives.
bool Terms::stands_for(i32 term, i64 tensor) const {
  if (finished(tensor) == term) return true;
  const TensorRow& row = tensors[static_cast<size_t>(tensor)];
  const TermParts& of = parts(term);
  return tensors_of(term).empty() && of.size() == 1 && of[0].first == tensor && row.arrived > 0 && row.reduction == SUM;
}

Counts Terms::kronecker(const Counts& of, i32 operand) const {
  const TermParts& own_parts = parts(operand);
  if (own_parts.size() != 1) doubt();
  const Counts& own = counts_[static_cast<size_t>(own_parts[0].second)];
  Counts out;
  if (static_cast<i64>(of.size()) * static_cast<i64>(own.size()) > MAX_LABELS) doubt();
  out.reserve(of.size() * own.size());
  for (const i32 a : of)
    for (const i32 b : own) {
      trust(static_cast<i64>(a) * b < 1 << 29);
      out.push_back(a * b);
    }
  return out;
}

}  // namespace meshweave
