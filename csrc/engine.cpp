#include "engine.hpp"

#include <algorithm>

#include "ledger.hpp"

namespace meshweave {
namespace {

enum Role : u32 { SINGLE, PAIR, FREED_PAIR, STEP, FILL, MAIN, DRAIN };

constexpr i64 EVENTS_PER_PROGRESS = 1 << 20;

class Engine {
 public:
  Engine(const Expanded& program, const Machine& machine, Progress progress)
      : program_(program), code_(program.code), machine_(machine), progress_(progress),
        numbering_(program.tracked.empty() ? Numbering::by_index(program) : Numbering::by_rank(program)),
        matched_(program, numbering_), flows_(machine.capacities(), queue_), underway_(matched_.joints.size()),
        arrived_(matched_.joints.size(), 0), last_(matched_.joints.size(), NOBODY),
        ops_(static_cast<size_t>(program.num_ops)), parts_(static_cast<size_t>(code_.num_ranks())),
        ledger_(program, machine, matched_, ops_, parts_) {
    lanes_.resize(static_cast<size_t>(code_.num_ranks()) * code_.lanes.size());
    each_op([&](i64 rank, i64 index) {
      OpState& state = ops_[numbering_.of(rank, index)];
      const Class& of = program_.of(rank);
      state.pending = static_cast<u32>(of.before_start[static_cast<size_t>(index) + 1] - of.before_start[static_cast<size_t>(index)]);
      state.rank = static_cast<u32>(rank);
      state.index = static_cast<u32>(index);
      state.lane = static_cast<u32>(rank * static_cast<i64>(code_.lanes.size()) + code_.ops[static_cast<size_t>(of.ops[state.index].row)].lane);
    });
    for (const Tracked& edge : program.tracked) ++ops_[static_cast<size_t>(edge.to)].pending;
    if (!machine_.has_host) return;
    for (OpState& state : ops_) ++state.pending;
    hosts_.resize(static_cast<size_t>(code_.num_ranks()));
  }

  Result run() {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) issue_lane(lane);
    for (size_t rank = 0; rank < hosts_.size(); ++rank) issue_next(rank);
    std::vector<Event> round;
    while (!queue_.empty()) {
      now_ps_ = queue_.next_ps();
      if (now_ps_ > LAST_PS) throw ProgramFault("the run takes longer than 53 days");
      while (!queue_.empty() && queue_.next_ps() == now_ps_) {
        queue_.take(round);
        for (const Event& event : round) take(event);
        result_.num_events += static_cast<i64>(round.size());
        finish_all();
      }
      flows_.share(now_ps_);
      if (progress_ && result_.num_events >= next_progress_) {
        next_progress_ = result_.num_events + EVENTS_PER_PROGRESS;
        progress_(now_ps_);
      }
    }
    return results();
  }

 private:
  struct HostState {
    size_t next = 0;         // the op that it issues
    u32 waits_for = NOBODY;  // the collective whose end it waits for
  };

  struct LaneState {
    u32 head = 0, in_flight = 0;
    u32 stamp = 0;        // of the round that touched it last
    u32 freed_by = NOBODY;  // the op that ended in it last
  };

  // Visits every op, so that neither those of a rank nor those of an index lie far from each other.
  template <class Visit>
  void each_op(Visit visit) const {
    constexpr i64 BLOCK = 16;
    i64 most = 0;
    for (const Class& of : program_.classes) most = std::max(most, static_cast<i64>(of.ops.size()));
    for (i64 first = 0; first < most; first += BLOCK)
      for (i64 rank = 0; rank < code_.num_ranks(); ++rank) {
        const i64 stop = std::min(first + BLOCK, static_cast<i64>(program_.of(rank).ops.size()));
        for (i64 index = first; index < stop; ++index) visit(rank, index);
      }
  }

