#pragma once

#include <algorithm>

#include "engine.hpp"
#include "ledger.hpp"

namespace meshweave {

enum Role : u32 { SINGLE, PAIR, FREED_PAIR, STEP, FILL, MAIN, DRAIN };

constexpr i64 EVENTS_PER_PROGRESS = 1 << 20;

// One run of a program: `engine.cpp` issues its ops and takes events, `engine_ops.cpp` has what an op begins.
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

  Result run();

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
  Result results();

  // --- issue ----------------------------------------------------------------------------------------------

  const ClassOp& class_op(u32 op) const { return program_.of(ops_[op].rank).ops[ops_[op].index]; }
  const OpRow& row_of(u32 op) const { return code_.ops[static_cast<size_t>(class_op(op).row)]; }
  bool is_issued(u32 op) const { return ops_[op].issued_ps >= 0; }

  void issue_lane(size_t number);
  void issue(u32 op);
  static i64 product_flops(const ClassOp& of) { return 2 * of.a * of.b * of.c * of.num_products; }

  void compute(u32 op, const OpRow& row, const ClassOp& of, i64 rank);
  // The products, and beside them what streams through memory, at the pace of the products.
  void main_stage(u32 op, i64 flops_of_its_kind, i64 stream_bytes, i64 after_ps);
  void drain_stage(u32 op);

  i64 itemsize(i64 view) const {
    return code_.buffers[static_cast<size_t>(code_.views[static_cast<size_t>(view)].buffer)].itemsize;
  }

  const std::vector<Use>& memory_only(i64 rank);
  void one_sided(u32 op, const OpRow& row, const ClassOp& of, i64 rank);
  // Memory of both ends and the links between them; what arrives is added to what is there where `adds`.
  const std::vector<Use>& path(i64 source, i64 target, Machine::Span route, bool adds);
  const std::vector<Use>& path(i64 source, i64 target, bool adds);

  // --- partners -------------------------------------------------------------------------------------------

  void join(u32 op, const OpRow& row, const ClassOp& of);

  i64 price(const OpRow& row, i64 rank) const {
    return code_.group_price[static_cast<size_t>(code_.group(row.axis, rank))];
  }

  // Among how many directions a rate is shared. That of send_recv is one direction's, unless only one is used.
  i64 shares(const OpRow& row, i64 price) const;
  // Where a send buffer takes the message, its sender is done when it begins to flow.
  Role pair(const ClassOp& sent) const;
  void message(u32 sender, u32 receiver);

  // What the messages of one permute have in common, whoever sends them. Kept from one to the next: in a regular program
  // all ranks send the same at one time.
  struct PermuteTerms {
    const ClassOp* of = nullptr;
    i64 price = 0, after_ps = 0, cap = 0;
    Role role = PAIR;
  };

  const PermuteTerms& permute_terms(const ClassOp& sent, i64 price);
  void permute(const ClassOp& of, size_t number, i64 place, i64 count);
  void step(size_t number, const Message& one, i64 direction, i64 member);

  // --- hosts ----------------------------------------------------------------------------------------------

  static constexpr u32 ISSUED = UINT32_MAX;  // version of the event that the host of rank `flow` has issued its next op

  void issue_next(size_t rank);
  // An op is issued: it begins when its stream and its data are there.
  void take_issued(size_t rank);

  // --- flows ----------------------------------------------------------------------------------------------

  void begin(i64 after_ps, i64 amount, i64 cap, const std::vector<Use>& uses, Purpose purpose);
  void take(const Event& event);
  void over(u32 flow);
  void part_done(u32 op);

  // --- ends -----------------------------------------------------------------------------------------------

  void finish_all();
  void release(u32 op, u32 by);
  void touch(size_t lane);
  // Nothing moves although ops are left: finds a cycle of waits and says so.
  [[noreturn]] void stuck(i64 op) const;

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

}  // namespace meshweave
