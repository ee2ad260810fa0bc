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
  const i64 price = is_collective(row.kind)
                        ? program_.code.group_price[static_cast<size_t>(program_.code.group(row.axis, rank))]
                        : row.price;
  const Constants& constants = machine_.constants(price, comm_of(row));
  const i64 launches = std::min(launch_of(of, constants), took - wait);
  const auto steps = static_cast<u128>(num_steps(row, of, rank)) * static_cast<u128>(constants.sync_ps);
  const auto syncs = static_cast<i64>(std::min(steps, static_cast<u128>(took - wait - launches)));
  add(parts.wait, wait);
  add(parts.launch, launches);
  add(parts.sync, syncs);
  add(parts.transfer, took - wait - launches - syncs);
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
