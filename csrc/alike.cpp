#include "alike.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "lanes.hpp"
#include "views.hpp"
#include "walk.hpp"

namespace meshweave {
namespace {

// A view in every lane. Two accesses with equal boxes select the same elements in each lane.
struct LaneBox {
  i64 buffer = 0, dims = 0;
  LaneValues slot;
  std::array<LaneValues, MAX_DIMS> start, stop, first;
  std::array<i64, MAX_DIMS> block{}, stride{};  // stride 0: all elements between start and stop

  Selector selector(const Lanes& lanes, size_t dim, i64 lane) const {
    return {lanes.at(start[dim], lane), lanes.at(stop[dim], lane), stride[dim] ? lanes.at(first[dim], lane) : 0,
            block[dim], stride[dim]};
  }

  std::vector<i64> key() const {
    std::vector<i64> out{buffer, slot.row, slot.value};
    for (size_t dim = 0; dim < static_cast<size_t>(dims); ++dim) {
      for (const LaneValues& values : {start[dim], stop[dim], first[dim]}) out.push_back(values.row), out.push_back(values.value);
      out.push_back(block[dim]), out.push_back(stride[dim]);
    }
    return out;
  }
};

// How two boxes of a buffer lie to each other, as `local_edges` sees it: whether they may meet, do overlap, and cover.
constexpr char MAY_MEET = 1, OVERLAPS = 2, COVERS = 4, IS_COVERED = 8;

class Comparison {
 public:
  Comparison(const Template& code, i64 leader, const std::vector<i64>& others)
      : code_(code), leader_(leader), env_(environment(code, leader)), lanes_(code, with_leader(leader, others), env_),
        accessed_(code.buffers.size()), written_(code.buffers.size(), 0), extents_(code.buffers.size()) {}

  std::vector<i64> run() {
    body(0, static_cast<i64>(code_.statements.size()));
    for (size_t buffer = 0; buffer < accessed_.size() && goes_on(); ++buffer)
      if (written_[buffer]) compare(accessed_[buffer]);  // the order of readers alone does not matter
    std::vector<i64> out;
    for (i64 lane = 1; lane < lanes_.size() && goes_on(); ++lane)
      if (lanes_.has(lane)) out.push_back(lanes_.ranks[static_cast<size_t>(lane)]);
    return out;
  }

 private:
  static constexpr size_t MAX_BOXES = 4096;  // of a buffer

  static std::vector<i64> with_leader(i64 leader, const std::vector<i64>& others) {
    std::vector<i64> out{leader};
    out.insert(out.end(), others.begin(), others.end());
    return out;
  }

  bool goes_on() const { return lanes_.any() && !is_too_much_ && lanes_.has_room(); }

  void body(i64 at, i64 stop) {
    while (at < stop && goes_on()) {
      const StatementRow& row = code_.statements[static_cast<size_t>(at)];
      if (row.type == Statement::OP) {
        op(code_.ops[static_cast<size_t>(row.what)], row.what);
      } else if (row.type == Statement::ON) {
        if (code_.in_set(row.what, leader_)) body(at + 1, row.end);
      } else if (row.type == Statement::WHEN) {
        if (lanes_.agreed(row.expr)) body(at + 1, row.end);
      } else {
        const i64 turns = lanes_.agreed(row.expr);
        i64& variable = env_[static_cast<size_t>(row.what)];
        const i64 outer = variable;
        for (i64 turn = 0; turn < turns && goes_on(); ++turn) {
          variable = turn;
          body(at + 1, row.end);
        }
        variable = outer;
      }
      at = row.end;
    }
  }

  void op(const OpRow& row, i64 number) {
    for (i64 at = code_.op_access[static_cast<size_t>(number)]; at < code_.op_access[static_cast<size_t>(number) + 1]; ++at) {
      const AccessRow& access = code_.accesses[static_cast<size_t>(at)];
      if (access.condition >= 0 && !lanes_.agreed(access.condition)) continue;
      const size_t box = resolve(access.view);
      const auto buffer = static_cast<size_t>(code_.views[static_cast<size_t>(access.view)].buffer);
      if (static_cast<Mode>(access.mode) != Mode::READ) written_[buffer] = 1;
      if (is_accessed_.size() < boxes_.size()) is_accessed_.resize(boxes_.size(), 0);
      if (is_accessed_[box]) continue;
      is_accessed_[box] = 1;
      accessed_[buffer].push_back(box);
    }
    for (const i64 view : {row.out, row.src, row.other})
      if (view >= 0) resolve(view);  // the sizes that an op is measured by
    if (!is_message(row.kind))
      for (const i64 expr : {row.first, row.second})
        if (expr >= 0) lanes_.agreed(expr);
    for (const i64 expr : {row.step_index, row.flops, row.bytes})
      if (expr >= 0) lanes_.agreed(expr);
    if (row.sizes_mode == 1) agree_on_parts(row.sizes);
    for (i64 at = 0; at < row.num_args + row.num_work_sizes; ++at) lanes_.agreed(code_.args[static_cast<size_t>(row.args + at)]);
  }

