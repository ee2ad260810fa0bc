// Evaluates the expressions of one rank's ops, and computes the sizes that their times depend on.
#pragma once

#include <algorithm>

#include "edges.hpp"
#include "expand.hpp"
#include "walk.hpp"

namespace meshweave {

constexpr i64 MAX_PACKETS = 1 << 16;
constexpr u64 MAX_SIZES = u64{1} << 26;  // of the parts of all collectives of a rank

inline i64 bounded(i64 value, const char* what) {
  if (value < -LARGEST || value > LARGEST) throw ProgramFault(std::string(what) + " is out of any range");
  return value;
}

class Binder {
 public:
  // `spare` lends its memory for the accesses.
  Binder(const Template& code, i64 rank, Accesses spare) : accesses(std::move(spare)), code_(code), rank_(rank) {
    accesses.clear();
  }

  void operator()(i64 row_number, const std::vector<i64>& env) {
    const OpRow& row = code_.ops[static_cast<size_t>(row_number)];
    env_ = &env;
    resolved_.clear();
    first_resolved_ = accesses.all.size();
    for (i64 at = code_.op_access[static_cast<size_t>(row_number)]; at < code_.op_access[static_cast<size_t>(row_number) + 1]; ++at) {
      const AccessRow& access = code_.accesses[static_cast<size_t>(at)];
      if (access.condition >= 0 && !value(access.condition)) continue;
      Access& made = accesses.all.emplace_back();
      resolve(access.view, made);
      made.mode = static_cast<Mode>(access.mode);
      resolved_.push_back(access.view);
    }
    accesses.start.push_back(static_cast<i64>(accesses.all.size()));
    accesses.row.push_back(row_number);
    accesses.stash.push_back(stash(row));
    ClassOp op;
    op.row = row_number;
    if (row.comm >= 0) op.step = value(row.step_index);
    measure(row, op);
    ops.push_back(op);
  }

  std::vector<ClassOp> ops;
  Column sizes;
  Accesses accesses;

 private:
  i64 value(i64 expr) const { return code_.expressions.evaluate(expr, *env_); }

  i64 position(i64 global) const {
    const auto found = std::lower_bound(code_.ranks.begin(), code_.ranks.end(), global);
    if (found == code_.ranks.end() || *found != global)
      throw ProgramFault(std::to_string(global) + " is no rank of the program");
    return found - code_.ranks.begin();
  }

  i64 extent(const BufferRow& buffer, i64 dim, i64 owner) const {
    i64 size;
    if (buffer.table) {
      size = code_.shapes[static_cast<size_t>(buffer.shape + owner * buffer.dims + dim)];
    } else if (owner == rank_) {
      size = code_.expressions.evaluate(code_.shape_exprs[static_cast<size_t>(buffer.shape + dim)], shape_env());
    } else {
      size = code_.expressions.evaluate(code_.shape_exprs[static_cast<size_t>(buffer.shape + dim)], environment(code_, owner));
    }
    if (size < 0 || size > LARGEST) throw ProgramFault("a buffer has a dim of size " + std::to_string(size));
    return size;
  }

  // The environment for shapes, which read coordinates but no loop variables.
  const std::vector<i64>& shape_env() const {
    if (shape_env_.empty()) shape_env_ = environment(code_, rank_);
    return shape_env_;
  }

  // Returns a view of the current op; most are already resolved as its accesses.
  const Access& view(i64 number) {
    for (size_t at = 0; at < resolved_.size(); ++at)
      if (resolved_[at] == number) {
        const size_t place = first_resolved_ + at;
        return accesses.all[place];
      }
    resolve(number, unaccessed_);
    return unaccessed_;
  }

  void resolve(i64 view_number, Access& out) const {
    const ViewRow& view = code_.views[static_cast<size_t>(view_number)];
    const BufferRow& buffer = code_.buffers[static_cast<size_t>(view.buffer)];
    out.rank = -1;
    out.buffer = static_cast<i32>(view.buffer);
    out.dims = static_cast<int>(view.dims);
    out.slot = value(view.slot);
    if (out.slot < 0 || out.slot >= buffer.slots)
      throw ProgramFault("a view asks for slot " + std::to_string(out.slot) + " of " + std::to_string(buffer.slots));
    if (view.rank >= 0) out.rank = position(value(view.rank));
    const i64 owner = out.rank >= 0 ? out.rank : rank_;
    if (!code_.in_set(buffer.set, owner)) throw ProgramFault("a view of a buffer that its rank does not have");
    for (i64 dim = 0; dim < view.dims; ++dim) {
      const SelectorRow& row = code_.selectors[static_cast<size_t>(view.selectors + dim)];
      const i64 size = extent(buffer, dim, owner);
      Selector& to = out.selectors[static_cast<size_t>(dim)];
      to.first = to.block = to.stride = 0;
      to.start = value(row.start);
      to.stop = row.stop < 0 ? size : value(row.stop);
      if (to.start < 0 || to.start > to.stop || to.stop > size)
        throw ProgramFault("a view selects [" + std::to_string(to.start) + ", " + std::to_string(to.stop) +
                           ") of a dim of size " + std::to_string(size));
      if (!row.blocked) continue;
      const i64 first = bounded(value(row.first), "a block"), block = bounded(value(row.block), "a block"),
                stride = bounded(value(row.stride), "a stride");
      if (block < 0 || stride < 1) throw ProgramFault("a view with a block or stride that is not positive");
      if (block >= stride) continue;
      to.first = first, to.block = block, to.stride = stride;
    }
  }

