#include "labels.hpp"

#include "walk.hpp"

namespace meshweave {
namespace {

constexpr i64 MAX_AREAS = i64{1} << 24;  // of ranks and buffers
constexpr i64 MAX_BLOCKS_OF_MEMORY = i64{1} << 22;

}  // namespace

LabelRun::LabelRun(const ShapeRules& rules, const Columns& columns)
    : rules_(rules), columns_(columns), terms_(columns), num_buffers_(static_cast<i64>(rules.code.buffers.size())) {
  trust(rules.code.num_ranks() * num_buffers_ <= MAX_AREAS);
  Stream held(column(columns, "held"));
  for (i64 buffer = 0; buffer < num_buffers_; ++buffer) {
    HeldTensor one;
    one.tensor = held.next(-1, static_cast<i64>(terms_.num_tensors()) - 1);
    one.is_input = held.next(0, 1) != 0, one.has_partial = held.next(0, 1) != 0, one.is_declared = held.next(0, 1) != 0;
    require(!one.is_input || one.tensor >= 0, "proof: an input without a tensor");
    held_.push_back(one);
  }
  make_memory();
  read_shards(columns);
  read_functions(columns);
}

void LabelRun::make_memory() {
  const Template& code = rules_.code;
  first_.assign(static_cast<size_t>(code.num_ranks() * num_buffers_), -1);
  i64 total = 0;
  for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
    const std::vector<i64> env = environment(code, rank);
    for (i64 buffer = 0; buffer < num_buffers_; ++buffer) {
      const BufferRow& row = code.buffers[static_cast<size_t>(buffer)];
      if (!code.in_set(row.set, rank)) continue;
      Shape shape;
      for (i64 dim = 0; dim < row.dims; ++dim) {
        const i64 size = row.table ? code.shapes[static_cast<size_t>(row.shape + rank * row.dims + dim)]
                                   : code.expressions.evaluate(code.shape_exprs[static_cast<size_t>(row.shape + dim)], env);
        trust(size >= 0);
        shape.push_back(size);
      }
      first_[area(buffer, rank)] = static_cast<i64>(memory_.size());
      trust(static_cast<i64>(memory_.size()) + row.slots <= MAX_BLOCKS_OF_MEMORY);
      total += num_elements(shape) * row.slots;  // below 2**45
      trust(total <= MAX_LABELS);
      for (i64 slot = 0; slot < row.slots; ++slot) memory_.emplace_back(shape, UNWRITTEN);
    }
  }
}

void LabelRun::read_shards(const Columns& columns) {
  const Template& code = rules_.code;
  shard_of_.assign(first_.size(), -1);
  Stream rows(column(columns, "shards"));
  while (!rows.done()) {
    const i64 buffer = rows.index(static_cast<size_t>(num_buffers_)), rank = rows.index(static_cast<size_t>(code.num_ranks()));
    const i64 place = rows.next(-1, 1 << 20), first = first_[area(buffer, rank)];
    const HeldTensor& held = held_[static_cast<size_t>(buffer)];
    require(first >= 0 && held.tensor >= 0 && shard_of_[area(buffer, rank)] < 0, "proof: a shard of no memory");
    const Shape &local = memory_[static_cast<size_t>(first)].shape, &whole = terms_.shape(held.tensor);
    require(local.size() == whole.size(), "proof: a shard of other dims than its tensor");
    Lists lists(whole.size());
    for (size_t dim = 0; dim < whole.size(); ++dim)
      for (i64 left = local[dim]; left > 0; --left) lists[dim].push_back(rows.next(0, whole[dim] - 1));
    if (held.is_input) {
      const i32 term = place < 0 ? terms_.finished(held.tensor) : terms_.arriving(held.tensor, place);
      const Block made = elements(held.tensor, lists, term);
      const i64 slots = code.buffers[static_cast<size_t>(buffer)].slots;
      for (i64 slot = 0; slot < slots; ++slot) memory_[static_cast<size_t>(first + slot)] = made;
    }
    shard_of_[area(buffer, rank)] = static_cast<i64>(shards_.size());
    shards_.push_back(std::move(lists));
  }
}

const LabelRun::Lists& LabelRun::shard(i64 buffer, i64 rank) const {
  const i64 known = shard_of_[area(buffer, rank)];
  require(known >= 0, "proof: a buffer without its shard");
  return shards_[static_cast<size_t>(known)];
}

