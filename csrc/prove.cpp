#include "prove.hpp"

#include <memory>
#include <optional>

#include "labels.hpp"
#include "match.hpp"
#include "races.hpp"
#include "walk.hpp"

namespace meshweave {
namespace {

constexpr i64 MAX_WORK = i64{1} << 32;  // whatever the columns say

// An expression of an op that must have a value, of at least `low`.
struct CheckRow {
  i64 op, expr, low;
};

std::vector<ProofRow> proof_rows(const Columns& columns, const Template& code) {
  Stream from(column(columns, "proof_ops"));
  std::vector<ProofRow> rows;
  for (size_t op = 0; op < code.ops.size(); ++op) {
    ProofRow row;
    row.name = from.next(0, MAX_EXTENT), row.reduction = from.next(-1, 1 << 20), row.dim = from.next(-1, MAX_DIMS);
    row.recv_mode = from.next(0, 2);
    row.recv_sizes = from.next(0, std::max<i64>(static_cast<i64>(code.list_offsets.size()) - 2, 0));
    require(row.recv_mode == 0 || (row.recv_mode == 2 && code.list_offsets.size() > 1), "proof: bad sizes");
    row.function = from.next(-1, 1 << 20), row.step = from.next(-1, 1 << 20), row.outs = from.next(-1, 1 << 20);
    rows.push_back(row);
  }
  require(from.done(), "proof: more ops than the template has");
  return rows;
}

std::vector<i64> dtypes_of(const Columns& columns, const Template& code) {
  const Column& dtypes = column(columns, "dtypes");
  require(dtypes.size() == code.buffers.size(), "proof: dtypes do not fit the buffers");
  return dtypes;
}

i64 number_of(const Columns& columns, const char* name) {
  const Column& of = column(columns, name);
  require(of.size() == 1 && of[0] >= 0 && of[0] <= MAX_WORK, "proof: a bad number");
  return of[0];
}

class Proof {
 public:
  explicit Proof(const Columns& columns)
      : columns_(columns), program_(columns, true), matched_(program_, Numbering::by_rank(program_)), rows_(proof_rows(columns, program_.code)),
        dtypes_(dtypes_of(columns, program_.code)), rules_{program_.code, dtypes_, blocks_left_} {}

  Verdict verdict() {
    evaluate_checks();
    check_ops();
    check_partners();
    const bool wants_labels = number_of(columns_, "labels") != 0;
    const bool is_small = !wants_labels || work() <= number_of(columns_, "most_work");
    if (wants_labels && is_small) labels_.emplace(rules_, columns_);
    for (const Class& of : program_.classes)
      for (const Access& access : of.accesses.all) reaches_others_ = reaches_others_ || access.rank >= 0;
    run();
    if (reaches_others_) check_races(program_, order_, rank_of_, blocks_left_);
    if (labels_) labels_->check_outputs();
    return is_small ? Verdict::HOLDS : Verdict::UNLABELLED;
  }

 private:
  OpView view_of(i64 rank, i64 index) const {
    const Class& of = program_.of(rank);
    const ClassOp& op = of.ops[static_cast<size_t>(index)];
    const auto begin = static_cast<size_t>(of.accesses.start[static_cast<size_t>(index)]);
    const auto end = static_cast<size_t>(of.accesses.start[static_cast<size_t>(index) + 1]);
    return {&program_.code.ops[static_cast<size_t>(op.row)], &rows_[static_cast<size_t>(op.row)], &op, &of,
            of.accesses.all.data() + begin, end - begin, rank};
  }
  OpView view_of(i64 op) const { return view_of(rank_of_[static_cast<size_t>(op)], op - base_of(op)); }
  i64 base_of(i64 op) const { return program_.ranks[static_cast<size_t>(rank_of_[static_cast<size_t>(op)])].base; }

  // Expressions that the core has no use for, but that a program must be able to evaluate.
  void evaluate_checks() const {
    const Template& code = program_.code;
    Stream from(column(columns_, "checks"));
    std::vector<std::vector<CheckRow>> checks(code.ops.size());
    bool has_any = false;
    while (!from.done()) {
      CheckRow row;
      row.op = from.index(code.ops.size()), row.expr = from.index(static_cast<size_t>(code.expressions.size()));
      row.low = from.next(UNDEFINED, INT64_MAX);
      checks[static_cast<size_t>(row.op)].push_back(row);
      has_any = true;
    }
    for (i64 rank = 0; has_any && rank < code.num_ranks(); ++rank)
      walk(code, rank, [&](i64 op, const std::vector<i64>& env, const std::vector<i64>&) {
        for (const CheckRow& row : checks[static_cast<size_t>(op)]) trust(code.expressions.evaluate(row.expr, env) >= row.low);
      });
  }

