#include "labels.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace meshweave {
namespace {

using Counts = std::vector<i32>;
using Parts = std::vector<std::pair<i64, i64>>;  // (basis, number of its counts), by basis

constexpr i32 UNWRITTEN = 0, ZERO = 1;
constexpr i64 MAX_LABELS = i64{1} << 25;  // of all memory together, and of one block
constexpr i64 MAX_EXTENT = i64{1} << 40;

// Where a program does what it should not, or what only the reference knows.
struct Doubt {};

[[noreturn]] void doubt() { throw Doubt{}; }

// A column that is read from front to back.
class Stream {
 public:
  explicit Stream(const Column& column) : column_(column) {}
  bool done() const { return at_ == column_.size(); }
  i64 next(i64 low, i64 high) {
    require(at_ < column_.size(), "labels: a column ends too soon");
    const i64 value = column_[at_++];
    require(value >= low && value <= high, "labels: a number out of range");
    return value;
  }
  i64 index(size_t count) { return next(0, static_cast<i64>(count) - 1); }

 private:
  const Column& column_;
  size_t at_ = 0;
};

i64 product(const std::vector<i64>& sizes) {
  i64 total = 1;
  for (const i64 size : sizes) {
    total = checked_mul(total, size);
    if (total > MAX_LABELS) doubt();
  }
  return total;
}

struct Block {
  std::vector<i64> shape;
  std::vector<i32> term;
  std::vector<i64> index;

  Block() = default;
  explicit Block(std::vector<i64> of) : shape(std::move(of)) {
    term.resize(static_cast<size_t>(product(shape)), ZERO);
    index.resize(term.size(), 0);
  }
  size_t size() const { return term.size(); }
};

// --- terms ------------------------------------------------------------------------------------------------------------

struct ProductRow {
  i64 out, a, b, transpose_a, transpose_b;
};

class Terms {
 public:
  explicit Terms(const Columns& columns) {
    Stream tensors(column(columns, "tensors"));
    while (!tensors.done()) {
      const i64 rows = tensors.next(0, MAX_EXTENT), cols = tensors.next(0, MAX_EXTENT);
      shapes_.push_back({rows, cols});
      arrived_.push_back(tensors.next(0, 1 << 20));
    }
    terms_.resize(2);
    Stream finished(column(columns, "finished"));
    for (size_t tensor = 0; tensor < shapes_.size(); ++tensor) {
      Parts parts;
      for (i64 left = finished.next(1, 1 << 20); left > 0; --left) {
        const i64 basis = finished.index(shapes_.size());
        const i64 size = finished.next(0, MAX_LABELS), count = finished.next(0, 1 << 20);
        parts.push_back({basis, counts(Counts(static_cast<size_t>(size), static_cast<i32>(count)))});
      }
      std::sort(parts.begin(), parts.end());
      const i32 term = number(parts);
      finished_.push_back(term);
      if (static_cast<size_t>(term) >= tensors_.size()) tensors_.resize(static_cast<size_t>(term) + 1);
      tensors_[static_cast<size_t>(term)].push_back(static_cast<i64>(tensor));
    }
    num_wholes_ = terms_.size();
    Stream products(column(columns, "products"));
    while (!products.done()) {
      const i64 out = products.index(shapes_.size()), a = products.index(shapes_.size()), b = products.index(shapes_.size());
      products_.push_back({out, a, b, products.next(0, 1), products.next(0, 1)});
    }
  }

  size_t num_tensors() const { return shapes_.size(); }
  i32 finished(i64 tensor) const { return finished_[static_cast<size_t>(tensor)]; }

  // The term of part `place` of a tensor that arrives in parts.
  i32 arriving(i64 tensor, i64 place) {
    Counts own(static_cast<size_t>(arrived_[static_cast<size_t>(tensor)]), 0);
    require(place < static_cast<i64>(own.size()), "labels: no such part");
    own[static_cast<size_t>(place)] = 1;
    return number({{tensor, counts(std::move(own))}});
  }