  // What is known of each op, by rank.
  Result results() {
    const auto num_ops = static_cast<size_t>(program_.num_ops);
    for (std::vector<i64>* column : {&result_.issued_ps, &result_.ended_ps, &result_.cause, &result_.last_partner})
      column->resize(num_ops);
    const auto listed = [&](u32 op) {
      return op == NOBODY ? NONE : program_.ranks[ops_[op].rank].base + static_cast<i64>(ops_[op].index);
    };
    each_op([&](i64 rank, i64 index) {
      const OpState& state = ops_[numbering_.of(rank, index)];
      const auto at = static_cast<size_t>(program_.ranks[static_cast<size_t>(rank)].base + index);
      result_.issued_ps[at] = state.issued_ps;
      result_.ended_ps[at] = state.ended_ps;
      result_.cause[at] = listed(state.cause);
      result_.last_partner[at] = listed(state.last_partner);
    });
    const auto blocked = std::find_if(result_.ended_ps.begin(), result_.ended_ps.end(), [](i64 at) { return at < 0; });
    if (blocked != result_.ended_ps.end()) stuck(blocked - result_.ended_ps.begin());
    result_.parts = std::move(parts_);
    result_.carried = flows_.carried();
    return std::move(result_);
  }

  // --- issue ----------------------------------------------------------------------------------------------

  const ClassOp& class_op(u32 op) const { return program_.of(ops_[op].rank).ops[ops_[op].index]; }
  const OpRow& row_of(u32 op) const { return code_.ops[static_cast<size_t>(class_op(op).row)]; }
  bool is_issued(u32 op) const { return ops_[op].issued_ps >= 0; }

  void issue_lane(size_t number) {
    LaneState& state = lanes_[number];
    const auto rank = static_cast<i64>(number / code_.lanes.size());
    const size_t lane = number % code_.lanes.size();
    const std::vector<i64>& queue = program_.of(rank).lanes[lane];
    const bool ready_first = code_.lanes[lane].ready != 0;
    size_t at = state.head;
    while (at < queue.size() && state.in_flight < static_cast<u64>(code_.lanes[lane].width)) {
      const u32 op = numbering_.of(rank, queue[at]);
      OpState& waiting = ops_[op];
      const bool was_issued = waiting.issued_ps >= 0;
      if (!was_issued && waiting.pending) {
        if (!ready_first) break;
        ++at;
        continue;
      }
      if (at == state.head) ++state.head;
      ++at;
      if (was_issued) continue;
      ++state.in_flight;
      // The later of what it waited for; its lane's last op where that ended later.
      const u32 freed = state.freed_by;
      if (freed != NOBODY && (waiting.cause == NOBODY || ops_[waiting.cause].ended_ps < ops_[freed].ended_ps))
        waiting.cause = freed;
      issue(op);
    }
  }

  void issue(u32 op) {
    ops_[op].issued_ps = now_ps_;
    const i64 rank = ops_[op].rank;
    const ClassOp& of = class_op(op);
    const OpRow& row = code_.ops[static_cast<size_t>(of.row)];
    if (matched_.joint_of[op] >= 0) {
      join(op, row, of);
    } else if (is_one_sided(row.kind)) {
      ops_[op].pending = 1;
      one_sided(op, row, of, rank);
    } else {
      compute(op, row, of, rank);
    }
  }

  static i64 product_flops(const ClassOp& of) { return 2 * of.a * of.b * of.c * of.num_products; }

  void compute(u32 op, const OpRow& row, const ClassOp& of, i64 rank) {
    ops_[op].pending = 1;
    if (row.kind == Kind::MATMUL && of.a && of.b && of.c && of.num_products) {
      const Tiles tiles = machine_.tiles(of, itemsize(row.src));
      const i64 launch_ps = row.flags & JOINS ? 0 : machine_.launch_ps;  // of the whole product
      if (tiles.fill_bytes) {
        begin(launch_ps, tiles.fill_bytes, machine_.memory_per_s, memory_only(rank), {FILL, op, 0, 0});
      } else {
        main_stage(op, product_flops(of), tiles.stream_bytes, launch_ps);
      }
    } else if (row.kind == Kind::CALL && of.a) {
      main_stage(op, of.a, of.b, machine_.launch_ps);
    } else {
      const i64 bytes = row.kind == Kind::CALL ? of.b : row.kind == Kind::MATMUL ? 0 : of.a;
      begin(0, bytes, machine_.memory_per_s, memory_only(rank), {SINGLE, op, 0, 0});
    }
  }