// The labels of elements of a tensor at the row-major product of positions.
Block LabelRun::elements(i64 tensor, const Lists& lists, i32 term) const {
  Shape shape;
  for (const Positions& list : lists) shape.push_back(static_cast<i64>(list.size()));
  Block made(shape, term);
  if (!made.size()) return made;
  const Shape& whole = terms_.shape(tensor);
  size_t count = 1;  // elements made so far, at the front
  for (size_t dim = 0; dim < lists.size(); ++dim) {
    const size_t extent = lists[dim].size();
    for (size_t at = count; at-- > 0;)
      for (size_t i = extent; i-- > 0;)
        made.index[at * extent + i] = made.index[at] * whole[dim] + lists[dim][i];
    count *= extent;
  }
  return made;
}

// The labels that the elements of a view have by the layout of its buffer.
Block LabelRun::expected(const OpView& op, const Access& view) const {
  const i64 tensor = held_[static_cast<size_t>(view.buffer)].tensor;
  const Lists& whole = shard(view.buffer, op.owner(view));
  trust(whole.size() == static_cast<size_t>(view.dims));
  Lists lists(whole.size());
  for (size_t dim = 0; dim < whole.size(); ++dim) {
    const Selector& of = view.selectors[dim];
    for (i64 at = of.start; at < of.stop; ++at)
      if (!of.blocked() || floor_mod(at - of.first, of.stride) < of.block) lists[dim].push_back(whole[dim][static_cast<size_t>(at)]);
  }
  return elements(tensor, lists, terms_.finished(tensor));
}

Block& LabelRun::memory(const OpView& op, const Access& view) {
  const i64 first = first_[area(view.buffer, op.owner(view))];
  trust(first >= 0);
  return memory_[static_cast<size_t>(first + view.slot)];
}

Block LabelRun::read(const OpView& op, const Access& view) {
  const Block& from = memory(op, view);
  Block out(shape_of(view));
  each_run(view, from.shape, [&](size_t at, size_t place, size_t count) { out.take(place, from, at, count); });
  trust(std::find(out.term.begin(), out.term.end(), UNWRITTEN) == out.term.end());
  return out;
}

void LabelRun::write(const OpView& op, const Access& view, const Block& value, bool update) {
  trust(value.shape == shape_of(view));
  if (update) {
    Block total = read(op, view);
    terms_.combine(SUM, total, value);
    return write(op, view, total);
  }
  Block& to = memory(op, view);
  each_run(view, to.shape, [&](size_t at, size_t place, size_t count) { to.take(at, value, place, count); });
}

// --- events -----------------------------------------------------------------------------------------------------------

void LabelRun::run(const std::vector<OpView>& members, const std::vector<i64>& stash) {
  const OpView& op = members[0];
  switch (op.row->kind) {
    case Kind::MATMUL: matmul(op); break;
    case Kind::COPY: case Kind::PUT: case Kind::GET:
      write(op, op.out(), read(op, op.view(0)), op.out().mode == Mode::UPDATE);
      break;
    case Kind::ADD: case Kind::ACCUMULATE: write(op, op.out(), read(op, op.view(0)), true); break;
    case Kind::ZERO: write(op, op.out(), Block(shape_of(op.out()))); break;
    case Kind::SEND: {
      trust(members.size() == 2);
      const OpView& recv = members[1];
      write(recv, recv.out(), read(op, op.view(0)), (recv.row->flags & UPDATES) != 0);
      break;
    }
    case Kind::CALL: call(op, stash); break;
    case Kind::FENCE: break;
    case Kind::RECV: case Kind::COUNT: doubt();
    default: collective(members);
  }
}

void LabelRun::matmul(const OpView& op) {
  Block a = read(op, op.view(0)), b = read(op, op.view(1));
  trust(a.shape.size() >= 2 && b.shape.size() >= 2);
  if (op.row->flags & TRANSPOSE_A) a = transposed(a);
  if (op.row->flags & TRANSPOSE_B) b = transposed(b);
  if (a.shape.size() > 2 && b.shape.size() > 2 && op.out().dims == 2) {  // summed over the batch, which goes before k
    const auto m = static_cast<size_t>(a.shape[a.shape.size() - 2]), k = static_cast<size_t>(a.shape.back());
    const size_t batch = m && k ? a.size() / (m * k) : 0;
    trust(batch > 0);
    Block flat(Shape{static_cast<i64>(m), static_cast<i64>(batch * k)});
    for (size_t at = 0; at < batch; ++at)
      for (size_t i = 0; i < m; ++i) flat.take((i * batch + at) * k, a, (at * m + i) * k, k);
    a = std::move(flat);
    const i64 n = b.shape.back();
    b.shape = {static_cast<i64>(batch * k), n};
    trust(num_elements(b.shape) == static_cast<i64>(b.size()));
  }
  write(op, op.out(), terms_.multiply(a, b), op.num_views > 3 || op.out().mode == Mode::UPDATE);
}