  // Each op of a class is looked at once, on its first rank.
  void check_ops() {
    std::vector<char> is_checked(program_.classes.size(), 0);
    for (i64 rank = 0; rank < program_.code.num_ranks(); ++rank) {
      const auto number = static_cast<size_t>(program_.ranks[static_cast<size_t>(rank)].of_class);
      const auto count = static_cast<i64>(program_.of(rank).ops.size());
      rank_of_.insert(rank_of_.end(), static_cast<size_t>(count), rank);
      if (is_checked[number]++) continue;
      for (i64 index = 0; index < count; ++index) rules_.check_op(view_of(rank, index));
    }
  }

  void check_partners() {
    std::vector<OpView> members;
    for (size_t joint = 0; joint < matched_.joints.size(); ++joint) {
      take_members(joint, members);
      if (matched_.joints[joint].group == NONE) rules_.check_message(members[0], members[1]);
      else rules_.check_collective(members);
      // A lane that chooses what it starts next may end in a deadlock in one order and not in another.
      for (const OpView& op : members) trust(!program_.code.lanes[static_cast<size_t>(op.row->lane)].ready);
    }
  }

  void take_members(size_t joint, std::vector<OpView>& members) const {
    members.clear();
    const Joint& of = matched_.joints[joint];
    if (of.group == NONE) {
      members.push_back(view_of(of.sender)), members.push_back(view_of(of.receiver));
      return;
    }
    for (i64 place = 0; place < program_.code.group_size(of.group); ++place)
      members.push_back(view_of(static_cast<i64>(matched_.member_op(joint, place))));
  }

  // Elements that ops read and write, and the summands that products and sums count.
  i64 work() const {
    const i64 summands = number_of(columns_, "summands");
    std::vector<i64> of_class(program_.classes.size(), -1);
    i64 total = 0;
    for (i64 rank = 0; rank < program_.code.num_ranks(); ++rank) {
      i64& known = of_class[static_cast<size_t>(program_.ranks[static_cast<size_t>(rank)].of_class)];
      if (known < 0) {
        const Class& of = program_.of(rank);
        known = checked_mul(summands, static_cast<i64>(of.ops.size()));
        for (const Access& access : of.accesses.all) known = checked_add(known, access.elements());
      }
      total = checked_add(total, known);
    }
    return total;
  }

  // --- one order in which all ops happen -------------------------------------------------------------------------------

  struct LaneState {
    size_t next = 0;
    i64 in_flight = 0;
  };

  void run() {
    const auto num_lanes = program_.code.lanes.size();
    const auto count = static_cast<size_t>(program_.num_ops);
    pending_.assign(count, 0), tracked_start_.assign(count + 1, 0);
    for (const Tracked& edge : program_.tracked) {
      ++pending_[static_cast<size_t>(edge.to)];
      ++tracked_start_[static_cast<size_t>(edge.from) + 1];
    }
    for (size_t op = 0; op < count; ++op) tracked_start_[op + 1] += tracked_start_[op];
    for (i64 rank = 0; rank < program_.code.num_ranks(); ++rank) {
      const Class& of = program_.of(rank);
      const i64 base = program_.ranks[static_cast<size_t>(rank)].base;
      for (size_t op = 0; op < of.ops.size(); ++op)
        pending_[static_cast<size_t>(base) + op] += of.before_start[op + 1] - of.before_start[op];
    }
    missing_.clear();
    for (const Joint& joint : matched_.joints) missing_.push_back(joint.group == NONE ? 2 : program_.code.group_size(joint.group));
    lanes_.assign(static_cast<size_t>(program_.code.num_ranks()) * num_lanes, {});
    for (size_t lane = lanes_.size(); lane-- > 0;) waiting_.push_back(lane);
    for (size_t op = 0; op < count; ++op)
      if (!pending_[op] && in_ready_lane(static_cast<i64>(op))) ready_.push_back(static_cast<i64>(op));
    while (!waiting_.empty() || !ready_.empty()) {
      if (!ready_.empty()) {
        const i64 op = ready_.back();
        ready_.pop_back();
        happen({view_of(op)}, {op});
        continue;
      }
      const size_t lane = waiting_.back();
      waiting_.pop_back();
      issue(lane);
    }
    trust(num_done_ == program_.num_ops);  // else it deadlocks
  }

