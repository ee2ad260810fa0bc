#include "engine_run.hpp"

namespace meshweave {

Result Engine::run() {
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

Result Engine::results() {
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

void Engine::issue_lane(size_t number) {
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

void Engine::issue(u32 op) {
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

void Engine::issue_next(size_t rank) {
  const Class& of = program_.of(static_cast<i64>(rank));
  const size_t next = hosts_[rank].next;
  if (next == of.ops.size()) return;
  const ClassOp& op = of.ops[next];
  queue_.push(checked_add(now_ps_, machine_.issue_ps(code_.ops[static_cast<size_t>(op.row)], op)), {static_cast<u32>(rank), ISSUED});
}

void Engine::take_issued(size_t rank) {
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

void Engine::take(const Event& event) {
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

void Engine::over(u32 flow) {
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

void Engine::part_done(u32 op) {
  if (--ops_[op].pending == 0) done_.push_back(op);
}

void Engine::finish_all() {
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

void Engine::release(u32 op, u32 by) {
  ops_[op].cause = by;  // the last one stays
  if (--ops_[op].pending) return;
  touch(ops_[op].lane);
}

void Engine::touch(size_t lane) {
  if (lanes_[lane].stamp == round_) return;
  lanes_[lane].stamp = round_;
  touched_.push_back(lane);
}

void Engine::stuck(i64 op) const {
  const auto after = std::upper_bound(program_.ranks.begin(), program_.ranks.end(), op, [](i64 number, const Rank& rank) { return number < rank.base; });
  const i64 rank = after - program_.ranks.begin() - 1;
  throw ProgramFault("deadlock: nothing can go on, and this op has not ended", code_.ranks[static_cast<size_t>(rank)],
                     op - program_.ranks[static_cast<size_t>(rank)].base);
}

Result simulate(const Expanded& program, const Machine& machine, Progress progress) {
  return Engine(program, machine, progress).run();
}

}  // namespace meshweave