  // The size of a member's part, an expression that may read its number, `peer`.
  void agree_on_parts(i64 expr) {
    const u64 reads = code_.expressions.reads(expr);
    if (!(reads & variable_bit(1))) {
      lanes_.agreed(expr);
    } else if (reads & lanes_.varying() & ~variable_bit(1)) {
      is_too_much_ = true;
    }
  }

  LaneValues extent(const BufferRow& buffer, size_t number, i64 dim) {
    std::vector<LaneValues>& known = extents_[number];
    while (static_cast<i64>(known.size()) <= dim) {
      const auto next = static_cast<i64>(known.size());
      if (!buffer.table) {
        known.push_back(lanes_.evaluate(code_.shape_exprs[static_cast<size_t>(buffer.shape + next)]));
        continue;
      }
      std::vector<i64> sizes;
      for (const i64 rank : lanes_.ranks) sizes.push_back(code_.shapes[static_cast<size_t>(buffer.shape + rank * buffer.dims + next)]);
      known.push_back(lanes_.intern(sizes));
    }
    return known[static_cast<size_t>(dim)];
  }

  // Returns the number of a view's box. Lanes in which the view is none, or of other sizes than the leader's, are dropped.
  size_t resolve(i64 view_number) {
    const ViewRow& view = code_.views[static_cast<size_t>(view_number)];
    const BufferRow& buffer = code_.buffers[static_cast<size_t>(view.buffer)];
    LaneBox out;
    out.buffer = view.buffer;
    out.dims = view.dims;
    out.slot = lanes_.evaluate(view.slot);
    std::array<LaneValues, MAX_DIMS> size;
    for (size_t dim = 0; dim < static_cast<size_t>(view.dims); ++dim) {
      const SelectorRow& row = code_.selectors[static_cast<size_t>(view.selectors) + dim];
      size[dim] = extent(buffer, static_cast<size_t>(view.buffer), static_cast<i64>(dim));
      out.start[dim] = lanes_.evaluate(row.start);
      out.stop[dim] = row.stop < 0 ? size[dim] : lanes_.evaluate(row.stop);
      if (!row.blocked) continue;
      const i64 block = lanes_.agreed(row.block), stride = lanes_.agreed(row.stride);
      out.first[dim] = lanes_.evaluate(row.first);
      if (block < stride) out.block[dim] = block, out.stride[dim] = stride;
    }
    const auto [known, is_new] = numbers_.try_emplace(out.key(), boxes_.size());
    if (!is_new) return known->second;
    for (i64 lane = 1; lane < lanes_.size(); ++lane)
      if (lanes_.has(lane) && !is_alike(out, size, buffer.slots, lane)) lanes_.drop(lane);
    boxes_.push_back(out);
    return known->second;
  }

  bool is_alike(const LaneBox& box, const std::array<LaneValues, MAX_DIMS>& size, i64 slots, i64 lane) const {
    const i64 slot = lanes_.at(box.slot, lane);
    if (slot < 0 || slot >= slots) return false;
    for (size_t dim = 0; dim < static_cast<size_t>(box.dims); ++dim) {
      const Selector mine = box.selector(lanes_, dim, 0), theirs = box.selector(lanes_, dim, lane);
      if (theirs.start < 0 || theirs.start > theirs.stop || theirs.stop > lanes_.at(size[dim], lane)) return false;
      if (theirs.first < -LARGEST || theirs.first > LARGEST || mine.size() != theirs.size()) return false;
    }
    return true;
  }

  // --- how boxes lie to each other -------------------------------------------------------------------------