  i64 itemsize(i64 view_number) const {
    const i64 buffer = code_.views[static_cast<size_t>(view_number)].buffer;
    return code_.buffers[static_cast<size_t>(buffer)].itemsize;
  }

  // Whether a view of the rank's own buffer is not one run of its memory (`View.is_strided`).
  bool is_strided(const Access& of) const {
    const BufferRow& buffer = code_.buffers[static_cast<size_t>(of.buffer)];
    bool inside = false;  // of a dim of which the view has more than one element
    for (i64 place = buffer.dims - 1; place >= 0; --place) {
      const i64 dim = buffer.order ? buffer.order >> (4 * place) & 15 : buffer.dims - 1 - place;
      const Selector& in = of.selectors[static_cast<size_t>(dim)];
      const i64 size = in.size();
      if (inside && size != extent(buffer, dim, rank_)) return true;
      if (size <= 1) continue;
      inside = true;
      if (in.blocked() && floor_div(in.start - in.first, in.stride) != floor_div(in.stop - 1 - in.first, in.stride)) return true;
    }
    return false;
  }

  i64 bytes(i64 view_number) { return checked_mul(view(view_number).elements(), itemsize(view_number)); }

  std::vector<i64> stash(const OpRow& row) const {
    std::vector<i64> name;
    if (row.kind != Kind::CALL || row.stash < 0) return name;
    name.push_back(row.stash);
    for (i64 at = 0; at < row.num_args; ++at) name.push_back(value(code_.args[static_cast<size_t>(row.args + at)]));
    return name;
  }

  // The members of an op's group, with the images of a folded one.
  i64 group_size(const OpRow& row) const {
    const i64 group = code_.group(row.axis, rank_);
    if (group < 0) throw ProgramFault("runs over ranks without being one of them");
    const bool is_ring = row.kind == Kind::ALL_GATHER || row.kind == Kind::REDUCE_SCATTER || row.kind == Kind::ALL_REDUCE;
    if (code_.is_folded(group) && !is_ring && row.kind != Kind::EXCHANGE)
      throw ProgramFault("runs over ranks that are folded, and is no ring");
    return code_.full_size(group);
  }

  // Sets the rows of each member's part along `dim` of a view, and the bytes of one row.
  void measure_parts(const OpRow& row, i64 view_number, ClassOp& op) {
    const Access& whole = view(view_number);
    const i64 along = whole.selectors[static_cast<size_t>(row.dim)].size(), count = group_size(row);
    op.a = itemsize(view_number);
    for (int dim = 0; dim < whole.dims; ++dim)
      if (dim != row.dim) op.a = checked_mul(op.a, whole.selectors[static_cast<size_t>(dim)].size());
    op.sizes = static_cast<i64>(sizes.size());
    if (row.sizes_mode == 0) {
      sizes.push_back(along / count);
    } else if (row.sizes_mode == 2) {
      const i64 begin = code_.list_offsets[static_cast<size_t>(row.sizes)], end = code_.list_offsets[static_cast<size_t>(row.sizes) + 1];
      if (end - begin != count) throw ProgramFault("has sizes for another number of members");
      sizes.insert(sizes.end(), code_.lists.begin() + begin, code_.lists.begin() + end);
    } else if (code_.expressions.reads(row.sizes) & variable_bit(1)) {
      std::vector<i64> env = *env_;
      for (env[1] = 0; env[1] < count; ++env[1]) sizes.push_back(code_.expressions.evaluate(row.sizes, env));
    } else {
      sizes.push_back(value(row.sizes));
    }
    op.num_sizes = static_cast<i64>(sizes.size()) - op.sizes;
    if (sizes.size() > MAX_SIZES) throw ProgramFault("has too many parts");
    for (i64 at = op.sizes; at < op.sizes + op.num_sizes; ++at)
      if (sizes[static_cast<size_t>(at)] < 0 || sizes[static_cast<size_t>(at)] > LARGEST)
        throw ProgramFault("has a part of size " + std::to_string(sizes[static_cast<size_t>(at)]));
    checked_mul(op.a, LARGEST >> 20);  // bounds rows x bytes per row for later products
  }

