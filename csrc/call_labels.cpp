// What calls make, on index labels: parts of tensors, as their meanings say, at the positions of their inputs.
#include "labels.hpp"

namespace meshweave {
namespace {

using Positions = std::vector<i64>;

// Returns per dim of a tensor the positions whose row-major product is what a block lists (`ir.analysis.positions`).
std::vector<Positions> positions_of(const std::vector<i64>& index, const Shape& tensor) {
  std::vector<Positions> lists(tensor.size());
  for (const i64 size : tensor) trust(size >= 1);
  size_t stride = 1;
  i64 inner = 1;  // elements of the tensor in one position of the dim
  for (size_t dim = tensor.size(); dim-- > 0;) {
    const i64 outer = inner * tensor[dim];  // at most MAX_INDEX
    const i64 first = index[0] / outer;
    for (size_t at = 0; at < index.size() && index[at] / outer == first; at += stride)
      lists[dim].push_back(index[at] / inner % tensor[dim]);
    stride *= lists[dim].size();
    inner = outer;
    trust(stride <= index.size());
  }
  trust(stride == index.size());
  std::vector<i64> product{0};
  for (size_t dim = 0; dim < tensor.size(); ++dim) {
    std::vector<i64> next;
    next.reserve(product.size() * lists[dim].size());
    for (const i64 base : product)
      for (const i64 at : lists[dim]) next.push_back(base * tensor[dim] + at);
    product = std::move(next);
  }
  trust(product == index);
  return lists;
}

// Whether a shape is some sizes with neighbours taken as one dim: a function sees no other blocks.
bool merges(const Shape& shape, const std::vector<i64>& sizes) {
  size_t at = 0;
  for (const i64 extent : shape) {
    i64 merged = 1;
    while (merged < extent && at < sizes.size()) merged *= sizes[at++];
    if (merged != extent) return false;
  }
  return std::all_of(sizes.begin() + static_cast<i64>(at), sizes.end(), [](i64 size) { return size == 1; });
}

std::vector<i64> sizes_of(const std::vector<Positions>& lists) {
  std::vector<i64> sizes;
  for (const Positions& list : lists) sizes.push_back(static_cast<i64>(list.size()));
  return sizes;
}

bool is_all_of(const Positions& list, i64 size) {
  if (static_cast<i64>(list.size()) != size) return false;
  for (size_t at = 0; at < list.size(); ++at)
    if (list[at] != static_cast<i64>(at)) return false;
  return true;
}

}  // namespace

void LabelRun::read_functions(const Columns& columns) {
  Stream rows(column(columns, "functions"));
  const auto part = [&] {
    TensorPart out;
    out.tensor = rows.index(terms_.num_tensors());
    out.is_running = rows.next(0, 1) != 0;
    for (size_t dim = 0; dim < terms_.shape(out.tensor).size(); ++dim) out.dims.push_back(rows.next(-1, 1 << 20));
    return out;
  };
  while (!rows.done()) {
    FunctionRow row;
    row.function = rows.next(0, 1 << 20), row.output = rows.next(0, 1 << 20), row.reduction = rows.next(-1, 1 << 20);
    row.part = part();
    for (i64 left = rows.next(0, 1 << 10); left > 0; --left) row.ins.push_back(part());
    for (i64 left = rows.next(0, 1 << 10); left > 0; --left) row.stash.push_back(part());
    for (i64 left = rows.next(0, 64); left > 0; --left) {
      const i64 name = rows.next(0, 1 << 20);
      row.reduced.push_back({name, rows.next(0, MAX_LABELS)});
    }
    functions_.push_back(std::move(row));
  }
}

void LabelRun::call(const OpView& op, const std::vector<i64>& stash) {
  trust(op.proof->outs >= 0 && op.proof->outs <= static_cast<i64>(op.num_views));
  const size_t num_outs = static_cast<size_t>(op.proof->outs), num_ins = op.num_views - num_outs;
  std::vector<Block> ins;
  for (size_t at = 0; at < num_ins; ++at) ins.push_back(read(op, op.view(at)));
  std::vector<i64> key = stash;
  key.push_back(op.rank);
  const auto known = stash.empty() || op.row->part < 2 ? stashes_.end() : stashes_.find(key);
  Stashed* stashed = known == stashes_.end() ? nullptr : &known->second;
  std::vector<Block> outs;
  for (size_t at = 0; at < num_outs; ++at) {
    const Access& view = op.view(num_ins + at);
    const FunctionRow* declared = best(op.proof->function, static_cast<i64>(at), ins);
    if (declared) {
      outs.push_back(apply(*declared, op, view, ins, stashed));
      continue;
    }
    for (size_t in = 0; in < num_ins; ++in) check_trusted_input(op, op.view(in), ins[in]);
    outs.push_back(trusted(op, view));
  }
  if (!stash.empty() && op.row->part == 1) {
    Stashed& kept = stashes_[key];
    for (const Block& block : kept.inputs) stashed_ -= static_cast<i64>(block.size());
    for (const Block& block : ins) stashed_ += static_cast<i64>(block.size());
    trust(stashed_ <= MAX_LABELS);
    kept.from_forward = ins.size();
    kept.inputs = std::move(ins);
  } else if (stashed && op.row->part == 2) {
    for (Block& block : ins) {
      stashed_ += static_cast<i64>(block.size());
      stashed->inputs.push_back(std::move(block));
    }
    trust(stashed_ <= MAX_LABELS);
  } else if (!stash.empty() && op.row->part == 3 && stashes_.contains(key)) {
    for (const Block& block : stashes_[key].inputs) stashed_ -= static_cast<i64>(block.size());
    stashes_.erase(key);
  }
  for (size_t at = 0; at < num_outs; ++at) write(op, op.view(num_ins + at), outs[at]);
}

// The meaning whose inputs are those that a call has, or most of them; null where none is declared.
const FunctionRow* LabelRun::best(i64 function, i64 output, const std::vector<Block>& ins) const {
  std::vector<const FunctionRow*> declared;
  for (const FunctionRow& row : functions_)
    if (row.function == function && row.output == output) declared.push_back(&row);
  if (declared.size() < 2) return declared.empty() ? nullptr : declared[0];
  std::vector<std::vector<i64>> factors;  // per input: the tensors that its elements may stand for
  for (const Block& block : ins) {
    std::vector<i64> of;
    i32 last = ZERO;
    for (const i32 term : block.term) {
      if (term == last || term <= ZERO) continue;
      last = term;
      for (const i64 tensor : terms_.factors(term))
        if (std::find(of.begin(), of.end(), tensor) == of.end()) of.push_back(tensor);
    }
    factors.push_back(std::move(of));
  }
  const FunctionRow* out = nullptr;
  i64 most = -1;
  for (const FunctionRow* row : declared) {
    i64 matching = 0;
    for (size_t at = 0; at < std::min(row->ins.size(), ins.size()); ++at)
      matching += std::find(factors[at].begin(), factors[at].end(), row->ins[at].tensor) != factors[at].end();
    if (matching > most) most = matching, out = row;
  }
  return out;
}

// The labels of one output of a call that a meaning declares.
Block LabelRun::apply(const FunctionRow& row, const OpView& op, const Access& view, const std::vector<Block>& ins,
                      const Stashed* stashed) {
  trust(ins.size() == row.ins.size());
  std::vector<std::pair<const TensorPart*, const Block*>> given;
  for (size_t at = 0; at < ins.size(); ++at) given.push_back({&row.ins[at], &ins[at]});
  if (!row.stash.empty()) {
    trust(stashed && (row.stash.size() == stashed->from_forward || row.stash.size() == stashed->inputs.size()));
    for (size_t at = 0; at < row.stash.size(); ++at) given.push_back({&row.stash[at], &stashed->inputs[at]});
  }
  std::map<i64, Positions> names;
  std::vector<std::pair<i64, const Block*>> running;
  for (const auto& [of, block] : given) {
    if (of->is_running) {
      running.push_back({of->tensor, block});
      if (block->all_are(ZERO)) continue;
    } else {
      trust(block->all_are(terms_.finished(of->tensor)));
    }
    bind(*of, *block, names);
  }
  Block made = result(row, op, view, names);
  check_running(running);
  for (const auto& [tensor, block] : running) {
    if (tensor != row.part.tensor) continue;
    trust(block->size() == made.size());
    if ((row.reduction < MAX || row.reduction > PROD) && block->all_are(ZERO)) continue;
    Block total = *block;
    total.shape = made.shape;
    terms_.combine(row.reduction, total, made);
    made = std::move(total);
  }
  return made;
}

// Notes the positions of an input, which are those of other inputs where they have one name.
void LabelRun::bind(const TensorPart& part, const Block& block, std::map<i64, Positions>& names) const {
  const Shape& shape = terms_.shape(part.tensor);
  const auto note = [&](size_t dim, const Positions& list) {
    if (part.dims[dim] < 0) trust(is_all_of(list, shape[dim]));
    else trust(names.try_emplace(part.dims[dim], list).first->second == list);
  };
  if (!block.size()) {
    for (size_t dim = 0; dim < shape.size(); ++dim)
      if (block.shape.size() != shape.size() || block.shape[dim] == 0) note(dim, {});
    return;
  }
  const std::vector<Positions> lists = positions_of(block.index, shape);
  trust(merges(block.shape, sizes_of(lists)));
  for (size_t dim = 0; dim < shape.size(); ++dim) note(dim, lists[dim]);
}

// Reductions so far have the same counts, or are all zeros.
void LabelRun::check_running(const std::vector<std::pair<i64, const Block*>>& running) const {
  i64 counts = -2;  // -2: none yet; -1: zeros
  for (const auto& [tensor, block] : running) {
    i32 last = UNWRITTEN;
    for (const i32 term : block->term) {
      if (term == last) continue;
      last = term;
      i64 own = -1;
      if (term != ZERO) {
        const TermParts& of = terms_.parts(term);
        trust(of.size() == 1 && of[0].first == tensor);
        own = of[0].second;
      }
      trust(counts == -2 || counts == own);
      counts = own;
    }
  }
}

// The labels of what a call makes of the positions of its inputs, in the shape of a view.
Block LabelRun::result(const FunctionRow& row, const OpView& op, const Access& view, const std::map<i64, Positions>& names) {
  const i64 out = row.part.tensor;
  const Shape& shape = terms_.shape(out);
  const Shape wanted = shape_of(view);
  if (!num_elements(wanted)) return Block(wanted);
  std::vector<Positions> lists;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const i64 name = row.part.dims[dim];
    const auto known = names.find(name);
    if (name < 0) {
      trust(shape[dim] <= MAX_LABELS);
      Positions all;
      for (i64 at = 0; at < shape[dim]; ++at) all.push_back(at);
      lists.push_back(std::move(all));
    } else if (known != names.end()) {
      for (const i64 at : known->second) trust(at < shape[dim]);
      lists.push_back(known->second);
    } else {  // by its buffer, where no input tells
      trust(held_[static_cast<size_t>(view.buffer)].tensor == out);
      lists.push_back(positions_of(expected(op, view).index, shape)[dim]);
    }
  }
  trust(merges(wanted, sizes_of(lists)));
  Counts counts(1, 1);
  for (const auto& [name, extent] : row.reduced) {
    Counts own(static_cast<size_t>(extent), 0);
    if (const auto at = names.find(name); at != names.end())
      for (const i64 position : at->second) {
        trust(position < extent);
        ++own[static_cast<size_t>(position)];
      }
    trust(static_cast<i64>(counts.size()) * extent <= MAX_LABELS);
    Counts next;
    for (const i32 a : counts)
      for (const i32 b : own) {
        trust(static_cast<i64>(a) * b < 1 << 29);
        next.push_back(a * b);
      }
    counts = std::move(next);
  }
  Block made = elements(out, lists, terms_.part(out, std::move(counts)));
  trust(static_cast<i64>(made.size()) == num_elements(wanted));
  made.shape = wanted;
  return made;
}

// The labels of what an undeclared call makes: the finished elements of the buffer's tensor, or something opaque.
Block LabelRun::trusted(const OpView& op, const Access& view) const {
  if (held_[static_cast<size_t>(view.buffer)].tensor >= 0) return expected(op, view);
  Block made(shape_of(view), OPAQUE);
  for (size_t at = 0; at < made.size(); ++at) made.index[at] = static_cast<i64>(at);
  return made;
}

// Neither unfinished sums, nor elements that are not those of the buffer's tensor.
void LabelRun::check_trusted_input(const OpView& op, const Access& view, const Block& block) const {
  const HeldTensor& held = held_[static_cast<size_t>(view.buffer)];
  if (held.has_partial) return;
  i32 last = ZERO;
  for (const i32 term : block.term) {
    if (term == last) continue;
    last = term;
    trust(term == ZERO || term == OPAQUE || !terms_.tensors_of(term).empty());
  }
  if (!held.is_declared) return;
  const Block wanted = expected(op, view);
  trust(block.term == wanted.term && block.index == wanted.index);
}

}  // namespace meshweave