  // Drops the lanes in which some boxes of a buffer meet or cover each other and in the leader's do not, or the reverse.
  void compare(const std::vector<size_t>& of) {
    if (of.size() > MAX_BOXES) {
      is_too_much_ = true;
      return;
    }
    const size_t dim = most_varied(of);
    std::vector<char> expected(of.size() * of.size(), 0);
    size_t num_expected = 0;
    meetings(of, dim, 0, [&](size_t a, size_t b, char relation) {
      expected[a * of.size() + b] = relation;
      return ++num_expected, true;
    });
    for (i64 lane = 1; lane < lanes_.size() && goes_on(); ++lane) {
      if (!lanes_.has(lane)) continue;
      size_t num_met = 0;
      const bool agrees = meetings(of, dim, lane, [&](size_t a, size_t b, char relation) {
        return ++num_met, expected[a * of.size() + b] == relation;
      });
      if (!agrees || num_met != num_expected) lanes_.drop(lane);
    }
  }

  // The dim in which the leader's boxes begin at most places: where fewest of them meet.
  size_t most_varied(const std::vector<size_t>& of) const {
    size_t best = 0, most = 0;
    for (size_t dim = 0; dim < 2 && dim < static_cast<size_t>(boxes_[of[0]].dims); ++dim) {
      std::vector<i64> starts;
      for (const size_t box : of) starts.push_back(lanes_.at(boxes_[box].start[dim], 0));
      std::sort(starts.begin(), starts.end());
      const auto places = static_cast<size_t>(std::unique(starts.begin(), starts.end()) - starts.begin());
      if (places > most) best = dim, most = places;
    }
    return best;
  }

  // Calls visit(a, b, relation) for all boxes a < b, by their place in `of`, that may meet in a lane, until it returns
  // false. Returns whether it never did. A box of no elements counts as `local_edges` counts it.
  template <class Visit>
  bool meetings(const std::vector<size_t>& of, size_t dim, i64 lane, Visit visit) {
    made_.resize(of.size());
    order_.resize(of.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    for (size_t at = 0; at < of.size(); ++at) {
      const LaneBox& box = boxes_[of[at]];
      Access& access = made_[at];
      access.dims = static_cast<int>(box.dims);
      access.slot = lanes_.at(box.slot, lane);
      for (size_t d = 0; d < static_cast<size_t>(box.dims); ++d) access.selectors[d] = box.selector(lanes_, d, lane);
      if (box.dims == 0) access.selectors[0] = {0, 1, 0, 0, 0};
    }
    std::sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return made_[a].selectors[dim].start < made_[b].selectors[dim].start; });
    open_.clear();
    for (const size_t at : order_) {  // sweeps along `dim`; those that ended before this one begins meet nobody any more
      const Access& mine = made_[at];
      std::erase_if(open_, [&](size_t other) { return made_[other].selectors[dim].stop <= mine.selectors[dim].start; });
      for (const size_t other : open_)
        if (made_[other].slot == mine.slot && may_meet(made_[other], mine) &&
            !visit(std::min(at, other), std::max(at, other), relation(std::min(at, other), std::max(at, other))))
          return false;
      open_.push_back(at);
    }
    return true;
  }

  char relation(size_t a, size_t b) {
    const Access &mine = made_[a], &other = made_[b];
    const bool overlaps = overlap(mine, other, blocks_left_);
    return static_cast<char>(MAY_MEET | (overlaps ? OVERLAPS : 0) | (covers(mine, other) ? COVERS : 0) | (covers(other, mine) ? IS_COVERED : 0));
  }

  const Template& code_;
  i64 leader_;
  std::vector<i64> env_;
  Lanes lanes_;
  std::map<std::vector<i64>, size_t> numbers_;  // of boxes
  std::vector<LaneBox> boxes_;
  std::vector<char> is_accessed_;               // by box
  std::vector<std::vector<size_t>> accessed_;   // boxes, by buffer
  std::vector<char> written_;                   // by buffer
  std::vector<std::vector<LaneValues>> extents_;
  i64 blocks_left_ = MAX_BLOCKS;
  bool is_too_much_ = false;
  std::vector<Access> made_;
  std::vector<size_t> order_, open_;
};

}  // namespace

std::vector<i64> ranks_alike(const Template& code, i64 leader, const std::vector<i64>& others) {
  try {
    return Comparison(code, leader, others).run();
  } catch (const ProgramFault&) {  // views of too many blocks, or what the leader never evaluates
    return {};
  }
}

}  // namespace meshweave
