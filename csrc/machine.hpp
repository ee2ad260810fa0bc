// The machine of a program: rates, constants and routes, as `simulate/engine.py` takes them from `cost.machine`.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include "expand.hpp"
#include "flows.hpp"

namespace meshweave {

struct Constants {
  i64 launch_ps, sync_ps, rate;  // rate in bytes per second, over all directions that a ring uses
  i64 route = -1;                // of all messages where not -1; their ring then has one direction
};

// Collectives whose price may depend on their size: per row price row, kind of communication, members, bytes of the
// largest part (of an all-reduce, all). `Core.collectives` lists those of a program.
using SizedKey = std::array<i64, 4>;
SizedKey sized_key(const Expanded& program, const Class& in, const ClassOp& of, i64 group);
Column sized_keys(const Expanded& program);

// The memory traffic of a product that streams through memory in tiles (`cost/compute.py`).
struct Tiles {
  i64 fill_bytes = 0, stream_bytes = 0, drain_bytes = 0;
};

// The different products and calls of a program, which a machine may price by their shape.
struct Works {
  explicit Works(const Expanded& program);
  // Per work 12 numbers: row in the template's ops, `a`, `b`, `c`, products in a batch, how many sizes, and up to six.
  static constexpr size_t WIDTH = 12, MAX_SIZES = 6;
  Column rows;
  std::vector<std::vector<i64>> number;  // of each op of each class, -1 for other kinds of op
};

constexpr i64 IMAGE_ROUTES = 5;  // added to a route that goes to the image of a member of a folded group
constexpr i64 NUM_ROUTES = 2 * IMAGE_ROUTES;
constexpr i64 LINK_WEIGHTS = 8;  // an entry of `route_links` is a link times this plus its weight

class Machine {
 public:
  Machine(const Columns& columns, const Expanded& program);

  const Constants& constants(i64 price, Comm kind) const {
    return constants_[static_cast<size_t>(price * static_cast<i64>(Comm::COUNT) + static_cast<i64>(kind))];
  }
  bool has_sized() const { return !sized_.empty(); }
  // The constants of a collective of a size, nullptr where those of its axis hold.
  const Constants* sized(const SizedKey& key) const {
    const auto at = sized_.find(key);
    return at == sized_.end() ? nullptr : &at->second;
  }
  i64 num_directions(i64 price) const { return num_directions_[static_cast<size_t>(price)]; }
  // Returns a rate limited to that of one link, for transfers in one direction.
  i64 one_way(i64 price, i64 rate) const { return std::clamp<i64>(rate, 1, one_link_[static_cast<size_t>(price)]); }
  Tiles tiles(const ClassOp& product, i64 itemsize) const;
  // FLOPs at `flops_per_s` that take the engine as long as these at a rate of `flop_rates` (`cost/compute.py`).
  i64 engine_flops(i64 flops, i64 rate) const;
  // The same of an op of a class by its shape; -1 where the machine has no price by shape.
  i64 shape_flops(i64 of_class, size_t op) const {
    if (work_flops_.empty()) return -1;
    const i64 work = work_number_[static_cast<size_t>(of_class)][op];
    return work < 0 ? -1 : work_flops_[static_cast<size_t>(work)];
  }
  // The time in which one end of a message packs or unpacks a strided view (`cost/packing.py`).
  i64 pack_ps(const ClassOp& end) const {
    if (!end.b || !end.a || !pack_per_s_) return 0;
    const u128 amount = static_cast<u128>(end.a) * static_cast<u128>(PS_PER_S);
    const u128 took = (amount + static_cast<u128>(pack_per_s_) - 1) / static_cast<u128>(pack_per_s_);
    if (took > static_cast<u128>(LAST_PS)) throw ProgramFault("the run takes longer than 53 days");
    return checked_add(pack_launch_ps_, static_cast<i64>(took));
  }
  // Resources: memory of each rank, compute engine of each rank, links.
  std::vector<i64> capacities() const;
  u32 memory(i64 rank) const { return static_cast<u32>(rank); }
  u32 engine(i64 rank) const { return static_cast<u32>(num_ranks_ + rank); }
  struct Span {
    i64 first, count;
    i64 number = -1;  // of the route
  };
  // Costs of one-sided transfers and messages over a route. Each byte of an accumulate takes `flops_per_byte` FLOPs from
  // the products of the rank that issued it.
  struct OneSided {
    i64 launch_ps, sync_ps, rate, flops_per_byte;
    i64 fixed_ps() const { return checked_add(launch_ps, sync_ps); }
  };
  OneSided one_sided(Span route, bool adds) const {
    const size_t at = 8 * static_cast<size_t>(route.number) + (adds ? 4 : 0);
    return {one_sided_[at], one_sided_[at + 1], one_sided_[at + 2], one_sided_[at + 3]};
  }
  Span route(i64 source, i64 target, i64 number) const;
  // The route to the next member of a group, by `groups[group] + place`; on route 1, backwards to the one before.
  Span to_next(i64 at, i64 route) const { return to_next_[route][static_cast<size_t>(at)]; }
  // Appends the links of a route to `uses`.
  void links(Span route, std::vector<Use>& uses) const {
    for (i64 at = route.first; at < route.first + route.count; ++at)
      uses.push_back({static_cast<u32>(2 * num_ranks_ + route_links_[static_cast<size_t>(at)] / LINK_WEIGHTS),
                      static_cast<u32>(route_links_[static_cast<size_t>(at)] % LINK_WEIGHTS)});
  }