  // The products, and beside them what streams through memory, at the pace of the products.
  void main_stage(u32 op, i64 flops_of_its_kind, i64 stream_bytes, i64 after_ps) {
    const i64 rank = ops_[op].rank;
    const i64 by_shape = machine_.shape_flops(program_.ranks[static_cast<size_t>(rank)].of_class, ops_[op].index);
    const i64 flops = by_shape >= 0 ? by_shape : machine_.engine_flops(flops_of_its_kind, row_of(op).rate);
    ops_[op].pending = stream_bytes ? 2 : 1;
    uses_.assign(1, {machine_.engine(rank), 1});
    begin(after_ps, flops, machine_.flops_per_s, uses_, {MAIN, op, 0, 0});
    if (!stream_bytes) return;
    const u128 pace = (static_cast<u128>(stream_bytes) * static_cast<u128>(machine_.flops_per_s) +
                       static_cast<u128>(flops) - 1) / static_cast<u128>(flops);
    const i64 cap = static_cast<i64>(std::min<u128>(pace, static_cast<u128>(machine_.memory_per_s)));
    begin(after_ps, stream_bytes, cap, memory_only(rank), {MAIN, op, 0, 0});
  }

  void drain_stage(u32 op) {
    const ClassOp& of = class_op(op);
    const OpRow& row = row_of(op);
    const i64 bytes = row.kind == Kind::MATMUL ? machine_.tiles(of, itemsize(row.src)).drain_bytes : 0;
    if (bytes) {
      begin(0, bytes, machine_.memory_per_s, memory_only(ops_[op].rank), {DRAIN, op, 0, 0});
    } else {
      done_.push_back(op);
    }
  }

  i64 itemsize(i64 view) const {
    return code_.buffers[static_cast<size_t>(code_.views[static_cast<size_t>(view)].buffer)].itemsize;
  }

  const std::vector<Use>& memory_only(i64 rank) {
    uses_.assign(1, {machine_.memory(rank), 1});
    return uses_;
  }

  void one_sided(u32 op, const OpRow& row, const ClassOp& of, i64 rank) {
    const bool adds = row.kind == Kind::ACCUMULATE;
    const i64 source = row.kind == Kind::GET ? of.b : rank, target = row.kind == Kind::GET ? rank : of.b;
    if (source == target) {
      const Constants& constants = machine_.constants(row.price, adds ? Comm::ACCUMULATE : Comm::SEND_RECV);
      begin(constants.launch_ps + constants.sync_ps, of.a, machine_.one_way(row.price, constants.rate),
            path(source, target, adds), {SINGLE, op, 0, 0});
      return;
    }
    const Machine::Span route = machine_.route(source, target, false);
    const Machine::OneSided known = machine_.one_sided(route, adds);
    path(source, target, route, adds);
    if (known.flops_per_byte) uses_.push_back({machine_.engine(rank), static_cast<u32>(known.flops_per_byte)});
    begin(known.fixed_ps, of.a, known.rate, uses_, {SINGLE, op, 0, 0});
  }

  // Memory of both ends and the links between them; what arrives is added to what is there where `adds`.
  const std::vector<Use>& path(i64 source, i64 target, Machine::Span route, bool adds) {
    uses_.clear();
    uses_.push_back({machine_.memory(source), 1});
    uses_.push_back({machine_.memory(target), (source != target || route.count > 0) && adds ? 2u : 1u});
    machine_.links(route, uses_);
    return uses_;
  }

  const std::vector<Use>& path(i64 source, i64 target, bool adds) {
    return path(source, target, source == target ? Machine::Span{0, 0} : machine_.route(source, target, false), adds);
  }

  // --- partners -------------------------------------------------------------------------------------------