  i32 sum(i32 p, i32 q) {
    if (p > q) std::swap(p, q);
    const u64 key = static_cast<u64>(static_cast<u32>(p)) << 32 | static_cast<u32>(q);
    const auto known = sums_.find(key);
    if (known != sums_.end()) return known->second;
    const Parts left = terms_[static_cast<size_t>(p)], right = terms_[static_cast<size_t>(q)];
    Parts total;
    for (auto a = left.begin(), b = right.begin(); a != left.end() || b != right.end();) {
      if (b == right.end() || (a != left.end() && a->first < b->first)) total.push_back(*a++);
      else if (a == left.end() || b->first < a->first) total.push_back(*b++);
      else {
        Counts added = counts_[static_cast<size_t>(a->second)];
        const Counts& more = counts_[static_cast<size_t>(b->second)];
        if (added.size() != more.size()) doubt();
        for (size_t at = 0; at < added.size(); ++at) added[at] += more[at];
        total.push_back({a->first, counts(std::move(added))});
        ++a, ++b;
      }
    }
    check_sum(total);
    return sums_[key] = number(total);
  }

  Block multiply(const Block& a, const Block& b) {
    const i64 m = a.shape[0], k = a.shape[1], n = b.shape[1];
    Block out({m, n});
    const auto all_zero = [](const Block& of) {
      return std::all_of(of.term.begin(), of.term.end(), [](i32 term) { return term == ZERO; });
    };
    if (!m || !k || !n || all_zero(a) || all_zero(b)) return out;
    const i32 left = one_term(a), right = one_term(b);
    for (const ProductRow& row : products_) {
      if (!stands_for(left, row.a) || !stands_for(right, row.b)) continue;
      std::vector<i64> rows, inner, inner_right, columns;
      if (!axes(a, row.a, row.transpose_a, rows, inner) || !axes(b, row.b, row.transpose_b, inner_right, columns)) continue;
      if (inner != inner_right) continue;
      const auto& shape_a = shapes_[static_cast<size_t>(row.a)];
      Counts counted(static_cast<size_t>(row.transpose_a ? shape_a.first : shape_a.second), 0);
      for (const i64 at : inner) ++counted[static_cast<size_t>(at)];
      if (arrived_[static_cast<size_t>(row.a)]) counted = kronecker(counted, left);
      if (arrived_[static_cast<size_t>(row.b)]) counted = kronecker(counted, right);
      const i32 term = number({{row.out, counts(std::move(counted))}});
      const i64 width = shapes_[static_cast<size_t>(row.out)].second;
      for (i64 i = 0; i < m; ++i)
        for (i64 j = 0; j < n; ++j) {
          const auto at = static_cast<size_t>(i * n + j);
          out.term[at] = term;
          out.index[at] = rows[static_cast<size_t>(i)] * width + columns[static_cast<size_t>(j)];
        }
      return out;
    }
    doubt();
  }

 private:
  i64 counts(Counts&& of) {
    const auto [known, is_new] = counts_of_.try_emplace(std::move(of), static_cast<i64>(counts_.size()));
    if (is_new) counts_.push_back(known->first);
    return known->second;
  }

  i32 number(const Parts& parts) {
    const auto [known, is_new] = numbers_.try_emplace(parts, static_cast<i32>(terms_.size()));
    if (is_new) terms_.push_back(parts);
    return known->second;
  }

