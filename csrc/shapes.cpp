#include "shapes.hpp"

#include <numeric>

namespace meshweave {
namespace {

Shape with(Shape shape, size_t dim, i64 size) {
  trust(dim < shape.size());
  shape[dim] = size;
  return shape;
}

bool is_same_view(const OpView& op, const Access& a, const Access& b) {
  return a.buffer == b.buffer && a.slot == b.slot && op.owner(a) == op.owner(b) && a.dims == b.dims &&
         std::equal(a.selectors.begin(), a.selectors.begin() + a.dims, b.selectors.begin());
}

// Whether a reduction of shapes a and b, of which matrices may be transposed, has the shape of `out`.
bool is_product(const Shape& out, Shape a, Shape b, bool transpose_a, bool transpose_b) {
  if (out.size() < 2 || a.size() < 2 || b.size() < 2) return false;
  if (transpose_a) std::swap(a[a.size() - 1], a[a.size() - 2]);
  if (transpose_b) std::swap(b[b.size() - 1], b[b.size() - 2]);
  const i64 m = a[a.size() - 2], n = b[b.size() - 1];
  if (a[a.size() - 1] != b[b.size() - 2]) return false;
  a.resize(a.size() - 2), b.resize(b.size() - 2);
  if (!a.empty() && !b.empty() && a != b) return false;
  const bool sums_batch = !a.empty() && !b.empty() && out.size() == 2;
  Shape expected = sums_batch ? Shape{} : a.empty() ? b : a;
  expected.push_back(m), expected.push_back(n);
  return out == expected;
}

}  // namespace

std::vector<i64> ShapeRules::part_sizes(const OpView& op, i64 total, size_t count) const {
  const auto begin = op.of->sizes.begin() + op.op->sizes;
  std::vector<i64> sizes(begin, begin + op.op->num_sizes);
  if (op.row->sizes_mode == 0) sizes.assign(1, total / static_cast<i64>(count));
  if (op.row->sizes_mode != 2 && sizes.size() == 1) sizes.assign(count, sizes[0]);
  trust(sizes.size() == count);
  return sizes;
}

std::vector<i64> ShapeRules::recv_sizes(const OpView& op, i64 total, size_t count) const {
  if (op.proof->recv_mode == 0) return std::vector<i64>(count, total / static_cast<i64>(count));
  const auto at = static_cast<size_t>(op.proof->recv_sizes);
  std::vector<i64> sizes(code.lists.begin() + code.list_offsets[at], code.lists.begin() + code.list_offsets[at + 1]);
  trust(sizes.size() == count);
  for (const i64 size : sizes) trust(size >= 0 && size <= i64{1} << 48);
  return sizes;
}

void ShapeRules::check_op(const OpView& op) const {
  check_remote(op);
  check_overlaps(op);
  switch (op.row->kind) {
    case Kind::MATMUL:
      trust(op.num_views >= 3);
      trust(is_product(shape_of(op.out()), shape_of(op.view(0)), shape_of(op.view(1)), (op.row->flags & TRANSPOSE_A) != 0,
                       (op.row->flags & TRANSPOSE_B) != 0));
      break;
    case Kind::COPY:
    case Kind::ADD: trust(shape_of(op.out()) == shape_of(op.view(0))); break;
    case Kind::GET:
    case Kind::PUT:
    case Kind::ACCUMULATE:
      trust(shape_of(op.out()) == shape_of(op.view(0)) && dtype(op.out()) == dtype(op.view(0)));
      trust(op.row->kind != Kind::ACCUMULATE || op.proof->reduction == 0);
      break;
    default: break;
  }
}

// A remote view of an op that may not reach others.
void ShapeRules::check_remote(const OpView& op) const {
  const Kind kind = op.row->kind;
  for (size_t at = 0; at < op.num_views; ++at) {
    if (op.views[at].rank < 0) continue;
    const bool is_out = op.views[at].mode != Mode::READ || at + 1 == op.num_views;
    trust(kind == Kind::MATMUL || kind == Kind::COPY || ((kind == Kind::GET || kind == Kind::ADD) && at == 0) ||
          ((kind == Kind::PUT || kind == Kind::ACCUMULATE) && is_out));
  }
}

// An output that overlaps an input, or another one; elementwise ops may work on exactly the same elements.
void ShapeRules::check_overlaps(const OpView& op) const {
  const Kind kind = op.row->kind;
  const auto meet = [&](const Access& a, const Access& b) {
    return a.buffer == b.buffer && a.slot == b.slot && op.owner(a) == op.owner(b) && overlap(a, b, blocks_left);
  };
  const bool in_place = kind == Kind::ALL_REDUCE || kind == Kind::BROADCAST || kind == Kind::REDUCE || kind == Kind::ADD ||
                        kind == Kind::COPY || kind == Kind::RECV || kind == Kind::ACCUMULATE;
  for (size_t at = 0; at < op.num_views; ++at) {
    const Access& out = op.views[at];
    if (out.mode == Mode::READ) continue;
    if (kind == Kind::CALL) {
      for (size_t other = at + 1; other < op.num_views; ++other)
        if (op.views[other].mode != Mode::READ) trust(!meet(out, op.views[other]));
      continue;
    }
    const size_t count = kind == Kind::MATMUL ? std::min<size_t>(op.num_views, 2) : op.num_views;
    for (size_t other = 0; other < count; ++other) {
      const Access& in = op.views[other];
      if (in.mode == Mode::READ && !(in_place && is_same_view(op, out, in))) trust(!meet(out, in));
    }
  }
}

void ShapeRules::check_message(const OpView& send, const OpView& recv) const {
  trust(shape_of(send.out()) == shape_of(recv.out()) && dtype(send.out()) == dtype(recv.out()));
}

void ShapeRules::check_collective(const std::vector<OpView>& members) const {
  const OpView& first = members[0];
  const Kind kind = first.row->kind;
  const size_t count = members.size();
  for (const OpView& op : members) {
    trust(op.row->kind == kind && op.proof->name == first.proof->name && op.proof->reduction == first.proof->reduction);
    trust(op.row->dim == first.row->dim && op.proof->dim == first.proof->dim && op.proof->step == first.proof->step);
    trust(op.op->step == first.op->step && op.row->lane == first.row->lane);
  }
  if (kind == Kind::FENCE) return;
  if (kind == Kind::EXCHANGE) doubt();  // it is timed alone
  const bool has_dim = kind == Kind::ALL_GATHER || kind == Kind::REDUCE_SCATTER || kind == Kind::ALL_TO_ALL;
  const auto dim = static_cast<size_t>(first.row->dim);
  std::vector<Shape> sources, results;
  for (const OpView& op : members) {
    trust(op.num_views == 2 && dtype(op.view(0)) == dtype(op.view(1)) && dtype(op.view(0)) == dtype(first.view(0)));
    sources.push_back(shape_of(op.view(0))), results.push_back(shape_of(op.view(1)));
    if (has_dim) trust(first.row->dim >= 0 && dim < sources.back().size() && dim < results.back().size());
    if (kind == Kind::BROADCAST || kind == Kind::REDUCE)
      trust(op.op->b == first.op->b && op.op->c == first.op->c && op.op->b >= 0 && op.op->b < static_cast<i64>(count));
    if (kind == Kind::PERMUTE) trust(op.op->shift == first.op->shift && op.op->b == first.op->b);
  }
  const auto alike = [&] {
    for (const Shape& shape : sources) trust(shape == sources[0]);
  };
  switch (kind) {
    case Kind::ALL_GATHER: {
      const bool equal = first.row->sizes_mode == 0;
      const auto sizes = equal ? std::vector<i64>(count, sources[0][dim]) : part_sizes(first, 0, count);
      for (const OpView& op : members)
        trust((op.row->sizes_mode == 0) == equal && (equal || part_sizes(op, 0, count) == sizes));
      const i64 total = std::accumulate(sizes.begin(), sizes.end(), i64{0}, checked_add);
      for (size_t at = 0; at < count; ++at)
        trust(sources[at] == with(sources[0], dim, sizes[at]) && results[at] == with(sources[0], dim, total));
      break;
    }
    case Kind::REDUCE_SCATTER: {
      alike();
      const i64 total = sources[0][dim];
      const auto sizes = part_sizes(first, total, count);
      for (const OpView& op : members)
        trust((op.row->sizes_mode == 0) == (first.row->sizes_mode == 0) && part_sizes(op, total, count) == sizes);
      trust(std::accumulate(sizes.begin(), sizes.end(), i64{0}, checked_add) == total);
      for (size_t at = 0; at < count; ++at) trust(results[at] == with(sources[0], dim, sizes[at]));
      break;
    }
    case Kind::ALL_REDUCE:
      alike();
      for (const Shape& shape : results) trust(shape == sources[0]);
      break;
    case Kind::BROADCAST:
      for (const Shape& shape : results) trust(shape == sources[static_cast<size_t>(first.op->b)]);
      break;
    case Kind::REDUCE:
      alike();
      trust(results[static_cast<size_t>(first.op->b)] == sources[0]);
      break;
    case Kind::PERMUTE:
      for (size_t at = 0; at < count; ++at)
        trust(results[at] == sources[static_cast<size_t>(floor_mod(static_cast<i64>(at) - first.op->b, static_cast<i64>(count)))]);
      break;
    case Kind::ALL_TO_ALL: check_all_to_all(members, sources); break;
    default: doubt();
  }
}

void ShapeRules::check_all_to_all(const std::vector<OpView>& members, const std::vector<Shape>& sources) const {
  const size_t count = members.size();
  const auto split = static_cast<size_t>(members[0].row->dim), concat = static_cast<size_t>(members[0].proof->dim);
  std::vector<std::vector<i64>> sent;
  for (size_t at = 0; at < count; ++at) {
    sent.push_back(part_sizes(members[at], sources[at][split], count));
    trust(std::accumulate(sent[at].begin(), sent[at].end(), i64{0}, checked_add) == sources[at][split]);
  }
  for (size_t to = 0; to < count; ++to) {
    const Shape out = shape_of(members[to].view(1));
    trust(members[to].proof->dim >= 0 && concat < out.size() && concat < sources[to].size());
    const auto received = recv_sizes(members[to], out[concat], count);
    const Shape first = with(sources[0], split, sent[0][to]);
    for (size_t from = 0; from < count; ++from)
      trust(with(sources[from], split, sent[from][to]) == with(first, concat, received[from]));
    trust(out == with(first, concat, std::accumulate(received.begin(), received.end(), i64{0}, checked_add)));
  }
}

}  // namespace meshweave