Block LabelRun::reduced(const std::vector<OpView>& members) {
  Block total = read(members[0], members[0].view(0));
  for (size_t at = 1; at < members.size(); ++at)
    terms_.combine(members[0].proof->reduction, total, read(members[at], members[at].view(0)));
  return total;
}

void LabelRun::collective(const std::vector<OpView>& members) {
  const OpView& op = members[0];
  const size_t count = members.size();
  const auto source = [&](size_t at) { return read(members[at], members[at].view(0)); };
  const auto store = [&](size_t at, const Block& value) { write(members[at], members[at].view(1), value); };
  const auto dim = static_cast<size_t>(op.row->dim);
  std::vector<Block> blocks;
  Block value;
  switch (op.row->kind) {
    case Kind::BROADCAST: value = source(static_cast<size_t>(op.op->b)); break;
    case Kind::REDUCE: store(static_cast<size_t>(op.op->b), reduced(members)); return;
    case Kind::ALL_REDUCE: value = reduced(members); break;
    case Kind::ALL_GATHER:
      for (size_t at = 0; at < count; ++at) blocks.push_back(source(at));
      value = joined(blocks, dim);
      break;
    case Kind::REDUCE_SCATTER: {
      value = reduced(members);
      const auto sizes = rules_.part_sizes(op, value.shape[dim], count);
      i64 start = 0;
      for (size_t at = 0; at < count; start += sizes[at++]) store(at, part(value, dim, start, sizes[at]));
      return;
    }
    case Kind::PERMUTE:
      for (size_t at = 0; at < count; ++at) blocks.push_back(source(at));
      for (size_t at = 0; at < count; ++at)
        store(at, blocks[static_cast<size_t>(floor_mod(static_cast<i64>(at) - op.op->b, static_cast<i64>(count)))]);
      return;
    case Kind::ALL_TO_ALL: all_to_all(members); return;
    default: doubt();
  }
  for (size_t at = 0; at < count; ++at) store(at, value);
}

void LabelRun::all_to_all(const std::vector<OpView>& members) {
  const size_t count = members.size();
  const auto split = static_cast<size_t>(members[0].row->dim), concat = static_cast<size_t>(members[0].proof->dim);
  std::vector<Block> blocks;
  std::vector<std::vector<i64>> sizes;
  for (const OpView& op : members) {
    blocks.push_back(read(op, op.view(0)));
    sizes.push_back(rules_.part_sizes(op, blocks.back().shape[split], count));
  }
  std::vector<i64> start(count, 0);
  for (size_t to = 0; to < count; ++to) {
    std::vector<Block> received;
    for (size_t at = 0; at < count; start[at] += sizes[at][to], ++at)
      received.push_back(part(blocks[at], split, start[at], sizes[at][to]));
    write(members[to], members[to].view(1), joined(received, concat));
  }
}

void LabelRun::check_outputs() const {
  Stream rows(column(columns_, "outputs"));
  while (!rows.done()) {
    const i64 buffer = rows.index(held_.size()), reduction = rows.next(0, 1 << 20);
    const HeldTensor& held = held_[static_cast<size_t>(buffer)];
    require(held.tensor >= 0, "proof: an output without a tensor");
    Block total;
    i64 first_rank = -1;
    for (i64 left = rows.next(1, 1 << 20); left > 0; --left) {
      const i64 rank = rows.index(static_cast<size_t>(rules_.code.num_ranks())), first = first_[area(buffer, rank)];
      require(first >= 0, "proof: an output without memory");
      const Block& own = memory_[static_cast<size_t>(first)];
      trust(std::find(own.term.begin(), own.term.end(), UNWRITTEN) == own.term.end());
      if (first_rank < 0) total = own, first_rank = rank;
      else terms_.combine(reduction, total, own);
    }
    if (!held.is_declared) continue;
    const Block wanted = elements(held.tensor, shard(buffer, first_rank), terms_.finished(held.tensor));
    trust(total.term == wanted.term && total.index == wanted.index);
  }
}

}  // namespace meshweave