  bool in_ready_lane(i64 op) const { return program_.code.lanes[static_cast<size_t>(view_of(op).row->lane)].ready != 0; }

  void issue(size_t number) {
    const auto num_lanes = program_.code.lanes.size();
    const auto rank = static_cast<i64>(number / num_lanes);
    const size_t name = number % num_lanes;
    const LaneRow& lane = program_.code.lanes[name];
    if (lane.ready) return;
    const std::vector<i64>& queue = program_.of(rank).lanes[name];
    const i64 base = program_.ranks[static_cast<size_t>(rank)].base;
    LaneState& state = lanes_[number];
    while (state.next < queue.size() && state.in_flight < lane.width) {
      const i64 op = base + queue[state.next];
      if (pending_[static_cast<size_t>(op)]) return;
      ++state.next, ++state.in_flight;
      const i32 joint = matched_.joint_of[static_cast<size_t>(op)];
      if (joint < 0) {
        happen({view_of(op)}, {op});
        continue;
      }
      if (--missing_[static_cast<size_t>(joint)]) continue;
      std::vector<OpView> members;
      take_members(static_cast<size_t>(joint), members);
      std::vector<i64> ops;
      const Joint& of = matched_.joints[static_cast<size_t>(joint)];
      if (of.group == NONE) ops = {of.sender, of.receiver};
      for (i64 place = 0; of.group != NONE && place < program_.code.group_size(of.group); ++place)
        ops.push_back(static_cast<i64>(matched_.member_op(static_cast<size_t>(joint), place)));
      happen(members, ops);
    }
  }

  // Executes ops that happen together, and notes what they let begin.
  void happen(const std::vector<OpView>& members, const std::vector<i64>& ops) {
    const auto index = static_cast<size_t>(ops[0] - base_of(ops[0]));
    if (labels_) labels_->run(members, program_.of(members[0].rank).accesses.stash[index]);
    if (reaches_others_) order_.push_back(ops);
    for (size_t at = 0; at < ops.size(); ++at) finish(ops[at], members[at]);
  }

  void finish(i64 op, const OpView& of) {
    ++num_done_;
    const auto lane = static_cast<size_t>(of.rank) * program_.code.lanes.size() + static_cast<size_t>(of.row->lane);
    --lanes_[lane].in_flight;
    waiting_.push_back(lane);
    const i64 base = base_of(op);
    const auto index = static_cast<size_t>(op - base);
    for (i64 at = of.of->after_start[index]; at < of.of->after_start[index + 1]; ++at) release(base + of.of->after[static_cast<size_t>(at)]);
    for (i64 at = tracked_start_[static_cast<size_t>(op)]; at < tracked_start_[static_cast<size_t>(op) + 1]; ++at)
      release(program_.tracked[static_cast<size_t>(at)].to);
  }

  void release(i64 op) {
    if (--pending_[static_cast<size_t>(op)]) return;
    const OpView of = view_of(op);
    if (program_.code.lanes[static_cast<size_t>(of.row->lane)].ready) ready_.push_back(op);
    else waiting_.push_back(static_cast<size_t>(of.rank) * program_.code.lanes.size() + static_cast<size_t>(of.row->lane));
  }

  const Columns& columns_;
  const Expanded program_;
  const Matched matched_;
  const std::vector<ProofRow> rows_;
  const std::vector<i64> dtypes_;
  i64 blocks_left_ = MAX_BLOCKS;
  const ShapeRules rules_;
  std::vector<i64> rank_of_;  // by op
  std::optional<LabelRun> labels_;
  std::vector<i64> pending_, tracked_start_, missing_, ready_;
  std::vector<LaneState> lanes_;  // per rank and lane
  std::vector<size_t> waiting_;   // lanes that may be able to issue
  i64 num_done_ = 0;
  bool reaches_others_ = false;
  std::vector<std::vector<i64>> order_;  // events, where races are possible
};

}  // namespace

Verdict prove(const Columns& columns) {
  try {
    return Proof(columns).verdict();
  } catch (const Doubt&) {
    return Verdict::UNKNOWN;
  } catch (const ProgramFault&) {
    return Verdict::UNKNOWN;
  }
}

}  // namespace meshweave
