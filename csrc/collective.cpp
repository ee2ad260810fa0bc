#include "collective.hpp"

#include <algorithm>

namespace meshweave {

Comm comm_of(const OpRow& row) {
  if (row.comm >= 0) return static_cast<Comm>(row.comm);
  if (row.kind == Kind::FENCE) return Comm::ALL_GATHER;
  if (row.kind >= Kind::ALL_GATHER && row.kind <= Kind::ALL_TO_ALL)
    return static_cast<Comm>(static_cast<i64>(row.kind) - static_cast<i64>(Kind::ALL_GATHER));
  return Comm::SEND_RECV;
}

Constants constants_of(const Expanded& program, const Machine& machine, i64 group, const Class& in, const ClassOp& of) {
  const OpRow& row = program.code.ops[static_cast<size_t>(of.row)];
  const bool is_sized = row.kind == Kind::ALL_GATHER || row.kind == Kind::REDUCE_SCATTER || row.kind == Kind::ALL_REDUCE;
  if (is_sized && machine.has_sized())
    if (const Constants* sized = machine.sized(sized_key(program, in, of, group))) return *sized;
  return machine.constants(program.code.group_price[static_cast<size_t>(group)], comm_of(row));
}

Collective::Collective(const Expanded& program, const Machine& machine, i64 group, i64 rank, const ClassOp& of)
    : program_(program), machine_(machine), group_start_(program.code.groups[static_cast<size_t>(group)]), kind_(program.code.ops[static_cast<size_t>(of.row)].kind),
      count_(program.code.group_size(group)), full_count_(program.code.full_size(group)),
      ranks_(program.code.members.data() + group_start_), of_(of),
      in_(program.of(rank)), ops_(static_cast<size_t>(count_), NOBODY) {
  const i64 price = program.code.group_price[static_cast<size_t>(group)];
  constants_ = constants_of(program, machine, group, in_, of);
  cap_ = constants_.rate;
  if (kind_ == Kind::BROADCAST || kind_ == Kind::REDUCE) {
    first_ = (of.b + (kind_ == Kind::REDUCE)) % count_;
    direction_bytes_[0] = of.a / of.c + (of.a % of.c != 0);
    chain_ = std::make_unique<ChainSteps>(count_, of.c);
    return;
  }
  const bool widens = kind_ == Kind::ALL_TO_ALL;
  if (widens) own_.assign(static_cast<size_t>(count_), nullptr);
  if (!widens && constants_.route < 0 && machine.num_directions(price) == 2) {
    num_directions_ = 2;
    cap_ = std::max<i64>(constants_.rate / 2, 1);
  }
  if (kind_ == Kind::ALL_REDUCE || (!widens && of.num_sizes == 1))
    for (i64 direction = 0; direction < num_directions_; ++direction) direction_bytes_[direction] = part_bytes(of, in_, 0, direction);
  if (program.code.is_folded(group) && direction_bytes_[0] < 0) throw ProgramFault("runs over ranks that are folded, in unequal parts");
  const i64 around = full_count_ - 1;  // the images of a folded group send what its members send
  ring_ = std::make_unique<RingSteps>(count_, kind_ == Kind::ALL_REDUCE ? 2 * around : around, num_directions_, widens);
}

i64 Collective::part_bytes(const ClassOp& of, const Class& in, i64 part, i64 direction) const {
  const bool is_flat = kind_ == Kind::ALL_REDUCE;  // cut by the byte, in equal parts
  i64 rows = is_flat ? of.a / full_count_ + (of.a % full_count_ != 0)
                     : in.sizes[static_cast<size_t>(of.sizes + (of.num_sizes == 1 ? 0 : part))];
  if (num_directions_ == 2) rows = direction == 0 ? rows / 2 + rows % 2 : rows / 2;
  return is_flat ? rows : checked_mul(rows, of.a);
}

Message Collective::step_message(i64 direction, i64 step, i64 member) const {
  const i64 target = ring_->receiver(direction, step, member);
  Message out;
  out.after_ps = (step == 0 ? constants_.launch_ps : 0) + constants_.sync_ps;
  out.cap = cap_;
  out.source = ranks_[member];
  out.target = ranks_[target];
  out.route = kind_ == Kind::ALL_TO_ALL ? machine_.route(out.source, out.target, 0)
                                        : machine_.to_next(group_start_ + member, constants_.route < 0 ? direction : constants_.route);
  out.adds = kind_ == Kind::REDUCE_SCATTER || (kind_ == Kind::ALL_REDUCE && step < full_count_ - 1);
  if (direction_bytes_[direction] >= 0) {
    out.bytes = direction_bytes_[direction];
  } else if (kind_ == Kind::ALL_TO_ALL) {
    out.bytes = part_bytes(*own_[static_cast<size_t>(member)], program_.of(out.source), target, 0);
  } else {
    const i64 passed = kind_ == Kind::REDUCE_SCATTER ? step + 1 : step;
    out.bytes = part_bytes(of_, in_, floor_mod(direction == 0 ? member - passed : member + passed, count_), direction);
  }
  return out;
}

Message Collective::hop_message(i64 hop, i64 packet) const {
  Message out;
  out.after_ps = (hop == 0 && packet == 0 ? constants_.launch_ps : 0) + constants_.sync_ps;
  out.bytes = direction_bytes_[0];
  out.cap = cap_;
  out.source = ranks_[at_place(hop)];
  out.target = ranks_[at_place(hop + 1)];
  out.route = machine_.to_next(group_start_ + at_place(hop), 0);
  out.adds = kind_ == Kind::REDUCE;
  return out;
}

}  // namespace meshweave
