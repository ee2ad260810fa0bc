#include "machine.hpp"

#include "collective.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>

namespace meshweave {
namespace {

constexpr i64 LARGEST_RATE = i64{1} << 60;
constexpr size_t MAX_ROUTES = size_t{1} << 25;
constexpr i64 LARGEST_FIXED_PS = i64{1} << 60;

i64 in_range(i64 value, i64 low, i64 high, const char* what) {
  if (value < low || value > high) throw BadInput(std::string("machine: bad ") + what);
  return value;
}

i64 ceil_div(i64 a, i64 b) { return a / b + (a % b != 0); }

}  // namespace

// Whether the neighbour of a member on a route is an image of a member: of a folded group the last one's next, and
// backwards the first one's.
static bool goes_to_image(const Template& code, i64 group, i64 place, i64 number) {
  return code.is_folded(group) && (number == 1 ? place == 0 : place + 1 == code.group_size(group));
}

u64 route_key(i64 source, i64 target, i64 number, i64 num_ranks) {
  return (static_cast<u64>(source) * static_cast<u64>(num_ranks) + static_cast<u64>(target)) * NUM_ROUTES +
         static_cast<u64>(number);
}

SizedKey sized_key(const Expanded& program, const Class& in, const ClassOp& of, i64 group) {
  const OpRow& row = program.code.ops[static_cast<size_t>(of.row)];
  i64 bytes = of.a;
  if (row.kind != Kind::ALL_REDUCE) {
    i64 rows = 0;
    for (i64 at = 0; at < of.num_sizes; ++at) rows = std::max(rows, in.sizes[static_cast<size_t>(of.sizes + at)]);
    bytes = checked_mul(rows, of.a);
  }
  return {program.code.group_price[static_cast<size_t>(group)], static_cast<i64>(comm_of(row)),
          program.code.full_size(group), bytes};
}

Column sized_keys(const Expanded& program) {
  std::set<SizedKey> known;
  for (i64 rank = 0; rank < program.code.num_ranks(); ++rank) {
    const Class& in = program.of(rank);
    std::set<std::array<i64, 4>> seen;  // ops of a class that are alike
    for (const ClassOp& of : in.ops) {
      const OpRow& row = program.code.ops[static_cast<size_t>(of.row)];
      if (row.kind != Kind::ALL_GATHER && row.kind != Kind::REDUCE_SCATTER && row.kind != Kind::ALL_REDUCE) continue;
      if (!seen.insert({of.row, of.a, of.sizes, of.num_sizes}).second) continue;
      const i64 group = program.code.group(row.axis, rank);
      if (group >= 0) known.insert(sized_key(program, in, of, group));
    }
  }
  Column out;
  for (const SizedKey& key : known) out.insert(out.end(), key.begin(), key.end());
  return out;
}

Machine::Machine(const Columns& c, const Expanded& program) : num_ranks_(program.code.num_ranks()) {
  const Column& chip = column(c, "chip");
  require(chip.size() == 10, "machine: bad chip");
  flops_per_s = in_range(chip[0], 1, LARGEST_RATE, "FLOP/s");
  memory_per_s = in_range(chip[1], 1, LARGEST_RATE, "memory rate");
  launch_ps = in_range(chip[2], 0, LARGEST_FIXED_PS, "launch time");
  tile_m_ = in_range(chip[3], 0, i64{1} << 30, "tile");
  tile_n_ = in_range(chip[4], 0, i64{1} << 30, "tile");
  tile_k_ = in_range(chip[5], 0, i64{1} << 30, "tile");
  require((tile_m_ == 0) == (tile_n_ == 0) && (tile_n_ == 0) == (tile_k_ == 0), "machine: bad tile");
  send_buffer_bytes = in_range(chip[6], 0, LARGEST_RATE, "send buffer");
  has_rings = chip[7] != 0;
  pack_launch_ps_ = in_range(chip[8], 0, LARGEST_FIXED_PS, "launch of packing");
  pack_per_s_ = in_range(chip[9], 0, LARGEST_RATE, "rate of packing");

  const Column& host = column(c, "host");
  require(host.empty() || host.size() == 4, "machine: bad host");
  has_host = !host.empty();
  for (size_t at = 0; has_host && at < issue_.size(); ++at) issue_[at] = in_range(host[at], 0, LARGEST_FIXED_PS, "issue time");
  host_waits = has_host && host[3] != 0;

  flop_rates_ = column(c, "flop_rates");
  for (const i64 rate : flop_rates_) in_range(rate, 1, LARGEST_RATE, "FLOP rate");
  for (const OpRow& row : program.code.ops)
    require(row.rate < static_cast<i64>(flop_rates_.size()), "machine: an op without a FLOP rate");
  work_flops_ = column(c, "work_flops");
  if (!work_flops_.empty()) {
    Works works(program);
    require(works.rows.size() == work_flops_.size() * Works::WIDTH, "machine: work_flops does not fit");
    for (const i64 flops : work_flops_)
      if (flops != -1) in_range(flops, 1, i64{1} << 62, "FLOPs of a work");
    work_number_ = std::move(works.number);
  }
  num_directions_ = column(c, "num_directions");
  for (const i64 count : num_directions_) in_range(count, 1, 2, "num_directions");
  exchange_ps_ = column(c, "exchange_ps");
  require(exchange_ps_.size() == program.code.ops.size() * num_directions_.size(), "machine: exchange_ps does not fit");
  for (const i64 ticks : exchange_ps_) in_range(ticks, -1, LARGEST_FIXED_PS, "time of an exchange");
  one_link_ = column(c, "one_link");
  require(one_link_.size() == num_directions_.size(), "machine: one_link does not fit");
  for (const i64 rate : one_link_) in_range(rate, 1, LARGEST_RATE, "link rate");
  const Column& constants = column(c, "constants");
  const size_t rows = num_directions_.size() * static_cast<size_t>(Comm::COUNT);
  require(constants.size() == rows * 3, "machine: constants do not fit");
  for (size_t row = 0; row < rows; ++row)
    constants_.push_back({in_range(constants[3 * row], 0, LARGEST_FIXED_PS, "launch time"),
                          in_range(constants[3 * row + 1], 0, LARGEST_FIXED_PS, "synchronisation time"),
                          in_range(constants[3 * row + 2], 1, LARGEST_RATE, "rate")});
  const auto has_constants = [&](i64 price) { return price >= 0 && price < static_cast<i64>(num_directions_.size()); };
  for (const i64 price : program.code.group_price) require(has_constants(price), "machine: a group without constants");
  for (const OpRow& row : program.code.ops)
    require((!is_message(row.kind) && !is_one_sided(row.kind)) || has_constants(row.price),
            "machine: an op without constants");

  link_rates_ = column(c, "link_rates");
  for (const i64 rate : link_rates_) in_range(rate, 1, LARGEST_RATE, "link rate");
  route_links_ = column(c, "route_links");
  for (const i64 link : route_links_) require(link % LINK_WEIGHTS > 0, "machine: a link without a weight");
  for (const i64 link : route_links_) in_range(link, 0, LINK_WEIGHTS * static_cast<i64>(link_rates_.size()) - 1, "link");
  const Column& starts = column(c, "route_starts");
  const Column& rails = column(c, "rails");
  require(rails.size() == num_directions_.size(), "machine: rails do not fit");
  const Column& sized = column(c, "sized");
  require(sized.size() % 8 == 0, "machine: sized does not fit");
  for (size_t at = 0; at < sized.size(); at += 8) {
    const i64 number = in_range(sized[at + 7], 0, IMAGE_ROUTES - 1, "route");
    require(number < 2 || (has_constants(sized[at]) && rails[static_cast<size_t>(sized[at])]), "machine: a route without rails");
    sized_[{sized[at], sized[at + 1], sized[at + 2], sized[at + 3]}] = {
        in_range(sized[at + 4], 0, LARGEST_FIXED_PS, "launch time"),
        in_range(sized[at + 5], 0, LARGEST_FIXED_PS, "synchronisation time"), in_range(sized[at + 6], 1, LARGEST_RATE, "rate"),
        number};
  }
  const std::vector<Route> wanted = routes(program, num_directions_, rails);
  require(starts.size() == wanted.size() + 1 && starts.front() == 0 &&
              starts.back() == static_cast<i64>(route_links_.size()) && std::is_sorted(starts.begin(), starts.end()),
          "machine: routes do not fit");
  for (size_t at = 0; at < wanted.size(); ++at)
    routes_.emplace(route_key(wanted[at].source, wanted[at].target, wanted[at].number, num_ranks_),
                    Span{starts[at], starts[at + 1] - starts[at], static_cast<i64>(at)});
  one_sided_ = column(c, "one_sided");
  const bool needed = std::any_of(program.code.ops.begin(), program.code.ops.end(), [](const OpRow& row) {
    return is_one_sided(row.kind) || (row.kind == Kind::SEND && row.comm < 0);
  });
  require(!needed || one_sided_.size() == 8 * wanted.size(), "machine: one_sided does not fit");
  for (size_t at = 0; needed && at < one_sided_.size(); at += 4) {
    in_range(one_sided_[at], 0, LARGEST_FIXED_PS, "launch time");
    in_range(one_sided_[at + 1], 0, LARGEST_FIXED_PS, "synchronisation time");
    in_range(one_sided_[at + 2], 1, LARGEST_RATE, "rate");
    in_range(one_sided_[at + 3], 0, i64{1} << 20, "share of the products");
  }
  const Template& code = program.code;
  for (i64 number = 0; number < IMAGE_ROUTES; ++number)
    for (size_t group = 0; group + 1 < code.groups.size(); ++group)
      for (i64 place = 0, count = code.group_size(static_cast<i64>(group)); place < count; ++place) {
        const i64 next = (place + (number == 1 ? count - 1 : 1)) % count;
        const i64 named = number + (goes_to_image(code, static_cast<i64>(group), place, number) ? IMAGE_ROUTES : 0);
        const auto found = routes_.find(route_key(code.member(static_cast<i64>(group), place),
                                                  code.member(static_cast<i64>(group), next), named, num_ranks_));
        to_next_[number].push_back(found == routes_.end() ? Span{0, 0} : found->second);  // not asked for: not used
      }
}

Works::Works(const Expanded& program) {
  std::map<std::array<i64, WIDTH>, i64> known;
  for (const Class& of : program.classes) {
    number.emplace_back(of.ops.size(), -1);
    for (size_t at = 0; at < of.ops.size(); ++at) {
      const ClassOp& op = of.ops[at];
      const Kind kind = program.code.ops[static_cast<size_t>(op.row)].kind;
      if (kind != Kind::MATMUL && kind != Kind::CALL) continue;
      std::array<i64, WIDTH> key{op.row, op.a, op.b, op.c, op.num_products, op.num_sizes};
      require(op.num_sizes <= static_cast<i64>(MAX_SIZES), "machine: a call of too many sizes");
      for (i64 size = 0; size < op.num_sizes; ++size)
        key[WIDTH - MAX_SIZES + static_cast<size_t>(size)] = of.sizes[static_cast<size_t>(op.sizes + size)];
      const auto [found, is_new] = known.try_emplace(key, static_cast<i64>(known.size()));
      if (is_new) rows.insert(rows.end(), key.begin(), key.end());
      number.back()[at] = found->second;
    }
  }
}

i64 Machine::engine_flops(i64 flops, i64 rate) const {
  const i64 own = flop_rates_[static_cast<size_t>(rate)];
  if (own == flops_per_s) return flops;
  const u128 scaled = (static_cast<u128>(flops) * static_cast<u128>(flops_per_s) + static_cast<u128>(own) - 1) /
                      static_cast<u128>(own);
  if (scaled > (u128{1} << 62)) throw ProgramFault("a number exceeds 64 bits");
  return static_cast<i64>(scaled);
}

Tiles Machine::tiles(const ClassOp& product, i64 itemsize) const {
  const i64 m = product.a, n = product.b, k = product.c;
  Tiles out;
  if (!tile_m_ || !m || !n || !k) return out;
  const i64 tm = std::min(m, tile_m_), tn = std::min(n, tile_n_), tk = std::min(k, tile_k_);
  out.fill_bytes = checked_mul(checked_add(checked_mul(tm, tk), checked_mul(tk, tn)), itemsize);
  out.drain_bytes = checked_mul(checked_mul(tm, tn), itemsize);
  const i64 a = checked_mul(checked_mul(m, k), ceil_div(n, tn)), b = checked_mul(checked_mul(k, n), ceil_div(m, tm));
  const i64 c = checked_mul(2, checked_mul(m, n));
  const i64 total = checked_mul(checked_mul(checked_add(checked_add(a, b), c), itemsize), product.num_products);
  out.stream_bytes = std::max<i64>(total - out.fill_bytes - out.drain_bytes, 0);
  return out;
}

std::vector<i64> Machine::capacities() const {
  std::vector<i64> out(static_cast<size_t>(num_ranks_), memory_per_s);
  out.insert(out.end(), static_cast<size_t>(num_ranks_), flops_per_s);
  out.insert(out.end(), link_rates_.begin(), link_rates_.end());
  return out;
}

Machine::Span Machine::route(i64 source, i64 target, i64 number) const {
  const auto found = routes_.find(route_key(source, target, number, num_ranks_));
  require(found != routes_.end(), "machine: a message without a route");
  return found->second;
}

std::vector<Route> routes(const Expanded& program, const Column& num_directions, const Column& rails) {
  const Template& code = program.code;
  std::vector<Route> out;
  std::unordered_set<u64> known;
  const auto add = [&](i64 source, i64 target, i64 number) {
    if ((source == target && number < IMAGE_ROUTES) || !known.insert(route_key(source, target, number, code.num_ranks())).second) return;
    if (out.size() == MAX_ROUTES) throw ProgramFault("its messages take more than 2**25 different routes");
    out.push_back({source, target, number});
  };
  // How the groups of an axis communicate: by this shift, negative as written or not; EVERYBODY with everybody; a RING,
  // which also goes backwards where its rings run in two directions.
  constexpr i64 EVERYBODY = -1, RING = 0;
  std::set<std::tuple<i64, i64, bool>> patterns;
  for (const Class& of : program.classes)
    for (const ClassOp& op : of.ops) {
      const OpRow& row = code.ops[static_cast<size_t>(op.row)];
      if (!is_collective(row.kind) || row.kind == Kind::FENCE || row.kind == Kind::EXCHANGE) continue;
      if (row.kind == Kind::PERMUTE) {
        if (op.b) patterns.insert({row.axis, op.b, op.shift < 0});
      } else if (row.kind == Kind::ALL_TO_ALL) {
        patterns.insert({row.axis, EVERYBODY, false});
      } else {
        patterns.insert({row.axis, RING, false});
      }
    }
  for (const auto& [axis, shift, is_negative] : patterns)
    for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
      const i64 group = code.group(axis, rank);
      if (group < 0) continue;
      const i64 count = code.group_size(group), place = code.place(axis, rank);
      if (shift == EVERYBODY) {
        for (i64 other = 0; other < count; ++other) add(rank, code.member(group, other), 0);
        continue;
      }
      const auto named = [&](i64 number) { return number + (goes_to_image(code, group, place, number) ? IMAGE_ROUTES : 0); };
      const i64 first = shift == RING ? 0 : route_of(shift, is_negative, count);
      add(rank, code.member(group, (place + (shift == RING ? 1 : shift)) % count), named(first));
      const i64 price = code.group_price[static_cast<size_t>(group)];
      require(price >= 0 && price < static_cast<i64>(num_directions.size()), "machine: a group without constants");
      if (shift == RING && rails[static_cast<size_t>(price)])
        for (const i64 number : {2, 3, 4}) add(rank, code.member(group, (place + 1) % count), named(number));
      if (shift == RING && num_directions[static_cast<size_t>(price)] == 2)
        add(rank, code.member(group, (place + count - 1) % count), named(1));
    }
  for (i64 rank = 0; rank < code.num_ranks(); ++rank) {
    i64 at = program.peer_start[static_cast<size_t>(rank)];
    const auto& ops = program.of(rank).ops;
    for (const ClassOp& op : ops) {
      const OpRow& row = code.ops[static_cast<size_t>(op.row)];
      if (is_message(row.kind)) {
        if (row.kind == Kind::SEND) add(rank, program.peers[static_cast<size_t>(at)], 0);
        at += 2;
      } else if (row.kind == Kind::GET) {
        add(op.b, rank, 0);
      } else if (is_one_sided(row.kind)) {
        add(rank, op.b, 0);
      }
    }
  }
  return out;
}

}  // namespace meshweave