  void measure(const OpRow& row, ClassOp& op) {
    switch (row.kind) {
      case Kind::MATMUL: {
        const Access &out = view(row.out), &a = view(row.src), &b = view(row.other);
        const auto size = [](const Access& of, int dim) { return of.selectors[static_cast<size_t>(dim)].size(); };
        const auto batch = [&](const Access& of) {
          i64 count = 1;
          for (int dim = 0; dim + 2 < of.dims; ++dim) count = checked_mul(count, size(of, dim));
          return count;
        };
        op.a = size(out, out.dims - 2);
        op.b = size(out, out.dims - 1);
        op.c = size(a, a.dims - (row.flags & TRANSPOSE_A ? 2 : 1));
        // One operand for the whole batch makes a larger matrix of the other; a sum over the batch, a longer k.
        if (a.dims > 2 && b.dims > 2) {
          i64& grown = out.dims == 2 ? op.c : op.num_products;
          grown = checked_mul(grown, batch(a));
        } else if (a.dims > 2) {
          op.a = checked_mul(op.a, batch(a));
        } else if (b.dims > 2) {
          op.b = checked_mul(op.b, batch(b));
        }
        checked_mul(checked_mul(checked_mul(checked_mul(2, op.a), op.b), op.c), op.num_products);
        break;
      }
      case Kind::COPY: op.a = checked_mul(2, bytes(row.out)); break;
      case Kind::ADD: op.a = checked_mul(3, bytes(row.out)); break;
      case Kind::ZERO: op.a = bytes(row.out); break;
      case Kind::CALL:
        op.a = row.flops < 0 ? 0 : value(row.flops);
        op.b = row.bytes < 0 ? 0 : value(row.bytes);
        if (row.flags & VIEW_BYTES)
          for (size_t at = first_resolved_; at < accesses.all.size(); ++at)
            op.b = checked_add(op.b, checked_mul(accesses.all[at].elements(),
                                                 code_.buffers[static_cast<size_t>(accesses.all[at].buffer)].itemsize));
        if (op.a < 0 || op.b < 0) throw ProgramFault("declares a negative cost");
        op.sizes = static_cast<i64>(sizes.size()), op.num_sizes = row.num_work_sizes;
        for (i64 at = 0; at < row.num_work_sizes; ++at)
          sizes.push_back(value(code_.args[static_cast<size_t>(row.args + row.num_args + at)]));
        if (sizes.size() > MAX_SIZES) throw ProgramFault("has too many sizes");
        break;
      case Kind::ALL_GATHER: measure_parts(row, row.out, op); break;
      case Kind::REDUCE_SCATTER:
      case Kind::ALL_TO_ALL: measure_parts(row, row.src, op); break;
      case Kind::ALL_REDUCE: op.a = bytes(row.src); group_size(row); break;
      case Kind::BROADCAST:
      case Kind::REDUCE:
        op.a = bytes(row.kind == Kind::BROADCAST ? row.out : row.src);
        op.b = value(row.first);
        op.c = value(row.second);
        if (op.b < 0 || op.b >= group_size(row)) throw ProgramFault("has root " + std::to_string(op.b));
        if (op.c < 1 || op.c > MAX_PACKETS) throw ProgramFault("has " + std::to_string(op.c) + " packets");
        break;
      case Kind::PERMUTE: {
        const i64 count = group_size(row);
        op.shift = value(row.first);
        op.b = floor_mod(op.shift, count);
        op.a = op.b ? bytes(row.src) : checked_mul(2, bytes(row.out));
        op.c = std::min(op.b, count - op.b);
        break;
      }
      case Kind::EXCHANGE:
      case Kind::FENCE: group_size(row); break;
      case Kind::SEND:
      case Kind::RECV: {
        const i64 moved = row.kind == Kind::SEND ? row.src : row.out;
        op.a = bytes(moved);
        op.b = is_strided(view(moved));
        break;
      }
      case Kind::GET:
      case Kind::PUT:
      case Kind::ACCUMULATE: {
        op.a = bytes(row.src);
        op.b = view(row.kind == Kind::GET ? row.src : row.out).rank;
        if (op.b < 0) throw ProgramFault("is one-sided and names no rank");
        break;
      }
      case Kind::COUNT: break;
    }
  }

  const Template& code_;
  i64 rank_;
  const std::vector<i64>* env_ = nullptr;
  mutable std::vector<i64> shape_env_;
  std::vector<i64> resolved_;  // views among the accesses of the current op
  size_t first_resolved_ = 0;
  Access unaccessed_;
};

}  // namespace meshweave