  void join(u32 op, const OpRow& row, const ClassOp& of) {
    const auto number = static_cast<size_t>(matched_.joint_of[op]);
    const Joint& joint = matched_.joints[number];
    last_[number] = op;
    if (joint.group < 0) {
      ops_[op].pending = 1;
      const auto sender = static_cast<u32>(joint.sender), receiver = static_cast<u32>(joint.receiver);
      if (is_issued(sender) && is_issued(receiver)) message(sender, receiver);
      return;
    }
    const i64 rank = ops_[op].rank, count = code_.full_size(joint.group), place = code_.place(row.axis, rank);
    if (row.kind == Kind::PERMUTE && of.b == 0) {
      ops_[op].pending = 1;
      begin(0, of.a, machine_.memory_per_s, memory_only(rank), {SINGLE, op, 0, 0});
      return;
    }
    if (row.kind == Kind::PERMUTE) {
      ops_[op].pending = 2;
      permute(of, number, place, count);
      return;
    }
    ops_[op].pending = 1;
    if (row.kind == Kind::FENCE) {
      if (++arrived_[number] < count) return;
      const Constants& constants = machine_.constants(price(row, rank), Comm::ALL_GATHER);
      for (i64 member = 0; member < count; ++member)
        begin(checked_add(constants.launch_ps, checked_mul(count - 1, constants.sync_ps)), 0, 1, memory_only(rank),
              {SINGLE, matched_.member_op(number, member), 0, 0});
    } else if (count == 1) {
      begin(machine_.constants(price(row, rank), comm_of(row)).launch_ps, 0, 1, memory_only(rank), {SINGLE, op, 0, 0});
    } else {
      std::unique_ptr<Collective>& under = underway_[number];
      if (!under) under = std::make_unique<Collective>(program_, machine_, joint.group, rank, of);
      under->arrive(place, op, of, [&](const Message& one, i64 direction, i64 member) { step(number, one, direction, member); });
    }
  }

  i64 price(const OpRow& row, i64 rank) const {
    return code_.group_price[static_cast<size_t>(code_.group(row.axis, rank))];
  }

  // Among how many directions a rate is shared. That of send_recv is one direction's, unless only one is used.
  i64 shares(const OpRow& row, i64 price) const {
    if (comm_of(row) != Comm::SEND_RECV) return row.step_directions;
    return std::max<i64>(row.step_directions / machine_.num_directions(price), 1);
  }

  // Where a send buffer takes the message, its sender is done when it begins to flow.
  Role pair(const ClassOp& sent) const { return sent.a > 0 && sent.a <= machine_.send_buffer_bytes ? FREED_PAIR : PAIR; }

  void message(u32 sender, u32 receiver) {
    const OpRow& row = row_of(sender);
    const ClassOp& of = class_op(sender);
    const bool adds = (row_of(receiver).flags & UPDATES) != 0;
    const i64 source = ops_[sender].rank, target = ops_[receiver].rank;
    if (row.comm < 0) {  // a message of its own costs what lies between its ends
      const Machine::Span route = machine_.route(source, target, false);
      const Machine::OneSided known = machine_.one_sided(route, false);
      const i64 packing = checked_add(machine_.pack_ps(of), machine_.pack_ps(class_op(receiver)));
      begin(checked_add(known.fixed_ps, packing), of.a, known.rate, path(source, target, route, adds),
            {pair(of), sender, receiver, 0});
      return;
    }
    const Constants& constants = machine_.constants(row.price, comm_of(row));
    begin(launch_of(of, constants) + constants.sync_ps, of.a,
          machine_.one_way(row.price, constants.rate / shares(row, row.price)), path(source, target, adds),
          {pair(of), sender, receiver, 0});
  }

  // What the messages of one permute have in common, whoever sends them. Kept from one to the next: in a regular program
  // all ranks send the same at one time.
  struct PermuteTerms {
    const ClassOp* of = nullptr;
    i64 price = 0, after_ps = 0, cap = 0;
    Role role = PAIR;
  };

  const PermuteTerms& permute_terms(const ClassOp& sent, i64 price) {
    PermuteTerms& terms = permute_terms_;
    if (terms.of == &sent && terms.price == price) return terms;
    const OpRow& row = code_.ops[static_cast<size_t>(sent.row)];
    const Constants& constants = machine_.constants(price, comm_of(row));
    const i64 hops = machine_.has_rings ? sent.c : 1;
    const i64 rate = constants.rate / (shares(row, price) * hops);  // over several hops the links hold it back
    terms = {&sent, price, checked_add(launch_of(sent, constants), checked_mul(hops, constants.sync_ps)),
             hops > 1 ? std::max<i64>(rate, 1) : machine_.one_way(price, rate), pair(sent)};
    return terms;
  }

