#include "ledger.hpp"

#include <algorithm>

namespace meshweave {
namespace {

void add(i64& sum, i64 term) { sum = checked_add(sum, term); }

}  // namespace

void Ledger::close(u32 op, const OpRow& row, const ClassOp& of, u32 last) {
  OpState& state = ops_[op];
  const i64 rank = state.rank, took = state.ended_ps - state.issued_ps;
  Parts& parts = parts_[state.rank];
  if (row.kind == Kind::MATMUL || row.kind == Kind::CALL) return add(parts.compute, took);
  if (row.kind < Kind::ALL_GATHER || (row.kind == Kind::PERMUTE && of.b == 0)) return add(parts.copy, took);
  i64 wait = 0;
  if (last != NOBODY) {
    last = came_last(op, rank, row, of, last);
    const i64 later = ops_[last].issued_ps - state.issued_ps;
    if (later > 0) {
      state.last_partner = last;
      wait = std::min(later, took);
    }
  }
  if (row.kind == Kind::EXCHANGE) {  // whose parts nobody tells apart
    add(parts.wait, wait);
    return add(parts.transfer, took - wait);
  }
  const Fixed fixed = fixed_of(op, row, of, rank);
  const i64 launches = std::min(fixed.launch_ps, took - wait);
  const auto steps = static_cast<u128>(num_steps(row, of, rank)) * static_cast<u128>(fixed.sync_ps);
  const auto syncs = static_cast<i64>(std::min(steps, static_cast<u128>(took - wait - launches)));
  add(parts.wait, wait);
  add(parts.launch, launches);
  add(parts.sync, syncs);
  add(parts.transfer, took - wait - launches - syncs);
}

// What passes before bytes flow, as `engine_ops.cpp` has it: the launch, with what both ends of a message pack, and one
// synchronisation.
Ledger::Fixed Ledger::fixed_of(u32 op, const OpRow& row, const ClassOp& of, i64 rank) const {
  if (is_collective(row.kind)) {
    const Constants constants = constants_of(program_, machine_, program_.code.group(row.axis, rank), program_.of(rank), of);
    return {launch_of(of, constants), constants.sync_ps};
  }
  if (is_one_sided(row.kind)) {
    const bool adds = row.kind == Kind::ACCUMULATE, gets = row.kind == Kind::GET;
    if (of.b == rank) {
      const Constants& constants = machine_.constants(row.price, adds ? Comm::ACCUMULATE : Comm::SEND_RECV);
      return {constants.launch_ps, constants.sync_ps};
    }
    const Machine::OneSided known = machine_.one_sided(machine_.route(gets ? of.b : rank, gets ? rank : of.b, 0), adds);
    return {known.launch_ps, known.sync_ps};
  }
  const Joint& joint = matched_.joints[static_cast<size_t>(matched_.joint_of[op])];
  const OpState &sender = ops_[static_cast<size_t>(joint.sender)], &receiver = ops_[static_cast<size_t>(joint.receiver)];
  const ClassOp& sent = program_.op(sender.rank, sender.index);
  const OpRow& sends = program_.row(sender.rank, sender.index);
  if (sends.comm >= 0) {
    const Constants& constants = machine_.constants(sends.price, comm_of(sends));
    return {launch_of(sent, constants), constants.sync_ps};
  }
  const Machine::OneSided known = machine_.one_sided(machine_.route(sender.rank, receiver.rank, 0), false);
  const i64 packing = checked_add(machine_.pack_ps(sent), machine_.pack_ps(program_.op(receiver.rank, receiver.index)));
  return {checked_add(known.launch_ps, packing), known.sync_ps};
}

// Of the members that an op exchanges something with, the one that came last.
u32 Ledger::came_last(u32 op, i64 rank, const OpRow& row, const ClassOp& of, u32 last_of_all) const {
  const bool chains = row.kind == Kind::BROADCAST || row.kind == Kind::REDUCE;
  if (row.kind != Kind::PERMUTE && !chains) return last_of_all;
  const auto joint = static_cast<size_t>(matched_.joint_of[op]);
  const i64 count = program_.code.group_size(matched_.joints[joint].group);
  const i64 place = program_.code.place(row.axis, rank);
  u32 last = op;
  const auto consider = [&](i64 member) {
    const u32 other = matched_.member_op(joint, member);
    if (ops_[other].issued_ps > ops_[last].issued_ps) last = other;
  };
  if (!chains) {
    consider(wrapped(place + of.b, count));
    consider(wrapped(place + count - of.b, count));
    return last;
  }
  // In a chain it is who comes before, and who is next.
  const i64 first = of.b + (row.kind == Kind::REDUCE), along = floor_mod(place - first, count);
  for (i64 other = 0; other <= std::min(along + 1, count - 1); ++other) consider((first + other) % count);
  return last;
}

i64 Ledger::num_steps(const OpRow& row, const ClassOp& of, i64 rank) const {
  if (row.kind == Kind::PERMUTE) return machine_.has_rings ? of.c : 1;
  if (!is_collective(row.kind)) return 1;
  const i64 count = program_.code.full_size(program_.code.group(row.axis, rank));
  if (count == 1) return 0;
  if (row.kind == Kind::ALL_REDUCE) return 2 * (count - 1);
  if (row.kind == Kind::BROADCAST || row.kind == Kind::REDUCE) return count + of.c - 2;
  return count - 1;
}

}  // namespace meshweave