  // What the exchange of an op of the template takes among a group of a price row.
  i64 exchange_ps(i64 row, i64 price) const {
    const i64 took = exchange_ps_[static_cast<size_t>(row) * num_directions_.size() + static_cast<size_t>(price)];
    require(took >= 0, "machine: an exchange without its time");
    return took;
  }

  // What issuing an op takes its rank's host (`tests/plain_simulator/issue.py`); a call of nothing is not issued.
  i64 issue_ps(const OpRow& row, const ClassOp& of) const {
    if (is_collective(row.kind) && row.kind != Kind::PERMUTE) return issue_[1];
    if (row.kind >= Kind::ALL_GATHER) return issue_[2];
    return row.kind == Kind::CALL && !of.a && !of.b ? 0 : issue_[0];
  }

  i64 flops_per_s, memory_per_s, launch_ps, send_buffer_bytes;
  bool has_host = false;    // ops wait until their rank's host has issued them
  bool host_waits = false;  // and hosts wait for collectives
  bool has_rings;  // the network is a torus or a ring, so that a permute goes hop by hop

 private:
  i64 num_ranks_;
  std::array<i64, 3> issue_{};  // of a kernel, a collective, a transfer
  i64 tile_m_, tile_n_, tile_k_, pack_launch_ps_, pack_per_s_;
  std::vector<Constants> constants_;
  Column num_directions_, one_link_, route_links_, link_rates_, one_sided_, flop_rates_, work_flops_, exchange_ps_;
  std::vector<std::vector<i64>> work_number_;
  std::unordered_map<u64, Span> routes_;
  std::map<SizedKey, Constants> sized_;
  std::vector<Span> to_next_[IMAGE_ROUTES];
};

// A route that a program may take: positions of the source and of the target, and which one: 0; 1 backwards, where both
// directions are as long; 2 to 4 over all NICs of hosts, of a ring and of trees of two and of three hosts.
struct Route {
  i64 source, target, number;
};

u64 route_key(i64 source, i64 target, i64 number, i64 num_ranks);

// All routes that the messages of a program take, given in how many directions the rings of each price row run, and
// whether collectives on it use all NICs of hosts.
std::vector<Route> routes(const Expanded& program, const Column& num_directions, const Column& rails);

}  // namespace meshweave
