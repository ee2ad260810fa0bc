#include "engine_run.hpp"

namespace meshweave {

void Engine::compute(u32 op, const OpRow& row, const ClassOp& of, i64 rank) {
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

void Engine::main_stage(u32 op, i64 flops_of_its_kind, i64 stream_bytes, i64 after_ps) {
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

void Engine::drain_stage(u32 op) {
  const ClassOp& of = class_op(op);
  const OpRow& row = row_of(op);
  const i64 bytes = row.kind == Kind::MATMUL ? machine_.tiles(of, itemsize(row.src)).drain_bytes : 0;
  if (bytes) {
    begin(0, bytes, machine_.memory_per_s, memory_only(ops_[op].rank), {DRAIN, op, 0, 0});
  } else {
    done_.push_back(op);
  }
}

const std::vector<Use>& Engine::memory_only(i64 rank) {
  uses_.assign(1, {machine_.memory(rank), 1});
  return uses_;
}

void Engine::one_sided(u32 op, const OpRow& row, const ClassOp& of, i64 rank) {
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
  begin(known.fixed_ps(), of.a, known.rate, uses_, {SINGLE, op, 0, 0});
}

const std::vector<Use>& Engine::path(i64 source, i64 target, Machine::Span route, bool adds) {
  uses_.clear();
  uses_.push_back({machine_.memory(source), 1});
  uses_.push_back({machine_.memory(target), (source != target || route.count > 0) && adds ? 2u : 1u});
  machine_.links(route, uses_);
  return uses_;
}

const std::vector<Use>& Engine::path(i64 source, i64 target, bool adds) {
  return path(source, target, source == target ? Machine::Span{0, 0} : machine_.route(source, target, false), adds);
}

void Engine::join(u32 op, const OpRow& row, const ClassOp& of) {
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
  if (row.kind == Kind::EXCHANGE) {  // of a folded group the members that are there; the price has all of them
    const i64 here = code_.group_size(joint.group);
    if (++arrived_[number] < here) return;
    const i64 took = machine_.exchange_ps(of.row, price(row, rank));
    for (i64 member = 0; member < here; ++member)
      begin(took, 0, 1, memory_only(rank), {SINGLE, matched_.member_op(number, member), 0, 0});
  } else if (row.kind == Kind::FENCE) {
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

i64 Engine::shares(const OpRow& row, i64 price) const {
  if (comm_of(row) != Comm::SEND_RECV) return row.step_directions;
  return std::max<i64>(row.step_directions / machine_.num_directions(price), 1);
}

Role Engine::pair(const ClassOp& sent) const { return sent.a > 0 && sent.a <= machine_.send_buffer_bytes ? FREED_PAIR : PAIR; }

void Engine::message(u32 sender, u32 receiver) {
  const OpRow& row = row_of(sender);
  const ClassOp& of = class_op(sender);
  const bool adds = (row_of(receiver).flags & UPDATES) != 0;
  const i64 source = ops_[sender].rank, target = ops_[receiver].rank;
  if (row.comm < 0) {  // a message of its own costs what lies between its ends
    const Machine::Span route = machine_.route(source, target, false);
    const Machine::OneSided known = machine_.one_sided(route, false);
    const i64 packing = checked_add(machine_.pack_ps(of), machine_.pack_ps(class_op(receiver)));
    begin(checked_add(known.fixed_ps(), packing), of.a, known.rate, path(source, target, route, adds),
          {pair(of), sender, receiver, 0});
    return;
  }
  const Constants& constants = machine_.constants(row.price, comm_of(row));
  begin(launch_of(of, constants) + constants.sync_ps, of.a,
        machine_.one_way(row.price, constants.rate / shares(row, row.price)), path(source, target, adds),
        {pair(of), sender, receiver, 0});
}

const Engine::PermuteTerms& Engine::permute_terms(const ClassOp& sent, i64 price) {
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

void Engine::permute(const ClassOp& of, size_t number, i64 place, i64 count) {
  const i64 group = matched_.joints[number].group;
  const i64 price = code_.group_price[static_cast<size_t>(group)];
  const auto sends = [&](i64 source, i64 target) {
    const u32 sender = matched_.member_op(number, source), receiver = matched_.member_op(number, target);
    if (!is_issued(sender) || !is_issued(receiver)) return;
    const ClassOp& sent = class_op(sender);
    const PermuteTerms& terms = permute_terms(sent, price);
    const i64 from = code_.member(group, source), to = code_.member(group, target);
    const i64 number = route_of(sent.b, sent.shift < 0, count);
    const Machine::Span route = sent.c == 1 ? machine_.to_next(code_.groups[static_cast<size_t>(group)] + source, number)
                                            : machine_.route(from, to, number);
    begin(terms.after_ps, sent.a, terms.cap, path(from, to, route, false), {terms.role, sender, receiver, 0});
  };
  const i64 from = wrapped(place + count - of.b, count);
  sends(place, wrapped(place + of.b, count));
  if (from != place) sends(from, place);
}

void Engine::step(size_t number, const Message& one, i64 direction, i64 member) {
  begin(one.after_ps, one.bytes, one.cap, path(one.source, one.target, one.route, one.adds),
        {STEP, static_cast<u32>(number), static_cast<u32>(direction), static_cast<u32>(member)});
}

void Engine::begin(i64 after_ps, i64 amount, i64 cap, const std::vector<Use>& uses, Purpose purpose) {
  const u32 flow = flows_.make(amount, cap, uses, purpose);
  queue_.push(checked_add(now_ps_, after_ps), {flow, 0});
}

}  // namespace meshweave