  void permute(const ClassOp& of, size_t number, i64 place, i64 count) {
    const i64 group = matched_.joints[number].group;
    const i64 price = code_.group_price[static_cast<size_t>(group)];
    const auto sends = [&](i64 source, i64 target) {
      const u32 sender = matched_.member_op(number, source), receiver = matched_.member_op(number, target);
      if (!is_issued(sender) || !is_issued(receiver)) return;
      const ClassOp& sent = class_op(sender);
      const PermuteTerms& terms = permute_terms(sent, price);
      const i64 from = code_.member(group, source), to = code_.member(group, target);
      const Machine::Span route = of.b == 1 ? machine_.to_next(code_.groups[static_cast<size_t>(group)] + source, 0)
                                            : machine_.route(from, to, 0);
      begin(terms.after_ps, sent.a, terms.cap, path(from, to, route, false), {terms.role, sender, receiver, 0});
    };
    const i64 from = wrapped(place + count - of.b, count);
    sends(place, wrapped(place + of.b, count));
    if (from != place) sends(from, place);
  }

  void step(size_t number, const Message& one, i64 direction, i64 member) {
    begin(one.after_ps, one.bytes, one.cap, path(one.source, one.target, one.route, one.adds),
          {STEP, static_cast<u32>(number), static_cast<u32>(direction), static_cast<u32>(member)});
  }

  // --- hosts ----------------------------------------------------------------------------------------------

  static constexpr u32 ISSUED = UINT32_MAX;  // version of the event that the host of rank `flow` has issued its next op

  void issue_next(size_t rank) {
    const Class& of = program_.of(static_cast<i64>(rank));
    const size_t next = hosts_[rank].next;
    if (next == of.ops.size()) return;
    const ClassOp& op = of.ops[next];
    queue_.push(checked_add(now_ps_, machine_.issue_ps(code_.ops[static_cast<size_t>(op.row)], op)), {static_cast<u32>(rank), ISSUED});
  }

  // An op is issued: it begins when its stream and its data are there.
  void take_issued(size_t rank) {
    HostState& host = hosts_[rank];
    const u32 op = numbering_.of(static_cast<i64>(rank), static_cast<i64>(host.next));
    ++host.next;
    released_.push_back(op);
    const Kind kind = row_of(op).kind;
    if (machine_.host_waits && is_collective(kind) && kind != Kind::PERMUTE) {
      host.waits_for = op;
    } else {
      issue_next(rank);
    }
  }

  // --- flows ----------------------------------------------------------------------------------------------

  void begin(i64 after_ps, i64 amount, i64 cap, const std::vector<Use>& uses, Purpose purpose) {
    const u32 flow = flows_.make(amount, cap, uses, purpose);
    queue_.push(checked_add(now_ps_, after_ps), {flow, 0});
  }

  void take(const Event& event) {
    if (event.version == ISSUED) {
      take_issued(event.flow);
    } else if (event.version == 0) {
      const Purpose purpose = flows_.purpose(event.flow);
      if (purpose.role == FREED_PAIR) part_done(purpose.x);
      if (flows_.start(event.flow, now_ps_)) over(event.flow);
    } else if (flows_.is_current(event)) {
      flows_.end(event.flow);
      over(event.flow);
    }
  }

  void over(u32 flow) {
    const Purpose purpose = flows_.purpose(flow);
    flows_.drop(flow);
    switch (purpose.role) {
      case SINGLE: part_done(purpose.x); break;
      case DRAIN: done_.push_back(purpose.x); break;
      case PAIR: part_done(purpose.x); [[fallthrough]];
      case FREED_PAIR: part_done(purpose.y); break;
      case FILL: {
        const ClassOp& of = class_op(purpose.x);
        const Tiles tiles = machine_.tiles(of, itemsize(row_of(purpose.x).src));
        main_stage(purpose.x, product_flops(of), tiles.stream_bytes, 0);
        break;
      }
      case MAIN:
        if (--ops_[purpose.x].pending == 0) drain_stage(purpose.x);
        break;
      case STEP: {
        const size_t number = purpose.x;
        Collective& under = *underway_[number];
        under.over(purpose.y, purpose.z,
                   [&](const Message& one, i64 direction, i64 member) { step(number, one, direction, member); },
                   [&](u32 op) { done_.push_back(op); });
        if (under.is_over()) underway_[number].reset();
        break;
      }
      default: break;
    }
  }