  // Bases add up only where some declared tensor has them all, and finished elements only as often as it has them.
  void check_sum(const Parts& total) const {
    std::map<i64, i32> most;
    bool is_declared = false;
    for (size_t whole = 2; whole < num_wholes_; ++whole) {
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

  i32 one_term(const Block& of) const {
    const i32 term = of.term[0];
    if (term <= ZERO || !std::all_of(of.term.begin(), of.term.end(), [&](i32 other) { return other == term; })) doubt();
    return term;
  }

  // Whether elements of a term may be multiplied as those of a tensor: its finished ones, or parts in which it arrives.
  bool stands_for(i32 term, i64 tensor) const {
    if (finished(tensor) == term) return true;
    const Parts& parts = terms_[static_cast<size_t>(term)];
    const bool is_whole = static_cast<size_t>(term) < tensors_.size() && !tensors_[static_cast<size_t>(term)].empty();
    return !is_whole && parts.size() == 1 && parts[0].first == tensor && arrived_[static_cast<size_t>(tensor)] > 0;
  }

  Counts kronecker(const Counts& of, i32 operand) const {
    const Parts& parts = terms_[static_cast<size_t>(operand)];
    if (parts.size() != 1) doubt();
    const Counts& own = counts_[static_cast<size_t>(parts[0].second)];
    Counts out;
    if (static_cast<i64>(of.size()) * static_cast<i64>(own.size()) > MAX_LABELS) doubt();
    out.reserve(of.size() * own.size());
    for (const i32 a : of)
      for (const i32 b : own) out.push_back(a * b);
    return out;
  }

  // The positions of the rows and columns of a block of a declared matrix, transposed or not.
  bool axes(const Block& of, i64 tensor, bool transposed, std::vector<i64>& rows, std::vector<i64>& columns) const {
    const i64 width = shapes_[static_cast<size_t>(tensor)].second, m = of.shape[0], n = of.shape[1];
    if (width < 1) return false;
    rows.resize(static_cast<size_t>(m)), columns.resize(static_cast<size_t>(n));
    for (i64 i = 0; i < m; ++i)
      for (i64 j = 0; j < n; ++j) {
        const i64 index = of.index[static_cast<size_t>(i * n + j)];
        i64 row = index / width, column_ = index % width;
        if (transposed) std::swap(row, column_);
        if (j == 0) rows[static_cast<size_t>(i)] = row;
        if (i == 0) columns[static_cast<size_t>(j)] = column_;
        if (rows[static_cast<size_t>(i)] != row || columns[static_cast<size_t>(j)] != column_) return false;
      }
    return true;
  }

  std::vector<std::pair<i64, i64>> shapes_;  // of each tensor as a matrix
  std::vector<i64> arrived_;                 // parts in which a tensor arrives; 0 for one that arrives whole
  std::vector<Parts> terms_;
  std::map<Parts, i32> numbers_;
  std::vector<Counts> counts_;
  std::map<Counts, i64> counts_of_;
  std::vector<i32> finished_;
  std::vector<std::vector<i64>> tensors_;  // whose finished elements have a term
  size_t num_wholes_ = 0;
  std::vector<ProductRow> products_;
  std::unordered_map<u64, i32> sums_;
};

// --- memory -----------------------------------------------------------------------------------------------------------

struct ViewOf {
  i64 buffer, slot, rank;  // rank: a position, or -1
  std::vector<std::vector<i64>> positions;  // per dim
  std::vector<i64> shape;
};

struct OpOf {
  Kind kind;
  std::vector<ViewOf> views;  // out first, where there is one
  bool update, transpose_a, transpose_b;
  i64 first, second;      // dim, or split and concatenation dim; root; shift
  std::vector<i64> sizes;  // of parts; empty for equal ones
};

class Run {
 public:
  explicit Run(const Columns& columns) : terms_(columns) {
    read_memory(columns);
    read_ops(columns);
  }

  void run(const Columns& columns) {
    Stream events(column(columns, "events"));
    std::vector<std::pair<const OpOf*, i64>> members;
    while (!events.done()) {
      members.clear();
      for (i64 left = events.next(1, 1 << 20); left > 0; --left) {
        const OpOf& op = ops_[static_cast<size_t>(events.index(ops_.size()))];
        members.push_back({&op, events.index(static_cast<size_t>(num_ranks_))});
      }
      event(members);
    }
    check_outputs(columns);
  }

 private:
  using Members = std::vector<std::pair<const OpOf*, i64>>;

  void read_memory(const Columns& columns) {
    Stream areas(column(columns, "areas"));
    num_ranks_ = areas.next(1, 1 << 20);
    num_buffers_ = areas.next(0, 1 << 20);
    require(num_ranks_ * num_buffers_ <= i64{1} << 26, "labels: too many buffers");
    first_.assign(static_cast<size_t>(num_ranks_ * num_buffers_), -1);
    slots_.assign(first_.size(), 0);
    i64 total = 0;
    while (!areas.done()) {
      const auto at = static_cast<size_t>(areas.index(first_.size()));
      std::vector<i64> shape;
      slots_[at] = areas.next(1, 1 << 20);
      for (i64 dims = areas.next(0, MAX_DIMS); dims > 0; --dims) shape.push_back(areas.next(0, MAX_EXTENT));
      first_[at] = static_cast<i64>(memory_.size());
      for (i64 slot = 0; slot < slots_[at]; ++slot) {
        total += product(shape);
        if (total > MAX_LABELS) doubt();
        Block& made = memory_.emplace_back(shape);
        std::fill(made.term.begin(), made.term.end(), UNWRITTEN);
      }
    }
    Stream inputs(column(columns, "inputs"));
    while (!inputs.done()) {
      const auto at = static_cast<size_t>(inputs.index(first_.size()));
      const i64 tensor = inputs.index(terms_.num_tensors()), place = inputs.next(-1, 1 << 20);
      require(first_[at] >= 0, "labels: an input without memory");
      const i32 term = place < 0 ? terms_.finished(tensor) : terms_.arriving(tensor, place);
      const Block made = elements(inputs, term, memory_[static_cast<size_t>(first_[at])].shape);
      for (i64 slot = 0; slot < slots_[at]; ++slot) memory_[static_cast<size_t>(first_[at] + slot)] = made;
    }
  }

  // The elements of a shard: per dim the positions, and the elements of the tensor from one to the next.
  static Block elements(Stream& from, i32 term, const std::vector<i64>& shape) {
    Block made(shape);
    std::fill(made.term.begin(), made.term.end(), term);
    i64 inner = static_cast<i64>(made.size());
    for (const i64 extent : shape) {
      const i64 stride = from.next(0, MAX_EXTENT);
      std::vector<i64> positions;
      for (i64 at = 0; at < extent; ++at) positions.push_back(checked_mul(from.next(0, MAX_EXTENT), stride));
      if (!made.size()) continue;
      inner /= extent;
      for (size_t at = 0; at < made.size(); ++at)
        made.index[at] = checked_add(
            made.index[at], positions[static_cast<size_t>(static_cast<i64>(at) / inner % extent)]);
    }
    return made;
  }

  void read_ops(const Columns& columns) {
    Stream from(column(columns, "ops"));
    while (!from.done()) {
      OpOf op;
      op.kind = static_cast<Kind>(from.index(static_cast<size_t>(Kind::COUNT)));
      op.update = from.next(0, 1) != 0;
      op.transpose_a = from.next(0, 1) != 0;
      op.transpose_b = from.next(0, 1) != 0;
      op.first = from.next(-MAX_EXTENT, MAX_EXTENT);
      op.second = from.next(-MAX_EXTENT, MAX_EXTENT);
      for (i64 left = from.next(0, 1 << 20); left > 0; --left) op.sizes.push_back(from.next(0, MAX_EXTENT));
      for (i64 left = from.next(0, 3); left > 0; --left) op.views.push_back(view(from));
      ops_.push_back(std::move(op));
    }
  }

  ViewOf view(Stream& from) const {
    ViewOf out;
    out.buffer = from.index(static_cast<size_t>(num_buffers_));
    out.slot = from.next(0, 1 << 20);
    out.rank = from.next(-1, num_ranks_ - 1);
    for (i64 dims = from.next(0, MAX_DIMS); dims > 0; --dims) {
      Selector selector;
      selector.start = from.next(0, MAX_EXTENT), selector.stop = from.next(0, MAX_EXTENT);
      selector.first = from.next(-MAX_EXTENT, MAX_EXTENT), selector.block = from.next(0, MAX_EXTENT);
      selector.stride = from.next(0, MAX_EXTENT);
      std::vector<i64> positions;
      if (selector.stop - selector.start > MAX_LABELS) doubt();
      for (i64 at = selector.start; at < selector.stop; ++at)
        if (!selector.blocked() || floor_mod(at - selector.first, selector.stride) < selector.block) positions.push_back(at);
      out.shape.push_back(static_cast<i64>(positions.size()));
      out.positions.push_back(std::move(positions));
    }
    product(out.shape);
    return out;
  }

  Block& area(const ViewOf& of, i64 rank) {
    const auto at = static_cast<size_t>((of.rank < 0 ? rank : of.rank) * num_buffers_ + of.buffer);
    require(first_[at] >= 0 && of.slot < slots_[at], "labels: a view of no memory");
    Block& memory = memory_[static_cast<size_t>(first_[at] + of.slot)];
    require(memory.shape.size() == of.shape.size(), "labels: a view of other dims");
    for (size_t dim = 0; dim < of.shape.size(); ++dim)
      require(of.positions[dim].empty() || of.positions[dim].back() < memory.shape[dim], "labels: a view beyond its buffer");
    return memory;
  }

  // Calls visit(place in the memory, place in the view) for each element of a view.
  template <class Visit>
  static void each(const ViewOf& of, const Block& memory, Visit visit) {
    size_t count = 1;
    for (const i64 extent : of.shape) count *= static_cast<size_t>(extent);
    if (!count) return;
    const size_t dims = of.shape.size();
    std::vector<size_t> at(dims, 0);
    for (size_t place = 0; place < count; ++place) {
      i64 address = 0;
      for (size_t dim = 0; dim < dims; ++dim) address = address * memory.shape[dim] + of.positions[dim][at[dim]];
      visit(static_cast<size_t>(address), place);
      for (size_t dim = dims; dim-- > 0;) {
        if (++at[dim] < static_cast<size_t>(of.shape[dim])) break;
        at[dim] = 0;
      }
    }
  }

  Block read(const ViewOf& of, i64 rank) {
    const Block& memory = area(of, rank);
    Block out(of.shape);
    each(of, memory, [&](size_t from, size_t to) {
      if (memory.term[from] == UNWRITTEN) doubt();
      out.term[to] = memory.term[from], out.index[to] = memory.index[from];
    });
    return out;
  }

  void write(const ViewOf& of, i64 rank, const Block& value, bool update = false) {
    if (value.shape != of.shape) doubt();
    Block& memory = area(of, rank);
    each(of, memory, [&](size_t to, size_t from) {
      if (!update) {
        memory.term[to] = value.term[from], memory.index[to] = value.index[from];
        return;
      }
      if (memory.term[to] == UNWRITTEN) doubt();
      add(memory.term[to], memory.index[to], value.term[from], value.index[from]);
    });
  }

  void add(i32& term, i64& index, i32 more, i64 more_index) {
    if (more == ZERO) return;
    if (term == ZERO) {
      term = more, index = more_index;
      return;
    }
    if (index != more_index) doubt();
    term = terms_.sum(term, more);
  }

  static Block transposed(const Block& of) {
    Block out({of.shape[1], of.shape[0]});
    for (i64 i = 0; i < of.shape[0]; ++i)
      for (i64 j = 0; j < of.shape[1]; ++j) {
        const auto to = static_cast<size_t>(j * of.shape[0] + i), from = static_cast<size_t>(i * of.shape[1] + j);
        out.term[to] = of.term[from], out.index[to] = of.index[from];
      }
    return out;
  }

  // --- parts along a dim --------------------------------------------------------------------------------------------

  // Calls visit(place in the whole, place in the part) for the part of `size` from `start` on along `dim`.
  template <class Visit>
  static void along(const std::vector<i64>& whole, size_t dim, i64 start, i64 size, Visit visit) {
    i64 outer = 1, inner = 1;
    for (size_t at = 0; at < whole.size(); ++at) (at < dim ? outer : at > dim ? inner : outer) *= at == dim ? 1 : whole[at];
    for (i64 o = 0; o < outer; ++o)
      for (i64 s = 0; s < size; ++s)
        for (i64 i = 0; i < inner; ++i)
          visit(static_cast<size_t>((o * whole[dim] + start + s) * inner + i), static_cast<size_t>((o * size + s) * inner + i));
  }

  static Block part(const Block& of, size_t dim, i64 start, i64 size) {
    if (dim >= of.shape.size() || start + size > of.shape[dim]) doubt();
    std::vector<i64> shape = of.shape;
    shape[dim] = size;
    Block out(shape);
    along(of.shape, dim, start, size, [&](size_t from, size_t to) { out.term[to] = of.term[from], out.index[to] = of.index[from]; });
    return out;
  }

  static Block joined(const std::vector<Block>& parts, size_t dim) {
    std::vector<i64> shape = parts[0].shape;
    if (dim >= shape.size()) doubt();
    shape[dim] = 0;
    for (const Block& one : parts) {
      if (one.shape.size() != shape.size()) doubt();
      for (size_t at = 0; at < shape.size(); ++at)
        if (at != dim && one.shape[at] != shape[at]) doubt();
      shape[dim] += one.shape[dim];
    }
    Block out(shape);
    i64 start = 0;
    for (const Block& one : parts) {
      along(shape, dim, start, one.shape[dim], [&](size_t to, size_t from) { out.term[to] = one.term[from], out.index[to] = one.index[from]; });
      start += one.shape[dim];
    }
    return out;
  }

  static i64 size_of_part(const OpOf& op, i64 total, size_t count, size_t place) {
    if (op.sizes.empty()) return total / static_cast<i64>(count);
    if (op.sizes.size() != count) doubt();
    return op.sizes[place];
  }

  // --- events -------------------------------------------------------------------------------------------------------

  static const ViewOf& view_of(const OpOf& op, size_t at) {
    require(at < op.views.size(), "labels: an op without its view");
    return op.views[at];
  }

  void event(const Members& members) {
    const OpOf& op = *members[0].first;
    const i64 rank = members[0].second;
    switch (op.kind) {
      case Kind::MATMUL: {
        Block a = read(view_of(op, 1), rank), b = read(view_of(op, 2), rank);
        if (a.shape.size() != 2 || b.shape.size() != 2) doubt();
        if (op.transpose_a) a = transposed(a);
        if (op.transpose_b) b = transposed(b);
        if (a.shape[1] != b.shape[0]) doubt();
        write(view_of(op, 0), rank, terms_.multiply(a, b), op.update);
        break;
      }
      case Kind::COPY: case Kind::PUT: case Kind::GET: case Kind::ADD: case Kind::ACCUMULATE:
        write(view_of(op, 0), rank, read(view_of(op, 1), rank), op.update);
        break;
      case Kind::ZERO: write(view_of(op, 0), rank, Block(view_of(op, 0).shape)); break;
      case Kind::SEND:
        require(members.size() == 2, "labels: a send without its recv");
        write(view_of(*members[1].first, 0), members[1].second, read(view_of(op, 0), rank), members[1].first->update);
        break;
      case Kind::FENCE: break;
      case Kind::CALL: case Kind::RECV: case Kind::COUNT: doubt();
      default: collective(members);
    }
  }

  Block reduced(const Members& members) {
    Block total = read(view_of(*members[0].first, 1), members[0].second);
    for (size_t at = 1; at < members.size(); ++at) {
      const Block more = read(view_of(*members[at].first, 1), members[at].second);
      if (more.shape != total.shape) doubt();
      for (size_t i = 0; i < more.size(); ++i) add(total.term[i], total.index[i], more.term[i], more.index[i]);
    }
    return total;
  }

  void collective(const Members& members) {
    const OpOf& op = *members[0].first;
    const size_t count = members.size();
    const auto source = [&](size_t at) { return read(view_of(*members[at].first, 1), members[at].second); };
    const auto store = [&](size_t at, const Block& value) { write(view_of(*members[at].first, 0), members[at].second, value); };
    if (op.kind == Kind::BROADCAST || op.kind == Kind::REDUCE) require(op.first >= 0 && op.first < static_cast<i64>(count), "labels: no root");
    const auto root = static_cast<size_t>(op.first);
    std::vector<Block> blocks;
    switch (op.kind) {
      case Kind::BROADCAST: {
        const Block value = source(root);
        for (size_t at = 0; at < count; ++at) store(at, value);
        break;
      }
      case Kind::REDUCE: store(root, reduced(members)); break;
      case Kind::ALL_REDUCE: {
        const Block value = reduced(members);
        for (size_t at = 0; at < count; ++at) store(at, value);
        break;
      }
      case Kind::ALL_GATHER: {
        for (size_t at = 0; at < count; ++at) blocks.push_back(source(at));
        const Block value = joined(blocks, root);
        for (size_t at = 0; at < count; ++at) store(at, value);
        break;
      }
      case Kind::REDUCE_SCATTER: {
        const Block total = reduced(members);
        if (root >= total.shape.size()) doubt();
        i64 start = 0;
        for (size_t at = 0; at < count; ++at) {
          const i64 size = size_of_part(op, total.shape[root], count, at);
          store(at, part(total, root, start, size));
          start += size;
        }
        break;
      }
      case Kind::PERMUTE: {
        for (size_t at = 0; at < count; ++at) blocks.push_back(source(at));
        for (size_t at = 0; at < count; ++at)
          store(at, blocks[static_cast<size_t>(floor_mod(static_cast<i64>(at) - op.first, static_cast<i64>(count)))]);
        break;
      }
      case Kind::ALL_TO_ALL: {
        for (size_t at = 0; at < count; ++at) blocks.push_back(source(at));
        for (size_t to = 0; to < count; ++to) {
          std::vector<Block> received;
          for (size_t at = 0; at < count; ++at) {
            const OpOf& sender = *members[at].first;
            const auto dim = static_cast<size_t>(sender.first);
            if (sender.first < 0 || dim >= blocks[at].shape.size()) doubt();
            i64 start = 0;
            for (size_t before = 0; before < to; ++before) start += size_of_part(sender, blocks[at].shape[dim], count, before);
            received.push_back(part(blocks[at], dim, start, size_of_part(sender, blocks[at].shape[dim], count, to)));
          }
          require(members[to].first->second >= 0, "labels: joined along no dim");
          store(to, joined(received, static_cast<size_t>(members[to].first->second)));
        }
        break;
      }
      default: doubt();
    }
  }

  // Each output, its parts on several ranks added up, is the finished tensor at its own positions.
  void check_outputs(const Columns& columns) {
    Stream outputs(column(columns, "outputs"));
    while (!outputs.done()) {
      const i64 tensor = outputs.index(terms_.num_tensors());
      Block total;
      for (i64 left = outputs.next(1, 1 << 20), first = 1; left > 0; --left, first = 0) {
        const auto at = static_cast<size_t>(outputs.index(first_.size()));
        require(first_[at] >= 0, "labels: an output without memory");
        const Block& own = memory_[static_cast<size_t>(first_[at])];
        if (std::find(own.term.begin(), own.term.end(), UNWRITTEN) != own.term.end()) doubt();
        if (first) {
          total = own;
          continue;
        }
        if (own.shape != total.shape) doubt();
        for (size_t i = 0; i < own.size(); ++i) add(total.term[i], total.index[i], own.term[i], own.index[i]);
      }
      const Block expected = elements(outputs, terms_.finished(tensor), total.shape);
      if (outputs.next(0, 1) && (total.term != expected.term || total.index != expected.index)) doubt();
    }
  }

  Terms terms_;
  i64 num_ranks_ = 0, num_buffers_ = 0;
  std::vector<i64> first_, slots_;  // per rank and buffer: its first block of memory, -1 for none, and how many
  std::vector<Block> memory_;
  std::vector<OpOf> ops_;
};

}  // namespace

bool labels_hold(const Columns& columns) {
  try {
    Run(columns).run(columns);
    return true;
  } catch (const Doubt&) {
    return false;
  }
}

}  // namespace meshweave