  void part_done(u32 op) {
    if (--ops_[op].pending == 0) done_.push_back(op);
  }

  // --- ends -----------------------------------------------------------------------------------------------

  void finish_all() {
    if (done_.empty() && released_.empty()) return;
    ++round_;
    touched_.clear();
    for (const u32 op : released_)
      if (--ops_[op].pending == 0) touch(ops_[op].lane);
    released_.clear();
    for (const u32 op : done_) {
      OpState& state = ops_[op];
      state.ended_ps = now_ps_;
      const i32 joint = matched_.joint_of[op];
      const Class& of = program_.of(state.rank);
      const ClassOp& ended = of.ops[state.index];
      const OpRow& row = code_.ops[static_cast<size_t>(ended.row)];
      ledger_.close(op, row, ended, joint < 0 ? NOBODY : last_[static_cast<size_t>(joint)]);
      const u32 lane = state.lane;
      --lanes_[lane].in_flight;
      if (!hosts_.empty() && hosts_[state.rank].waits_for == op) {
        hosts_[state.rank].waits_for = NOBODY;
        issue_next(state.rank);
      }
      lanes_[lane].freed_by = op;
      touch(lane);
      for (i64 at = of.after_start[state.index]; at < of.after_start[state.index + 1]; ++at)
        release(numbering_.later(op, state.rank, of.after[static_cast<size_t>(at)] - state.index), op);
      if (!program_.tracked.empty()) {
        auto edge = std::lower_bound(program_.tracked.begin(), program_.tracked.end(), static_cast<i64>(op),
                                     [](const Tracked& one, i64 from) { return one.from < from; });
        for (; edge != program_.tracked.end() && edge->from == static_cast<i64>(op); ++edge)
          release(static_cast<u32>(edge->to), op);
      }
    }
    done_.clear();
    for (const size_t lane : touched_) issue_lane(lane);
  }

  void release(u32 op, u32 by) {
    ops_[op].cause = by;  // the last one stays
    if (--ops_[op].pending) return;
    touch(ops_[op].lane);
  }

  void touch(size_t lane) {
    if (lanes_[lane].stamp == round_) return;
    lanes_[lane].stamp = round_;
    touched_.push_back(lane);
  }

  // Nothing moves although ops are left: finds a cycle of waits and says so.
  [[noreturn]] void stuck(i64 op) const {
    const auto after = std::upper_bound(program_.ranks.begin(), program_.ranks.end(), op, [](i64 number, const Rank& rank) { return number < rank.base; });
    const i64 rank = after - program_.ranks.begin() - 1;
    throw ProgramFault("deadlock: nothing can go on, and this op has not ended", code_.ranks[static_cast<size_t>(rank)],
                       op - program_.ranks[static_cast<size_t>(rank)].base);
  }

  const Expanded& program_;
  const Template& code_;
  const Machine& machine_;
  Progress progress_;
  Numbering numbering_;
  Matched matched_;
  Queue queue_;
  Flows flows_;
  std::vector<std::unique_ptr<Collective>> underway_;  // by joint
  std::vector<i32> arrived_;                           // by joint, of fences
  std::vector<u32> last_;                              // by joint: who came last
  std::vector<OpState> ops_;                           // by number
  std::vector<Parts> parts_;                           // by rank
  std::vector<LaneState> lanes_;
  std::vector<HostState> hosts_;  // by rank; none where the machine has no host
  std::vector<u32> done_, released_;
  std::vector<size_t> touched_;
  std::vector<Use> uses_;
  PermuteTerms permute_terms_;
  Result result_;
  Ledger ledger_;
  i64 now_ps_ = 0, next_progress_ = EVENTS_PER_PROGRESS;
  u32 round_ = 0;
};

}  // namespace

Result simulate(const Expanded& program, const Machine& machine, Progress progress) {
  return Engine(program, machine, progress).run();
}

}  // namespace meshweave
